"""A quantised cache in transformers: KIVI's rules, against the same rules in plain torch."""

from __future__ import annotations

import pytest
import torch
from generation import generated
from tiny_models import random_tokens
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.quantization import Quantization
from phasekv.transformers import QuantizedCache, quantize
from phasekv.transformers_versions import new_tokens_of
from quantized_reference import kept

pytestmark = pytest.mark.engine

LAYERS, ELEMENTS = 4, 2 * 2 * 32  # of keys and values, KV heads, head size: per token and layer


@pytest.fixture(scope="module")
def load(model_folder):
    def load(family="llama", dtype=torch.float32, **changes):
        folder = model_folder(family, "default", **changes)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    return load


@pytest.fixture(scope="module")
def model(load):
    return load()


class ReferenceLayer(CacheLayerMixin):
    """Keeps everything, and quantises anew what a pass may only see quantised."""

    is_sliding = False

    def __init__(self, bits, group_size, residual):
        super().__init__()
        self.rule = bits, group_size
        self.residual = residual
        self.passes = []

    def lazy_initialization(self, *_):
        pass

    def update(self, keys, values, *_, **__):
        before = self.get_seq_length()
        self.passes.append((keys, values))
        keys, values = (torch.cat(states, dim=2) for states in zip(*self.passes, strict=True))
        for begin in range(0, before - self.residual + 1, self.residual):
            block = slice(begin, begin + self.residual)
            keys[:, :, block] = kept(keys[:, :, block], *self.rule, dim=2)
        old = slice(0, max(0, before - self.residual))
        values[:, :, old] = kept(values[:, :, old], *self.rule, dim=3)
        return keys, values

    def get_seq_length(self):
        return sum(keys.shape[2] for keys, _ in self.passes)

    def get_mask_sizes(self, query):
        return self.get_seq_length() + new_tokens_of(query), 0

    def get_max_length(self):
        return -1

    def get_max_cache_shape(self):
        return -1


def logits_by(model, parts, cache):
    """Logits of every token, given in several passes."""
    with torch.no_grad():
        return torch.cat(
            [model(torch.tensor([part]), past_key_values=cache).logits[0] for part in parts]
        )


