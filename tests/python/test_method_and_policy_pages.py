"""Every reuse method and every policy has a page, which names the parameters that it takes."""

from __future__ import annotations

import re

import pytest
import torch

from phasekv import InvalidArgumentError, _core
from phasekv.eviction.settings import OPTIONS
from phasekv.methods import Method, method_names

# A value of each option that everything which has the option takes.
METHOD_OPTIONS = {"frame": "rotated", "weight": "one", "probes": "sum", "boundary_tokens": 3}
POLICY_OPTIONS = {
    "queries": 16,
    "sinks": 2,
    "recent": 3,
    "group": "max",
    "pooling": "none",
    "pooling_kernel": 3,
    "marker_queries": False,
    "phase_quota": 0.5,
    "redundancy": 0.5,
    "safeguard": 0.5,
    "steepness": 2.0,
}
# What a table has for the budget's half and for the length of the query buffer.
BUDGET, QUERIES = 1000, 64

STATISTICS = _core.TriattentionStatistics(
    model="a model",
    rope=_core.Rope([1.0, 0.1], 4, "neox"),
    mean_query=torch.zeros(1, 1, 2, 2),
    mean_norm=torch.zeros(1, 1, 2),
)


def pages_in(folder):
    """By name, the text of the page in whose title it is."""
    texts = [page.read_text() for page in folder.glob("*.md")]
    return {name: text for text in texts for name in names_in_title(text)}


def names_in_title(text):
    return re.findall(r"`(\w+)`", text.partition("\n")[0])


def table_in(text, section):
    """The first table of a section: what stands first in each line, and what second."""
    part = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", part, re.MULTILINE))


def make_policy(name, **options):
    if name == "triattention":
        options["statistics"] = STATISTICS
    return _core.Policy(name, **options)


def accepts(make, name, option, value):
    try:
        make(name, **{option: value})
    except InvalidArgumentError as error:
        if error.argument != option:
            raise
        return False
    return True


@pytest.fixture(scope="module")
def method_pages(repository):
    return pages_in(repository / "docs" / "methods")


@pytest.fixture(scope="module")
def policy_pages(repository):
    return pages_in(repository / "docs" / "policies")


def test_every_name_has_a_page_and_every_page_a_name(repository, method_pages, policy_pages):
    assert sorted(method_pages) == method_names()
    assert sorted(policy_pages) == _core.policy_names()
    for folder in ("methods", "policies"):
        for page in (repository / "docs" / folder).glob("*.md"):
            assert page.stem in names_in_title(page.read_text())


def test_the_summaries_link_to_all_pages(repository):
    for summary, folder in (("reuse.md", "methods"), ("eviction.md", "policies")):
        text = (repository / "docs" / summary).read_text()
        for page in (repository / "docs" / folder).glob("*.md"):
            for name in names_in_title(page.read_text()):
                assert f"[`{name}`]({folder}/{page.name})" in text


def test_every_page_has_the_same_parts(method_pages, policy_pages):
    for pages, parameters in ((method_pages, "Parameters"), (policy_pages, "Options")):
        for text in pages.values():
            parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
            assert parts == ["Formula", parameters, "What it costs", "What it loses"]


@pytest.mark.parametrize("name", method_names())
def test_a_page_has_the_parameters_of_its_method(method_pages, name):
    accepted = {
        option for option, value in METHOD_OPTIONS.items() if accepts(Method, name, option, value)
    }
    if not name.startswith("full_"):
        accepted.add("ratio")
    assert set(table_in(method_pages[name], "Parameters")) == accepted


@pytest.mark.parametrize("name", _core.policy_names())
def test_a_page_has_the_options_of_its_policy(policy_pages, name):
    assert set(POLICY_OPTIONS) == set(OPTIONS)
    table = table_in(policy_pages[name], "Options")
    assert set(table) == {
        option
        for option, value in POLICY_OPTIONS.items()
        if accepts(make_policy, name, option, value)
    }
    sinks, recent = make_policy(name).protected_tokens(BUDGET)
    assert int(table.get("sinks", sinks)) == sinks
    stated = table.get("recent", str(recent))
    if stated == "as `queries`":
        stated = table["queries"]
        assert make_policy(name, queries=QUERIES).protected_tokens(BUDGET)[1] == QUERIES
    elif stated.startswith("half"):
        stated = str((BUDGET - sinks) // 2)
    assert int(stated) == recent
