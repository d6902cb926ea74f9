"""Bars on long work: in terminals and notebooks, and nowhere else."""

import io
import sys
import types

import pytest

from phasekv.analysis import attention_error_bound, residual_spectrum
from phasekv.analysis.progress import progress
from phasekv.methods import Method


class Terminal(io.StringIO):
    """Standard error that is looked at by a person."""

    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """Puts something in the place of standard error and returns it."""

    def put(errors):
        monkeypatch.setattr(sys, "stderr", errors)
        return errors

    return put


def test_a_terminal_shows_how_far_it_is(shown):
    errors = shown(Terminal())
    assert list(progress([3, 5], "layers")) == [3, 5]
    assert "layers: 100%" in errors.getvalue()
    assert "2/2" in errors.getvalue()


def test_a_notebook_does_too(shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    errors = shown(io.StringIO())
    assert list(progress([3, 5], "layers")) == [3, 5]
    assert "layers: 100%" in errors.getvalue()


def test_a_file_or_pipe_stays_clean(shown):
    errors = shown(io.StringIO())
    assert list(progress([3, 5], "layers")) == [3, 5]
    assert errors.getvalue() == ""


def test_analyses_show_them(shown, measured):
    for run, name in (
        (residual_spectrum, "chunks"),
        (lambda prompts: attention_error_bound(prompts, Method("epic")), "prompts"),
    ):
        errors = shown(Terminal())
        run([measured])
        assert f"{name}: 100%" in errors.getvalue()
