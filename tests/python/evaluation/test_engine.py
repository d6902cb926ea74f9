"""The agent's engine with the demo model, against transformers."""

import pytest
import torch

from phasekv.evaluation.comparison import AskedQuestion
from phasekv.evaluation.divergence import kl_divergence
from phasekv.evaluation.engine import MemoryEngine, ReuseSetting
from phasekv.evaluation.memory_notes import MemoryNote, Question
from phasekv.evaluation.prompts import PromptBuilder

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NOTES = (
    MemoryNote(
        "a", "noon", "Speaker Anasays : My cat is called Miro.", "A cat.", ("cat",), ("pet",)
    ),
    MemoryNote("b", "noon", "Speaker Bensays : I live in Graz.", "A town.", ("Graz",), ("home",)),
)
ASKED = AskedQuestion(Question("What is the cat called?", "Miro", ("a",), 4), NOTES)
FULL = ReuseSetting("full_recompute")


@pytest.fixture(scope="module")
def engine(demo_model):
    return MemoryEngine(demo_model, max_tokens=512)


@pytest.fixture(scope="module")
def builder(engine):
    return PromptBuilder(engine.tokenizer)


@pytest.fixture(scope="module")
def prompt(builder):
    return builder.prompt(ASKED.notes, ASKED.question.question)


def test_recorded_distributions_are_those_of_transformers(engine, builder, prompt, demo_model):
    from transformers import AutoModelForCausalLM

    gold = builder.tokens(" Miro is the name")
    recorded, _ = engine.score(prompt, gold, FULL)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt.token_ids, *gold]])).logits[0]
    begin = len(prompt.token_ids) - 1
    expected = torch.log_softmax(logits[begin : begin + len(gold)], dim=-1)
    assert recorded.shape == expected.shape
    assert (recorded - expected).abs().max() < 2e-3


def test_greedy_answer_follows_the_recorded_distribution(engine, builder, prompt):
    reply = engine.ask(prompt, FULL, max_tokens=1)
    recorded, _ = engine.score(prompt, builder.tokens("x"), FULL)
    assert builder.tokens(reply.text)[0] == int(recorded[0].argmax())
    assert reply.report is None
    assert reply.first_token_seconds > 0


@pytest.mark.parametrize("with_prefix", [False, True])
def test_stored_notes_are_found_and_full_ratio_changes_nothing(
    engine, builder, prompt, with_prefix
):
    for note in NOTES:
        engine.store(builder.note(note), builder.prefix if with_prefix else ())
    gold = builder.tokens("Miro")
    full, _ = engine.score(prompt, gold, FULL)
    exact, reply = engine.score(prompt, gold, ReuseSetting("phaseshift", 1.0))
    assert reply.report["chunks_found"] == 2
    assert (full - exact).abs().max() < 2e-3
    reused, reply = engine.score(prompt, gold, ReuseSetting("full_reuse"))
    assert reply.report["tokens_reused"] > 0
    assert kl_divergence(full.numpy(), reused.numpy()).mean() > 1e-3


def test_storing_again_replaces(engine, builder, prompt):
    """The first note after its real beginning is exact; alone it is not."""
    gold = builder.tokens("Miro")
    first = builder.prompt(NOTES[:1], ASKED.question.question)
    full, _ = engine.score(first, gold, FULL)
    distance = {}
    for name, prefix in (("alone", ()), ("prefix", builder.prefix), ("again", ())):
        engine.store(builder.note(NOTES[0]), prefix)
        reused, _ = engine.score(first, gold, ReuseSetting("full_reuse"))
        distance[name] = float(kl_divergence(full.numpy(), reused.numpy()).mean())
    assert distance["prefix"] < 1e-6
    assert distance["alone"] > 1e-3
    assert distance["again"] == pytest.approx(distance["alone"], rel=1e-4)
