"""Scores of a given answer in transformers, against the model itself."""

import pytest
import torch
from tiny_models import make_model, random_tokens
from tokenizers_for_tests import byte_level_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from phasekv.evaluation.engine import ReuseSetting
from phasekv.evaluation.prompts import MemoryPrompt
from phasekv.evaluation.transformers_engine import TransformersEngine

HEAD, NOTE, QUESTION = (random_tokens(count, count) for count in (9, 40, 11))
ANSWER = random_tokens(4, 3)
PROMPT = MemoryPrompt([*HEAD, *NOTE, *QUESTION], [(9, 49)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_model(tmp_path_factory.mktemp("models") / "tiny", "llama")
    backend = byte_level_tokenizer("some text", [], [])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def plain(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT.token_ids, *ANSWER]])).logits[0]
    return logits[len(PROMPT.token_ids) - 1 : -1].log_softmax(-1)


@pytest.fixture
def engine(folder):
    return TransformersEngine(folder)


def test_full_recompute_is_the_model_itself(engine, plain):
    log_probs, reply = engine.score(PROMPT, ANSWER, ReuseSetting("full_recompute"))
    torch.testing.assert_close(log_probs, plain, atol=1e-4, rtol=0)
    assert reply.report is None
    # The tiny tokenizer spells fewer tokens than the model has.
    engine.tokenizer.decode = lambda tokens, **_: " ".join(map(str, tokens.tolist()))
    best = str(int(plain[0].argmax()))
    assert engine.ask(PROMPT, ReuseSetting("full_recompute"), 2).text.split()[0] == best
    one, _ = engine.score(PROMPT, ANSWER[:1], ReuseSetting("full_recompute"))
    torch.testing.assert_close(one, plain[:1], atol=1e-4, rtol=0)


def test_notes_are_reused_as_they_were_stored_last(engine, plain):
    exact = ReuseSetting("full_reuse")
    engine.store(NOTE, HEAD)
    log_probs, reply = engine.score(PROMPT, ANSWER, exact)
    torch.testing.assert_close(log_probs, plain, atol=1e-4, rtol=0)
    assert reply.report["tokens_reused"] == 40
    engine.store(NOTE)
    alone, _ = engine.score(PROMPT, ANSWER, exact)
    assert (alone - plain).abs().max() > 0.1


def test_prophetkv_does_not_see_the_answer(engine):
    engine.store(NOTE)
    setting = ReuseSetting("prophetkv", 0.5)
    _, reply = engine.score(PROMPT, ANSWER, setting)
    assert reply.report["probes"] == 20
    # The question's 11 tokens ran twice, the answer's did not.
    assert reply.report["charged_ratio"] == pytest.approx((20 + 11) / 40)
