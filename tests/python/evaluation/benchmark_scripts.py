"""Loads the scripts in benchmarks/, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from commands import REPOSITORY


def load(path: str) -> ModuleType:
    """The script at ``path`` below benchmarks/, as a module."""
    file = REPOSITORY / "benchmarks" / path
    spec = importlib.util.spec_from_file_location(Path(path).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
