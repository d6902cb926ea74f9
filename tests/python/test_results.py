"""The figures in the docs are those of the committed results."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest


@pytest.fixture
def tables(repository):
    script = repository / "benchmarks" / "plots" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_tables_are_made_from_the_committed_results(tables):
    for page in tables.pages():
        assert tables.filled(page) == page.read_text(encoding="utf-8"), (
            "run benchmarks/plots/tables.py"
        )


@pytest.mark.parametrize("page", ["results.md", "methods/any.md"])
def test_a_page_without_a_table_is_refused(tables, tmp_path, page):
    path = tmp_path / page
    path.parent.mkdir(exist_ok=True)
    path.write_text("# `epic`\n\nno tables here")
    with pytest.raises(ValueError, match=r"prefill|measured"):
        tables.filled(path)


@pytest.fixture
def results(tables, tmp_path, monkeypatch):
    """A committed result of two methods, one of them with a variant."""
    rows = [
        {"method": name, "ratio": ratio, "tokens": tokens, "charged_ratio": ratio, "bound": 4.0}
        | {"speedup": 2.0, "speedup_spread": {"min": 1.0, "max": 3.0}, "share": 0.5}
        for name, ratio, tokens in [("epic", 0.1, 4096), ("epic", 0.1, 1024), ("other", 0.2, 4096)]
    ]
    machine = {"processor": "abacus", "cores": 1, "instruction_set": "beads"}
    (tmp_path / "prefill.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)


@pytest.mark.usefixtures("results")
def test_a_page_shows_what_was_measured_of_its_methods_and_says_what_was_not(tables):
    text = tables.measured({"epic"}, tables.MEASURED["methods"])
    first, second = text.split("\n\n", maxsplit=1)
    assert first.startswith("Distance from [full recompute]")
    assert first.endswith(" of `epic`: not measured.")
    assert "abacus, 1 cores, beads." in second
    assert "| `epic` | 4096 | 0.1 |" in second
    assert "1024" not in second
    assert "other" not in second
    assert "transformers" not in second
    two = tables.measured({"nobody", "epic"}, tables.MEASURED["methods"]).split("\n\n")
    assert two[1] == first.replace("epic", "nobody")


def test_lines_belong_to_the_method_before_the_comma(tables):
    lines = [
        {"method": "snapkv", "ratio": 0.5},
        {"setting": "agentkv, no markers", "policy": "agentkv"},
        {"first": "agentkv, no markers", "second": "agentkv"},
        {"method": "expected_attention, queries = tokens"},
    ]
    assert [tables.name_in(line) for line in lines] == [
        "snapkv",
        "agentkv",
        "agentkv",
        "expected_attention",
    ]
