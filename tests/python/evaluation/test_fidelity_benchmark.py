"""``benchmarks/fidelity.py`` and its plot with a stand-in engine."""

import argparse
import json

import pytest
from benchmark_scripts import load
from fake_engine import FakeEngine

CONVERSATION = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ana",
        "speaker_b": "Ben",
        "session_1_date_time": "noon",
        "session_1": [
            {"speaker": "Ana", "dia_id": f"D1:{index}", "text": f"My secret is number{index}."}
            for index in range(10)
        ],
    },
    "qa": [
        {"question": f"Who has number{n}?", "answer": "Ana", "evidence": [f"D1:{n}"], "category": 4}
        for n in range(4)
    ],
}


@pytest.fixture
def result(tmp_path, monkeypatch):
    fidelity = load("fidelity.py")
    monkeypatch.setattr(fidelity, "MemoryEngine", FakeEngine)
    locomo = tmp_path / "locomo.json"
    locomo.write_text(json.dumps([CONVERSATION]))
    return fidelity.run(
        argparse.Namespace(
            locomo=locomo,
            questions=4,
            notes=8,
            ratios=[0.1, 0.5],
            methods=["cacheblend", "epic", "agentkvshift", "phaseshift"],
            encode=["alone", "prefix"],
            answer_ratio=0.1,
            answer_encode="prefix",
            engine="vllm",
            model=tmp_path / "model",
        )
    )


def test_rows_cover_methods_ratios_and_encodings(result):
    kept = [(row["method"], row["ratio"]) for row in result["rows"] if row["encode"] == "alone"]
    assert kept == [
        ("full_recompute", 0.0),
        ("full_reuse", 0.0),
        ("cacheblend", 0.1),
        ("cacheblend", 0.5),
        ("epic", 0.1),
        ("agentkvshift", 0.1),
        ("agentkvshift", 0.5),
        ("phaseshift", 0.1),
        ("phaseshift", 0.5),
    ]
    for row in result["rows"]:
        asked = row["encode"] == "prefix" and row["ratio"] in (0.0, 0.1)
        assert (row["f1"] is not None) == asked
        assert row["questions"] == 4
        assert "first_token_seconds" not in row


def test_differences_are_between_equal_ratios(result):
    pairs = {(row["first"], row["second"], row["ratio"]) for row in result["differences"]}
    assert ("phaseshift", "agentkvshift", 0.5) in pairs
    assert len(result["differences"]) == 2 * 3 * 2
    (one,) = (
        row
        for row in result["differences"]
        if (row["encode"], row["first"], row["second"], row["ratio"])
        == ("alone", "phaseshift", "cacheblend", 0.1)
    )
    kl = {row["method"]: row["kl"]["mean"] for row in result["rows"] if row["encode"] == "alone"}
    assert one["kl"]["mean"] == pytest.approx(kl["phaseshift"] - kl["cacheblend"])


def test_no_text_of_the_data_set_is_written(result):
    assert "secret" not in json.dumps(result)
    assert "number" not in json.dumps(result)


def test_plot(result, tmp_path):
    plots = load("plots/fidelity.py")
    picture = tmp_path / "fidelity.png"
    plots.draw(result).savefig(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
