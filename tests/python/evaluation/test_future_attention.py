"""The share of future attention kept, against a replay in transformers' own attention weights."""

import numpy as np
import pytest
import torch

from phasekv._core import phase_names
from phasekv.evaluation.future_attention import (
    AttentionRecorder,
    HeldRecorder,
    StepAttention,
    kept_share,
)
from phasekv.evaluation.replay import PolicySetting, ReplayEngine

TOKENS, STRIDE, BUDGET = 300, 64, 128


def uniform_step(begin, end, heads=2):
    """Queries of phase 0 that attend all keys before them alike, those of phase 1 only key 0."""
    mass = torch.zeros(len(phase_names()), heads, end)
    for position in range(begin, end):
        mass[0, :, : position + 1] += 1 / (position + 1)
    mass[1, :, 0] = end - begin
    return StepAttention(begin, end, [mass])


def test_all_keys_keep_all_attention_but_do_not_count():
    held = {4: [torch.arange(4).expand(2, -1)]}
    assert kept_share([uniform_step(0, 4), uniform_step(4, 8)], held)["all"] is None


def test_only_what_is_held_or_new_is_kept():
    held = {4: [torch.tensor([[0, 3], [1, 2]])]}
    shares = kept_share([uniform_step(0, 4), uniform_step(4, 8)], held)
    # Of the four old keys two are held, the query's own step always is.
    expected = np.mean([1 - 2 / (position + 1) for position in range(4, 8)])
    assert shares[phase_names()[0]] == pytest.approx(expected)
    assert shares[phase_names()[1]] == pytest.approx(0.5)  # one head holds key 0, one does not
    assert shares[phase_names()[2]] is None
    assert shares["all"] == pytest.approx((expected + 0.5) / 2)


@pytest.mark.engine
@pytest.mark.slow
def test_recorded_in_the_engine_equals_transformers(demo_model):
    from transformers import AutoModelForCausalLM

    engine = ReplayEngine(demo_model, max_tokens=TOKENS, stride=STRIDE)
    text = " ".join(f"Order {number} was sent to shelf {number * 7 % 13}." for number in range(60))
    tokens = engine.tokenizer.encode(text, add_special_tokens=False)[:TOKENS]
    phases = np.arange(TOKENS) // 10 % 3
    full = AttentionRecorder(phases, engine.scale)
    engine.replay(tokens, [0], PolicySetting("full"), observer=full)
    held = HeldRecorder()
    engine.replay(tokens, [0], PolicySetting("snapkv"), BUDGET, observer=held)
    shares = kept_share(full.steps, held.held)

    model = AutoModelForCausalLM.from_pretrained(
        demo_model, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        layers = model(torch.tensor([tokens]), output_attentions=True).attentions
    kept, total = np.zeros(4), np.zeros(4)
    for begin in range(STRIDE, TOKENS, STRIDE):
        if held.held[begin][0].shape[1] == begin:
            continue
        rows = range(begin, min(begin + STRIDE, TOKENS))
        for layer, weights in enumerate(layers):
            positions = held.held[begin][layer]
            group = weights.shape[1] // len(positions)
            for head in range(weights.shape[1]):
                seen = np.zeros(TOKENS, dtype=bool)
                seen[positions[head // group].numpy()] = True
                seen[begin:] = True
                own = weights[0, head, rows].numpy()
                np.add.at(kept, phases[rows], own[:, seen].sum(1))
                np.add.at(total, phases[rows], own.sum(1))
    assert total[:3].min() > 0
    for index, name in enumerate(phase_names()[:3]):
        assert shares[name] == pytest.approx(kept[index] / total[index], abs=1e-4)
        assert 0.2 < shares[name] < 0.999
    assert shares["all"] == pytest.approx(kept.sum() / total.sum(), abs=1e-4)
