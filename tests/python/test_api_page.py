"""The API reference is what its script makes of the docstrings."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="module")
def make_api(repository):
    spec = importlib.util.spec_from_file_location("make_api", repository / "docs" / "make_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(make_api):
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.page(), "run docs/make_api.py"


def test_sections_become_lists_and_cpp_has_its_signatures(make_api):
    def example(one, two=3):
        """Does this.

        Parameters
        ----------
        one : int
            First,
            on two lines.

        Raises
        ------
        ValueError
            For ``two``.
        """

    assert make_api.described(example) == (
        "Does this.\n\n*Parameters*\n\n- `one` (int): First, on two lines.\n\n"
        "*Raises*\n\n- `ValueError`: For `two`."
    )
    assert make_api.signature_of(example, "example") == "(one, two=3)"
    lines = make_api.class_lines(
        "Method", make_api.importlib.import_module("phasekv.methods").Method
    )
    assert lines[0].startswith("### `Method(name, *, frame=None")
    assert any(line.startswith("**`Method.select(*, segments") for line in lines)
