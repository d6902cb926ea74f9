"""The figures in the docs are those of the committed results."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture
def tables(repository):
    script = repository / "benchmarks" / "plots" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_made_from_the_committed_results(tables):
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.fill(page) == page, "run benchmarks/plots/tables.py"


def test_a_page_without_a_table_is_refused(tables):
    with pytest.raises(ValueError, match="prefill"):
        tables.fill("no tables here")
