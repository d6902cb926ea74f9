"""Loads the core that was built with the emulated kernels in place of the installed one."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from frozen_imports import pytest_collection_finish, pytest_sessionfinish  # noqa: F401

_MODULE = "phasekv._core"


def pytest_configure() -> None:
    """Before anything imports phasekv; ctest says where the module is."""
    path = os.environ.get("PHASEKV_CORE")
    if path is None:
        pytest.exit("these tests are run by ctest, which sets PHASEKV_CORE", returncode=2)
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_MODULE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
