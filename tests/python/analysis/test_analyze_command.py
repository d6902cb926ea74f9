"""``phasekv analyze``: every analysis on a tiny model with the demos' own data."""

import json

import pytest
from tiny_models import make_model
from tokenizers_for_tests import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast

from phasekv import analysis
from phasekv.analysis.sample_data import load_notes
from phasekv.cli import main
from phasekv.evaluation.memory_notes import render_note

NOTES = ["--questions", "1", "--retrieved", "2"]
TRAJECTORY = ["--max-tokens", "700"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    text = "\n".join(render_note(note) for note in load_notes().notes)
    backend = byte_level_tokenizer(text, ["<|im_start|>", "<|im_end|>"], ["<think>", "</think>"])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["residuals", *NOTES], analysis.ResidualSpectrum, "shared offset"),
        (["error-bound", *NOTES, "--method", "phaseshift"], analysis.AttentionErrorBound, "bound"),
        (["divergence", *NOTES, "--encode", "alone"], analysis.DivergenceByPosition, "epic"),
        (
            ["subspaces", "--max-tokens", "1500", "--directions", "2"],
            analysis.PhaseSubspaces,
            "between",
        ),
        (["coverage", *TRAJECTORY, "--budget", "256"], analysis.AttentionCoverage, "agentkv"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_runs_with_nothing_but_a_model(folder, tmp_path, capsys, words, kind, says):
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(["analyze", *words, "--model", str(folder), *files]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["analysis"] == words[0]
    assert report["settings"]["model"] == str(folder)
    assert report["subject"].startswith("tiny, ")
    result = analysis.from_json(kind, report["result"])
    assert analysis.to_json(result) == report["result"]
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["residuals", "--questions", "0"], "questions"),
        (["error-bound", *NOTES, "--method", "magic"], "method"),
        (["subspaces", "--index", "3"], "index"),
        (["coverage", *TRAJECTORY, "--policies", "magic", "--budget", "256"], "policy"),
        (["residuals", "--json", "/no/such/folder/a.json"], "output"),
    ],
)
def test_what_is_wrong_is_named(folder, capsys, words, named):
    assert main(["analyze", *words, "--model", str(folder)]) == 2
    assert named in capsys.readouterr().err