@pytest.mark.parametrize(
    ("bits", "group_size", "residual"), [(2, 32, 64), (4, 32, 32), (2, 16, 32), (4, 64, 128)]
)
def test_equals_the_rules_in_plain_torch(model, bits, group_size, residual):
    """A prompt, tokens one by one across the end of a block, a second turn, one by one again."""
    tokens = random_tokens(330, bits)
    ends = [150, *range(151, 200), 270, *range(271, 331)]
    parts = [tokens[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    reference = Cache(layers=[ReferenceLayer(bits, group_size, residual) for _ in range(LAYERS)])
    expected = logits_by(model, parts, reference)
    with quantize(model, bits=bits, group_size=group_size, residual=residual) as generation:
        first = logits_by(model, parts[:1], None)
        ours = torch.cat([first, logits_by(model, parts[1:], generation.cache)])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    exact = logits_by(model, parts, DynamicCache(config=model.config))
    assert (ours[150:] - exact[150:]).abs().max() > 0.01  # the test would see a cache that is exact
    report = generation.cache.report
    assert report["tokens"] == 330
    assert report["quantized_key_tokens"] == 330 // residual * residual
    assert report["quantized_value_tokens"] == 330 - residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_measured_and_those_of_the_formula(load, dtype):
    model = load(dtype=dtype)
    with quantize(model, bits=2, residual=64) as generation:
        model(torch.tensor([random_tokens(300, 3)] * 2))
    cache = generation.cache
    report = cache.report
    tensors = [
        tensor
        for layer in cache.layers
        for part in (layer.key_part, layer.value_part)
        for rows in (part._quantized,)
        for tensor in (rows.codes, rows.scales, rows.zero_points, part._recent)
    ]
    assert report["bytes"] == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    quantized = 2 * LAYERS * (256 + 300 - 64) * ELEMENTS // 2
    exact = 2 * LAYERS * (300 - 256 + 64) * ELEMENTS // 2
    assert report["bytes_by_formula"] == quantized * 3 / 8 + exact * dtype.itemsize
    assert report["bytes"] == report["bytes_by_formula"]
    assert report["bytes_exact"] == 2 * LAYERS * 300 * ELEMENTS * dtype.itemsize


def answered(model, tokens, mask=None, **options):
    mask = torch.ones_like(torch.tensor(tokens)) if mask is None else mask
    logits, answer = generated(model, tokens, mask, **{"max_new_tokens": 20, **options})
    return answer.sequences, logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_while_nothing_is_quantised_it_is_transformers_own(load, family):
    """Left padding too; and a batch's rows do not touch each other."""
    model = load(family)
    rows = [random_tokens(100, 4), random_tokens(60, 5)]
    tokens = [rows[0], [0] * 40 + rows[1]]
    mask = torch.tensor([[1] * 100, [0] * 40 + [1] * 60])
    expected, expected_logits = answered(model, tokens, mask)
    with quantize(model, bits=2, residual=128) as generation:
        sequences, logits = answered(model, tokens, mask)
    assert torch.equal(sequences, expected)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    assert generation.cache.report["quantized_key_tokens"] == 0
    assert generation.cache.report["quantized_value_tokens"] == 0
    assert not model._forward_pre_hooks


def test_rows_of_a_batch_do_not_touch_each_other(model):
    rows = [random_tokens(200, 6), random_tokens(200, 7)]
    with quantize(model, bits=2, residual=32):
        alone = [answered(model, [row])[1][0] for row in rows]
        together = answered(model, rows)[1]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=0)


def test_beams_and_samples_of_one_prompt(model):
    """A block is quantised on the way; four bits of a wide residual hardly change the search."""
    tokens = [random_tokens(60, 8), random_tokens(60, 9)]
    plain, _ = answered(model, tokens, num_beams=3, max_new_tokens=12)
    with quantize(model, bits=4, residual=128):
        same, _ = answered(model, tokens, num_beams=3, max_new_tokens=12)
    assert torch.equal(same, plain)
    with quantize(model, bits=2, residual=32) as generation:
        cache = generation_after(model, generation, tokens)
        before = [part.followed_by(empty_like(part)) for part in cache._parts()]
        order = torch.tensor([1, 1, 0])
        cache.batch_select_indices(order)
        for part, whole in zip(cache._parts(), before, strict=True):
            assert torch.equal(part.followed_by(empty_like(part)), whole[order])
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0]))
        for part, whole in zip(cache._parts(), before, strict=True):
            assert torch.equal(part.followed_by(empty_like(part)), whole[torch.tensor([0, 1])])


def generation_after(model, generation, tokens):
    model(torch.tensor(tokens))
    return generation.cache


def empty_like(part):
    return part._recent[:, :, :0]


def test_a_turn_goes_on_with_the_cache(model):
    history = random_tokens(90, 10)
    with quantize(model, bits=2, residual=32) as generation:
        sequences, _ = answered(model, [history])
        cache = generation.cache
        longer = sequences[0].tolist() + random_tokens(30, 11)
        answered(model, [longer], past_key_values=cache)
    assert generation.cache is cache
    assert cache.report["tokens"] == 90 + 20 + 30 + 19
    by_hand = QuantizedCache(LAYERS, Quantization(2), residual=32)
    again, _ = answered(model, [history], past_key_values=by_hand)
    assert torch.equal(again, sequences)
    by_hand.reset()
    assert by_hand.nbytes == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bits": 3}, "bits"),
        ({"bits": 2, "group_size": 20}, "group_size"),
        ({"bits": 2, "residual": 100}, "residual"),
        ({"bits": 2, "residual": 0}, "residual"),
    ],
    ids=str,
)
def test_bad_options_are_named(model, options, named):
    with pytest.raises(InvalidArgumentError, match=named), quantize(model, **options):
        pass
    assert not model._forward_pre_hooks


def test_what_cannot_be_combined_is_refused(load, model):
    tokens = torch.tensor([random_tokens(40, 12)])
    with quantize(model, bits=2) as generation:
        model(tokens)
        with pytest.raises(UnsupportedError, match="assisted decoding"):
            generation.cache.crop(10)
        exact = model.generate(tokens, past_key_values=None, max_new_tokens=1)
        assert exact.shape == (1, 41)
    plain = model(tokens).past_key_values
    with (
        quantize(model, bits=2),
        pytest.raises(InvalidArgumentError, match="past_key_values = DynamicCache"),
    ):
        model(tokens, past_key_values=plain)
    sliding = load("mistral", sliding_window=64)
    with (
        pytest.raises(UnsupportedError, match=r"sliding_window|layer_types"),
        quantize(sliding, bits=2),
    ):
        pass
