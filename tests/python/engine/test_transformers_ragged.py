"""Policies whose layers and KV heads have budgets of their own, in transformers."""

from __future__ import annotations

import pytest
import torch
from generation import generated
from ragged_reference import RaggedReference
from tiny_models import LAYERS, random_tokens
from transformers import AutoModelForCausalLM

from phasekv.errors import InvalidArgumentError
from phasekv.transformers import evict

pytestmark = pytest.mark.engine

RAGGED = ["adakv", "pyramidkv"]
KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 2, 32, 16


@pytest.fixture(scope="module")
def load(model_folder):
    def load(family="llama", dtype=torch.float32):
        return AutoModelForCausalLM.from_pretrained(model_folder(family, "default"), dtype=dtype)

    return load


@pytest.fixture(scope="module")
def model(load):
    return load()


def held(cache, row=0):
    """[layers][kv heads] numbers of keys."""
    return [(cache.positions(row, layer) >= 0).sum(1).tolist() for layer in range(LAYERS)]


@pytest.mark.parametrize("policy", RAGGED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_budget_that_holds_everything_changes_nothing(load, policy, family):
    """With left padding: a row of 200 tokens, one of 90, one of 1."""
    model = load(family)
    rows = [random_tokens(200, 1), random_tokens(90, 2), random_tokens(1, 3)]
    tokens = [[0] * (200 - len(row)) + row for row in rows]
    mask = [[0] * (200 - len(row)) + [1] * len(row) for row in rows]
    expected, plain = generated(model, tokens, mask)
    with evict(model, policy=policy, budget=2048) as eviction:
        logits, ours = generated(model, tokens, mask)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert [held(eviction.cache, row)[3] for row in range(3)] == [[205] * 2, [95] * 2, [6] * 2]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("adakv", {}),
        ("adakv", {"safeguard": 0.7}),
        ("pyramidkv", {}),
        ("pyramidkv", {"steepness": 1.5}),
    ],
    ids=str,
)
def test_survivors_and_distributions_equal_the_reference(model, model_folder, policy, options):
    """Prompt in two passes, then decoding, over three events."""
    prompt, more = random_tokens(250, 4), random_tokens(45, 5)
    survivors, logprobs, steps = [], [], []
    wish = {"policy": policy, **options}
    with evict(model, budget=128, stride=32, **wish) as eviction, torch.no_grad():
        cache, tokens = None, []
        for part in [prompt[:150], prompt[150:], *([token] for token in more)]:
            events = eviction.cache.reports[0]["compactions"] if eviction.cache else 0
            out = model(torch.tensor([part]), past_key_values=cache)
            cache = out.past_key_values
            tokens += part
            steps.append(len(tokens))
            logprobs.append(out.logits[0, -1].log_softmax(-1))
            if cache.reports[0]["compactions"] > events:
                survivors.append([cache.positions(0, layer) for layer in range(LAYERS)])
    assert len(survivors) == 3
    assert len({tuple(counts) for counts in held(cache)}) > 1
    reference = RaggedReference(str(model_folder()))
    expected = reference.run_ragged(tokens, steps, 128, 32, policy, survivors, **options)
    torch.testing.assert_close(torch.stack(logprobs), expected.float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("policy", RAGGED)
@pytest.mark.parametrize("decoded", [1, 40])
def test_memory_is_what_the_formula_says(model, policy, decoded):
    """ceil(held / 16) blocks of each layer and head."""
    with evict(model, policy=policy, budget=256, stride=32) as eviction:
        generated(model, [random_tokens(1000, 8)], max_new_tokens=decoded)
    cache = eviction.cache
    counts = held(cache)
    seen = 1000 + decoded - 1
    assert sum(map(sum, counts)) == LAYERS * KV_HEADS * (256 + seen % 32)
    assert cache.reports[0]["tokens_kept"] == 256 + seen % 32
    blocks = sum(-(-count // BLOCK_SIZE) for layer in counts for count in layer)
    assert cache.kv_nbytes == blocks * 2 * BLOCK_SIZE * HEAD_SIZE * 4
    assert cache.nbytes > cache.kv_nbytes


def test_rows_of_a_batch_do_not_touch_each_other(model):
    rows = [random_tokens(300, 6), random_tokens(170, 7)]
    alone = []
    for row in rows:
        with evict(model, policy="adakv", budget=128, stride=32):
            alone.append(generated(model, [row], max_new_tokens=40)[0][0])
    tokens = [rows[0], [0] * 130 + rows[1]]
    mask = [[1] * 300, [0] * 130 + [1] * 170]
    with evict(model, policy="adakv", budget=128, stride=32) as eviction:
        together, _ = generated(model, tokens, mask, max_new_tokens=40)
    torch.testing.assert_close(together, torch.stack(alone), atol=2e-4, rtol=0)
    assert [report["compactions"] for report in eviction.cache.reports] == [2, 2]


def test_a_turn_goes_on_with_the_cache(model):
    first, second = random_tokens(180, 9), random_tokens(60, 10)
    with evict(model, policy="pyramidkv", budget=128, stride=32) as eviction:
        _, turn = generated(model, [first], max_new_tokens=10)
        history = turn.sequences[0].tolist() + second
        cache = eviction.cache
        generated(model, [history], past_key_values=cache, max_new_tokens=5)
    assert eviction.cache is cache
    assert cache.reports[0]["tokens_seen"] == 180 + 10 + 60 + 4
    assert sum(map(sum, held(cache))) == LAYERS * KV_HEADS * (128 + 254 % 32)


def test_bfloat16_runs(load):
    model = load(dtype=torch.bfloat16)
    with evict(model, policy="adakv", budget=128, stride=32) as eviction:
        logits, _ = generated(model, [random_tokens(300, 1)])
    assert bool(logits.isfinite().all())
    assert sum(map(sum, held(eviction.cache))) == LAYERS * KV_HEADS * (128 + 305 % 32)


@pytest.mark.parametrize("policy", RAGGED)
def test_a_budget_below_the_protected_tokens_is_refused(model, policy):
    with (
        pytest.raises(InvalidArgumentError, match="budget"),
        evict(model, policy=policy, budget=64, stride=32, recent=80),
    ):
        pass
