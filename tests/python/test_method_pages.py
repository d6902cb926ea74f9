"""Every reuse method has a page, which names the parameters that it takes."""

from __future__ import annotations

import re

import pytest

from phasekv import InvalidArgumentError
from phasekv.methods import Method, method_names

# A value of each option that every method which has the option takes.
OPTIONS = {"frame": "rotated", "weight": "one", "probes": "sum", "boundary_tokens": 3}
TITLE = re.compile(r"\A# (.+)\n")
PARAMETER = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def pages(repository):
    """By method, the text of its page."""
    texts = [page.read_text() for page in (repository / "docs" / "methods").glob("*.md")]
    return {name: text for text in texts for name in re.findall(r"`(\w+)`", TITLE.match(text)[1])}


def test_every_method_has_a_page_and_every_page_a_method(repository, pages):
    assert sorted(pages) == method_names()
    for page in (repository / "docs" / "methods").glob("*.md"):
        assert page.stem in pages


def accepts(name, option):
    try:
        Method(name, **{option: OPTIONS[option]})
    except InvalidArgumentError as error:
        if error.argument != option:
            raise
        return False
    return True


@pytest.mark.parametrize("name", method_names())
def test_the_page_has_the_parameters_of_the_method(pages, name):
    section = pages[name].partition("## Parameters\n")[2].partition("\n## ")[0]
    accepted = {option for option in OPTIONS if accepts(name, option)}
    if not name.startswith("full_"):
        accepted.add("ratio")
    assert set(PARAMETER.findall(section)) == accepted


@pytest.mark.parametrize("name", method_names())
def test_the_page_has_all_its_parts(pages, name):
    parts = re.findall(r"^## (.+)$", pages[name], re.MULTILINE)
    assert parts == ["Formula", "Parameters", "What it costs", "What it loses"]
