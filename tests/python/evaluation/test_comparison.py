"""What the comparison makes of an engine's answers."""

import numpy as np
import pytest
from fake_engine import FakeEngine, expected_kl

from phasekv.evaluation.comparison import (
    AskedQuestion,
    Comparison,
    Outcome,
    compare_settings,
    encode_notes,
)
from phasekv.evaluation.engine import ReuseSetting
from phasekv.evaluation.memory_notes import MemoryNote, Question
from phasekv.evaluation.prompts import PromptBuilder

NOTES = tuple(MemoryNote(f"n{index}", "t", f"content {index}", "", (), ()) for index in range(3))
ASKED = AskedQuestion(Question("Why?", "the battery was stolen", ("n1", "n9"), 4), NOTES)
SETTINGS = {
    "full_recompute": ReuseSetting("full_recompute"),
    "full_reuse": ReuseSetting("full_reuse", 0.0),
    "cacheblend": ReuseSetting("cacheblend", 0.25),
}


def run(turn=0, answer_tokens=None):
    engine = FakeEngine()
    builder = PromptBuilder(engine.tokenizer)
    outcomes = compare_settings(
        engine, builder, ASKED, SETTINGS, turn=turn, answer_tokens=answer_tokens or {}
    )
    return engine, builder, outcomes


def test_divergence_is_from_full_recompute():
    _, _, outcomes = run()
    assert outcomes["full_recompute"].kl == pytest.approx(0.0)
    for method in ("full_reuse", "cacheblend"):
        assert outcomes[method].kl == pytest.approx(expected_kl(method), rel=1e-5)
    assert outcomes["full_reuse"].top1.tolist() == [1.0] * 22
    assert outcomes["cacheblend"].top1.tolist() == [0.0] * 22
    assert outcomes["cacheblend"].nll == pytest.approx(700.0)


def test_tokens_computed():
    _, builder, outcomes = run()
    prompt = builder.prompt(NOTES, "Why?").followed_by(builder.tokens("the battery was stolen"))
    total = len(prompt.token_ids)
    notes = sum(end - begin for begin, end in prompt.chunks)
    assert outcomes["full_recompute"].tokens_computed == total
    assert outcomes["full_recompute"].charged_ratio == 1.0
    assert outcomes["full_reuse"].tokens_computed == total - notes
    assert outcomes["cacheblend"].tokens_computed == pytest.approx(total - 0.75 * notes)
    assert outcomes["cacheblend"].chunks_found == 3


def test_answers_only_where_asked_for():
    engine, _, outcomes = run(answer_tokens={"full_recompute": 24})
    assert [call for call in engine.calls if call[0] == "ask"] == [("ask", "full_recompute", 24)]
    assert outcomes["full_recompute"].answer == "the <b>battery</b> was stolen"
    assert outcomes["full_recompute"].f1 == pytest.approx(2 * (2 / 3) * (2 / 3) / (4 / 3))
    assert outcomes["full_recompute"].first_token_seconds == (4.0, 4.0)
    assert outcomes["full_reuse"].answer is None
    assert outcomes["full_reuse"].f1 is None


@pytest.mark.parametrize("turn", range(4))
def test_order_turns_with_the_question(turn):
    engine, _, outcomes = run(turn=turn)
    methods = list(SETTINGS)
    assert [call[1] for call in engine.calls] == methods[turn % 3 :] + methods[: turn % 3]
    assert list(outcomes) == methods


def test_encoding_alone_and_after_the_prefix():
    engine = FakeEngine()
    builder = PromptBuilder(engine.tokenizer)
    tokens = sum(len(builder.note(note)) for note in NOTES)
    assert encode_notes(engine, builder, NOTES, "alone") == tokens
    assert encode_notes(engine, builder, NOTES, "prefix") == tokens + 3 * len(builder.prefix)
    chunks = [tuple(builder.note(note)) for note in NOTES]
    assert engine.stored == [((), chunk) for chunk in chunks] + [
        (tuple(builder.prefix), chunk) for chunk in chunks
    ]


def test_evidence_recall():
    assert ASKED.evidence_recall == 0.5
    assert AskedQuestion(Question("Why?", "x", (), 4), NOTES).evidence_recall == 1.0


def outcome(kl, seconds, f1=None):
    return Outcome(
        kl=np.array(kl),
        nll=np.array(kl) * 2,
        top1=np.ones(len(kl)),
        first_token_seconds=tuple(seconds),
        tokens_computed=10.0,
        prompt_tokens=20,
        charged_ratio=0.5,
        chunks_found=2,
        chunks_missed=1,
        f1=f1,
    )


@pytest.fixture
def comparison():
    comparison = Comparison()
    for full, own in (([2.0], [1.0, 1.0]), ([6.0, 10.0], [2.0]), ([9.0], [1.0])):
        comparison.add(
            {
                "full_recompute": outcome([0.0, 0.0], full),
                "a": outcome([1.0, 3.0], own, f1=0.5),
            }
        )
    return comparison


def test_summary(comparison):
    row = comparison.summary("a")
    assert row["questions"] == 3
    assert row["positions"] == 6
    assert row["kl"]["mean"] == 2.0
    assert row["nll"]["mean"] == 4.0
    assert row["f1"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert row["first_token_seconds"] == 1.0
    assert row["chunks_found"] == 6
    assert row["chunks_missed"] == 3
    assert comparison.summary("full_recompute")["f1"] is None


def test_speedup_is_the_median_of_the_questions_ratios(comparison):
    assert comparison.speedup("a") == pytest.approx(4.0)  # of 2 / 1, 8 / 2 and 9 / 1


def test_difference_is_first_minus_second(comparison):
    assert comparison.difference("kl", "a", "full_recompute").mean == 2.0
    assert comparison.difference("kl", "full_recompute", "a").mean == -2.0
