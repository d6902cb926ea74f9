"""The script of the gallery: figures and findings of the page of analyses, from results as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from benchmark_scripts import load

from phasekv import analysis

RANDOM = np.random.default_rng(0)
ANGLES = np.full((2, 1, 2, 2), 60.0)
ANGLES[..., [0, 1], [0, 1]] = 30.0  # of a phase and itself

RESULTS = {
    "residuals": analysis.ResidualSpectrum(
        kinds=("keys", "values"),
        layers=np.array([1.0, 2.0]),
        offset_share=np.array([[[0.5, 0.7], [0.6, 0.6]], [[0.1, 0.2], [0.2, 0.3]]]),
        without_structure=np.array([0.01, 0.03]),
        before=RANDOM.random((2, 2, 4)),
        after=RANDOM.random((2, 2, 4)),
    ),
    "error-bound": analysis.AttentionErrorBound(
        method="epic",
        ratio=0.1,
        layers=np.array([2.0, 3.0]),
        measured=np.array([0.1, 0.3]),
        uncorrected=np.array([0.4, 0.6]),
        parts=RANDOM.random((4, 2)) + 1,
        tightest=0.75,
    ),
    "divergence": analysis.DivergenceByPosition(
        key=np.concatenate([np.full((8, 3), 2.0), np.full((8, 3), 0.5)]),
        value=np.concatenate([np.full((8, 3), 3.0), np.full((8, 3), 0.25)]),
        methods=("epic",),
        probes=np.array([[1.0] * 3 + [0.0] * 12 + [1.0]]),
        ratio=0.25,
    ),
    "subspaces": analysis.PhaseSubspaces(
        phases=("think", "act"), angles=ANGLES, directions=5, tokens=40, frame="rotated", random=75
    ),
    "coverage": analysis.AttentionCoverage(
        policies=("agentkv", "h2o"),
        phases=("think", "act"),
        by_key=np.array([[0.5, 0.25], [0.125, np.nan]]),
        by_query=np.array([[0.5, 0.25, 0.375], [0.125, 0.75, 0.625]]),
        tokens=900,
        budget=256,
        stride=128,
    ),
}
SAYS = {
    "residuals": ["keys: 60% of the energy", "values: 20% of", "2% if nothing were shared"],
    "error-bound": ["error 0.2000 of the output with epic, 0.5000", "over its bound: 0.750"],
    "divergence": ["50% of all, diverge 2.00 times", "3.00 times", "epic: 75% of its probes"],
    "subspaces": ["30.0°, between phases 60.0°, random subspaces 75.0°", "in 100% of the heads"],
    "coverage": ["agentkv keeps 0.375", "0.250 act", "h2o keeps 0.625", "0.125 think"],
}


@pytest.fixture
def gallery(tmp_path, monkeypatch):
    """The script, with a page and results of its own: every analysis but the last one."""
    gallery = load("plots/gallery.py")
    monkeypatch.setattr(gallery, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(gallery, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gallery.py"])
    places = [f"## {name}\n<!-- {name} -->\n<!-- end -->\n" for name in gallery.ANALYSES]
    gallery.PAGE.write_text("\n".join(places), encoding="utf-8")
    for name, words in list(gallery.ANALYSES.items())[:-1]:
        kind = words.split()[0]
        report = {
            "analysis": kind,
            "subject": f"the model of {name}",
            "machine": {"processor": "abacus", "versions": {"torch": "9.9"}},
            "result": analysis.to_json(RESULTS[kind]),
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    return gallery


def place_of(gallery, name):
    text = gallery.PAGE.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]


def test_page_and_figures_are_made_of_the_results(gallery, tmp_path):
    gallery.main()
    *present, missing = gallery.ANALYSES
    for name in present:
        found = place_of(gallery, name)
        assert found.startswith(f"the model of {name} (`phasekv analyze {gallery.ANALYSES[name]}`)")
        assert f"\n\nabacus, torch 9.9.\n\n![the model of {name}](" in found
        assert found.endswith(f"/{name}.png)\n")
        for words in SAYS[gallery.ANALYSES[name].split()[0]]:
            assert words in found
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert place_of(gallery, missing) == ""
    assert not (tmp_path / f"{missing}.png").exists()
    text = gallery.PAGE.read_text(encoding="utf-8")
    assert gallery.fill(text) == text


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_of_result_has_its_words_and_its_figure(gallery, kind):
    assert set(gallery.KINDS) == set(RESULTS)
    described = "\n".join(gallery.in_words(RESULTS[kind]))
    assert all(words in described for words in SAYS[kind])
    figure = gallery.KINDS[kind][1](RESULTS[kind], "a model")
    assert "a model" in figure.get_suptitle()


def test_a_page_without_a_place_is_refused(gallery):
    with pytest.raises(ValueError, match="residuals"):
        gallery.fill("no places here")


def test_measuring_runs_the_command_and_leaves_its_json(gallery, monkeypatch):
    asked = []

    def phasekv(words):
        asked.append(words)
        return 0 if len(asked) == 1 else 2

    monkeypatch.setattr(gallery, "phasekv", phasekv)
    path = str(gallery.RESULTS / "subspaces_rotated.json")
    gallery.measure("subspaces_rotated")
    assert asked == [["analyze", "subspaces", "--frame", "rotated", "--json", path]]
    with pytest.raises(SystemExit, match="coverage"):
        gallery.measure("coverage")


def test_the_committed_page_is_that_of_the_committed_results():
    gallery = load("plots/gallery.py")
    page = gallery.PAGE.read_text(encoding="utf-8")
    assert gallery.fill(page) == page, "run benchmarks/plots/gallery.py"
