"""The replay engine with the demo model, against transformers and its own reports."""

import pytest
import torch

from phasekv.evaluation.divergence import kl_divergence
from phasekv.evaluation.replay import PolicySetting, ReplayEngine, first_evicted_row

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BUDGET, STRIDE, TOKENS = 128, 64, 420
FULL = PolicySetting("full")


@pytest.fixture(scope="module")
def engine(demo_model):
    return ReplayEngine(demo_model, max_tokens=TOKENS, stride=STRIDE)


@pytest.fixture(scope="module")
def tokens(engine):
    text = " ".join(f"Order {number} was sent to shelf {number * 7 % 13}." for number in range(60))
    return engine.tokenizer.encode(text, add_special_tokens=False)[:TOKENS]


@pytest.fixture(scope="module")
def rows():
    return list(range(0, TOKENS, 5))


@pytest.fixture(scope="module")
def full(engine, tokens, rows):
    return engine.replay(tokens, rows, FULL)


def test_full_kv_is_the_model_itself(engine, tokens, rows, full, demo_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, rows]
    expected = torch.log_softmax(logits, dim=-1)
    assert (engine.log_probs(full.hidden) - expected).abs().max() < 2e-3
    assert full.report["tokens_kept"] == TOKENS


def test_a_window_differs_from_its_first_event_on(engine, tokens, rows, full):
    replay = engine.replay(tokens, rows, PolicySetting("agentkv", {"sinks": 4}), BUDGET)
    divergence = kl_divergence(engine.log_probs(full.hidden), engine.log_probs(replay.hidden))
    first = first_evicted_row(BUDGET, STRIDE)
    before = [row < first for row in rows]
    assert abs(divergence[before]).max() < 1e-6
    assert divergence[[not one for one in before]].mean() > 1e-3
    assert replay.report["policy"] == "agentkv"
    assert replay.report["tokens_kept"] <= BUDGET + STRIDE - 1


def test_a_request_gets_its_own_policy(engine, tokens, rows):
    kept = [
        engine.replay(tokens, rows, PolicySetting(policy), BUDGET).hidden
        for policy in ("streaming_llm", "h2o")
    ]
    assert not torch.equal(*kept)
