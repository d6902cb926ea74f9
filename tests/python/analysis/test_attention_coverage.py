"""Coverage against transformers' own attention weights and a policy whose choice is known."""

import io

import numpy as np
import pytest
import torch
from tiny_models import random_tokens
from transformers import AutoModelForCausalLM

from phasekv.analysis import attention_coverage, plot_attention_coverage
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.trajectories import LabelledTokens

COUNT, BUDGET, STRIDE = 250, 96, 32


@pytest.fixture(scope="module")
def labelled():
    phases = (np.arange(COUNT) // 20 % 3).astype(np.uint8)
    tokens = np.array(random_tokens(COUNT, 9), np.int32)
    return LabelledTokens(tokens, phases, np.zeros(COUNT, np.bool_))


def test_equals_transformers_own_weights(tiny_model, tiny_folder, labelled):
    policies = {
        "newest": {"policy": "streaming_llm", "sinks": 4},
        "newest, no sinks": {"policy": "streaming_llm", "sinks": 0},
        "snapkv": {"policy": "snapkv"},
    }
    result = attention_coverage(tiny_model, labelled, policies, budget=BUDGET, stride=STRIDE)
    eager = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    with torch.inference_mode():
        layers = eager(torch.tensor(labelled.tokens[None].astype(np.int64)), output_attentions=True)
    weights = np.stack([one[0].numpy() for one in layers.attentions]).mean((0, 1))
    for row, sinks in enumerate((4, 0)):
        kept, total = np.zeros((2, 4)), np.zeros((2, 4))  # by key, by query
        for begin in range(BUDGET + STRIDE, COUNT, STRIDE):
            held = np.zeros(COUNT, dtype=bool)
            held[:sinks] = held[begin - BUDGET + sinks : begin] = True
            for query in range(begin, min(begin + STRIDE, COUNT)):
                for key in range(query + 1):
                    phase = labelled.phases[query]
                    total[1, phase] += weights[query, key]
                    kept[1, phase] += weights[query, key] * (held[key] or key >= begin)
                    if key < begin:
                        total[0, labelled.phases[key]] += weights[query, key]
                        kept[0, labelled.phases[key]] += weights[query, key] * held[key]
        shares = kept[:, :3] / total[:, :3]
        np.testing.assert_allclose(result.by_key[row, :3], shares[0], atol=1e-4)
        np.testing.assert_allclose(result.by_query[row, :3], shares[1], atol=1e-4)
        assert result.by_query[row, 4] == pytest.approx(kept[1].sum() / total[1].sum(), abs=1e-4)
        assert result.by_query[row, 4] < 0.9
    assert np.isnan(result.by_key[:, 3]).all()
    assert np.isnan(result.by_query[:, 3]).all()
    assert tiny_model.config._attn_implementation != "phasekv"
    figure = plot_attention_coverage(result, "a model")
    assert "96 of 250" in figure.get_suptitle()
    figure.savefig(io.BytesIO(), format="png")


def test_too_short_to_evict_is_refused(tiny_model, labelled):
    with pytest.raises(InvalidArgumentError, match="250 tokens"):
        attention_coverage(tiny_model, labelled, {}, budget=224, stride=32)
