"""``benchmarks/quantized_fidelity.py`` with a tiny random model."""

import argparse
import importlib
import json

import pytest
from benchmark_scripts import load
from fake_engine import CharacterTokenizer

CONVERSATION = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ana",
        "speaker_b": "Ben",
        "session_1_date_time": "noon",
        "session_1": [
            {"speaker": "Ana", "dia_id": f"D1:{index}", "text": f"My secret is number{index}."}
            for index in range(4)
        ],
    },
    "qa": [
        {"question": f"Who has number{n}?", "answer": "Ana", "evidence": [f"D1:{n}"], "category": 4}
        for n in range(2)
    ],
}


class Tokenizer(CharacterTokenizer):
    def decode(self, tokens, **_):
        return "".join(map(chr, tokens.tolist()))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized_fidelity")
    importlib.import_module("tiny_models").make_model(folder / "model", "llama", "default")
    script = load("quantized_fidelity.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.AutoTokenizer, "from_pretrained", lambda _: Tokenizer())
        locomo = folder / "locomo.json"
        locomo.write_text(json.dumps([CONVERSATION]))
        return script.run(
            argparse.Namespace(
                locomo=locomo,
                questions=2,
                notes=3,
                ratio=0.1,
                bits=[4, 2],
                methods=["full_reuse", "cacheblend", "agentkvshift"],
                model=folder / "model",
            )
        )


def test_rows_cover_methods_and_precisions(result):
    assert [(row["method"], row["bits"]) for row in result["rows"]] == [
        ("full_recompute", None),
        *(
            (method, bits)
            for method in ("full_reuse", "cacheblend", "agentkvshift")
            for bits in (None, 4, 2)
        ),
    ]
    for row in result["rows"]:
        assert row["questions"] == 2
        assert row["f1"] is not None
        reuses = row["method"] != "full_recompute"
        assert row["chunks_found"] == (2 * 3 if reuses else 0)
        assert (row["kl"]["mean"] > 1e-6) == reuses


def test_quantised_notes_differ_from_exact_ones(result):
    by = {(line["first"], line["second"]): line for line in result["differences"]}
    assert len(by) == 3 * 2 + 3
    for bits in (4, 2):
        line = by[f"full_reuse, {bits} bits", "full_reuse, exact"]
        assert line["kl"]["mean"] != 0
    assert ("agentkvshift, 2 bits", "cacheblend, 2 bits") in by


def test_stores_and_errors_are_measured(result):
    bytes_of = {store["bits"]: store["bytes"] for store in result["stores"]}
    assert bytes_of[None] > bytes_of[4] > bytes_of[2]
    for store in result["stores"]:
        # Tokens are kept as well, and last groups are not full.
        assert 1.0 <= store["bytes"] / store["bytes_by_formula"] < 1.1
    fine, coarse = (error for error in result["key_errors"])
    for name in ("cached", "unrotated"):
        assert 0 < fine[name] < coarse[name] < 1


def test_no_text_of_the_data_set_is_written(result):
    assert "secret" not in json.dumps(result)
    assert "number" not in json.dumps(result)
