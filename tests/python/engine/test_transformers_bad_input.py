"""What transformers' adapter refuses by name, and that nothing of it stays on the model."""

from __future__ import annotations

import copy

import pytest
import torch
from generation import generated
from tiny_models import LAYERS, random_tokens
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from phasekv.errors import Error, InvalidArgumentError, MissingCapabilityError, UnsupportedError
from phasekv.quantization import Quantization
from phasekv.transformers import ChunkMemory, QuantizedCache, evict, quantize

pytestmark = pytest.mark.engine

TOKENS = [random_tokens(200, 1)]
LONGER = [TOKENS[0] + random_tokens(30, 2)]


def evicting(model, **options):
    return evict(model, **{"policy": "snapkv", "budget": 128, "stride": 32, **options})


def quantizing(model, **options):
    return quantize(model, **{"bits": 2, "residual": 32, **options})


CONTEXTS = pytest.mark.parametrize("context", [evicting, quantizing])


@pytest.fixture(scope="module")
def load(model_folder):
    def load(**changes):
        folder = model_folder("llama", "default", **changes)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return load


@pytest.fixture(scope="module")
def loaded(load):
    return load()


@pytest.fixture
def model(loaded):
    """A model that every test must leave as it was."""
    hooks = [dict(module._forward_pre_hooks) for module in loaded.modules()]
    attention = loaded.config._attn_implementation
    before = loaded(torch.tensor(TOKENS)).logits
    yield loaded
    assert loaded.config._attn_implementation == attention
    assert [dict(module._forward_pre_hooks) for module in loaded.modules()] == hooks
    assert torch.equal(loaded(torch.tensor(TOKENS)).logits, before)


def fails_in(model, layer):
    """A hook by which a layer raises."""

    def fail(*_):
        raise RuntimeError("a layer that fails")

    return model.model.layers[layer].register_forward_pre_hook(fail)


@CONTEXTS
def test_an_exception_inside_leaves_the_model_as_it_was(model, context):
    def generate_and_fail():
        with context(model):
            generated(model, TOKENS)
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        generate_and_fail()


@CONTEXTS
def test_an_exception_in_a_layer_leaves_the_model_as_it_was(model, context):
    hook = fails_in(model, 2)
    with pytest.raises(RuntimeError, match="a layer that fails"), context(model):
        generated(model, TOKENS)
    hook.remove()


def test_an_exception_in_a_prefill_leaves_the_model_as_it_was(model):
    memory = ChunkMemory(model, None)
    chunk = memory.encode(random_tokens(40, 3))

    def fail(*_):
        raise RuntimeError("a layer that fails")

    mlp = model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer that fails"):
        memory.prefill([[5, 6], chunk, [7, 8]])
    mlp.remove()
    assert memory.prefill([[5, 6], chunk, [7, 8]]).report["chunks_found"] == 1


def test_a_cache_whose_pass_failed_is_not_gone_on_with(model):
    with evicting(model) as eviction:
        generated(model, TOKENS)
        cache = eviction.cache
        hook = fails_in(model, 2)
        with pytest.raises(RuntimeError, match="a layer that fails"):
            generated(model, LONGER, past_key_values=cache)
        hook.remove()
        with pytest.raises(InvalidArgumentError, match="ended by an error"):
            generated(model, LONGER, past_key_values=cache)
        generated(model, LONGER)  # a new one does


@CONTEXTS
@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 2}, {"num_key_value_heads": 4}], ids=str
)
def test_a_cache_of_another_model_is_refused(model, load, context, changes):
    """Also of one with the same sizes."""
    other = load(**changes)
    with context(other) as generation:
        generated(other, TOKENS)
    cache = generation.cache
    with context(model) as mine:
        with pytest.raises(InvalidArgumentError, match="past_key_values = a cache of"):
            generated(model, LONGER, past_key_values=cache)
        generated(model, TOKENS)
    assert mine.cache is not cache
    with context(other) as again:  # and it is still its own model's
        generated(other, LONGER, past_key_values=cache)
    assert again.cache is cache


@pytest.mark.parametrize(
    ("context", "options"),
    [
        (evicting, {"budget": 256}),
        (evicting, {"policy": "h2o"}),
        (evicting, {"queries": 16}),
        (quantizing, {"bits": 4}),
        (quantizing, {"residual": 64}),
    ],
)
def test_a_cache_of_other_settings_is_refused(model, context, options):
    with context(model) as generation:
        generated(model, TOKENS)
    with (
        context(model, **options),
        pytest.raises(InvalidArgumentError, match="a cache of other settings"),
    ):
        generated(model, LONGER, past_key_values=generation.cache)


def test_a_cache_made_by_hand_has_to_fit_the_model(model):
    few = QuantizedCache(LAYERS - 1, Quantization(2), residual=32)
    with pytest.raises(InvalidArgumentError, match="past_key_values = 3 layers"):
        generated(model, TOKENS, past_key_values=few)
    heads = QuantizedCache(LAYERS, Quantization(2), residual=32)
    heads.update(torch.zeros(1, 4, 40, 32), torch.zeros(1, 4, 40, 32), 0)
    with pytest.raises(InvalidArgumentError, match="1 rows of 4 heads of 32"):
        model(torch.tensor(TOKENS), past_key_values=heads)


@pytest.mark.parametrize("outer", [evicting, quantizing])
@pytest.mark.parametrize("inner", [evicting, quantizing])
def test_a_context_inside_of_another_is_refused(model, outer, inner):
    with outer(model) as generation:
        with pytest.raises(UnsupportedError, match="inside of"), inner(model):
            pass
        generated(model, TOKENS)  # and the outer one is still there
    assert generation.cache is not None
    with inner(model):  # left, it stands in nobody's way
        pass


def test_notes_are_not_encoded_while_evicting(model):
    memory = ChunkMemory(model, None)
    with evicting(model), pytest.raises(UnsupportedError, match=r"phasekv\.transformers\.evict"):
        memory.encode(random_tokens(40, 4))
    assert len(memory.store) == 0


def test_an_evicting_cache_works_inside_of_the_context_only(model):
    with evicting(model) as eviction:
        generated(model, TOKENS)
    with pytest.raises(InvalidArgumentError, match="inside of phasekv"):
        generated(model, LONGER, past_key_values=eviction.cache)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"budget": budget}, "budget") for budget in (0, -16, 1.5, True, None, "128", 100)),
        *(({"stride": stride}, "stride") for stride in (0, -32, 1.5, 50)),
    ],
    ids=str,
)
def test_budgets_and_strides_that_are_none_are_named(model, options, named):
    with pytest.raises(InvalidArgumentError) as error, evicting(model, **options):
        pass
    assert error.value.argument == named


@pytest.mark.parametrize(
    ("tokens", "mask", "named"),
    [
        (TOKENS[0], None, "input_ids"),
        ([[]], None, "input_ids"),
        (TOKENS, [[1] * 50], "attention_mask"),
        (TOKENS, [[1] * 200] * 2, "attention_mask"),
        (TOKENS, [[[[1] * 200] * 200]], "attention_mask"),
    ],
)
def test_shapes_are_named(model, tokens, mask, named):
    tokens = torch.tensor(tokens, dtype=torch.int64)
    mask = None if mask is None else torch.tensor(mask)
    with evicting(model), pytest.raises(Error) as error:
        model(tokens, attention_mask=mask)
    assert error.value.argument == named


def test_another_number_of_rows_is_named(model):
    with evicting(model) as eviction:
        generated(model, TOKENS)
        with pytest.raises(InvalidArgumentError, match=r"input_ids = \[2, 230\]"):
            model(torch.tensor(LONGER * 2), past_key_values=eviction.cache)


def test_dtypes_and_devices_are_named(loaded):
    double = copy.deepcopy(loaded).double()
    for context in (evicting, quantizing):
        with pytest.raises(InvalidArgumentError, match="float64"), context(double):
            generated(double, TOKENS)
    with pytest.raises(InvalidArgumentError, match="float64"):
        ChunkMemory(double, None)
    elsewhere = copy.deepcopy(loaded).to("meta")
    for context in (evicting, quantizing):
        with pytest.raises(MissingCapabilityError, match="device = meta"), context(elsewhere):
            pass
    with pytest.raises(MissingCapabilityError, match="device = meta"):
        ChunkMemory(elsewhere, None)


def test_a_model_of_which_a_part_is_elsewhere_is_named(loaded):
    spread = copy.deepcopy(loaded)
    spread.model.layers[-1].to("meta")
    for context in (evicting, quantizing):
        with pytest.raises(MissingCapabilityError, match="device = meta"), context(spread):
            pass
    with pytest.raises(MissingCapabilityError, match="device = meta"):
        ChunkMemory(spread, None)


def test_a_model_that_is_moved_later_is_named(loaded):
    moved = copy.deepcopy(loaded)
    memory = ChunkMemory(moved, None)
    note = memory.encode(TOKENS[0])
    moved.to("meta")
    with pytest.raises(MissingCapabilityError, match="device = meta"):
        memory.encode(LONGER[0])
    with pytest.raises(MissingCapabilityError, match="device = meta"):
        memory.prefill([note, LONGER[0]])
    moved = copy.deepcopy(loaded)
    with evicting(moved), pytest.raises(MissingCapabilityError, match="device = meta"):
        moved.to("meta")(torch.tensor(TOKENS, device="meta"))
    # Of a model on "meta" transformers 4.57 cannot make the keys.
    cache = QuantizedCache(LAYERS, Quantization(2), residual=32)
    keys = torch.zeros(1, 2, 40, 32, device="meta")
    with pytest.raises(MissingCapabilityError, match="device = meta"):
        cache.update(keys, keys, 0)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SMALL))


def gemma3():
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL))


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, vocab_size=64))


@pytest.mark.parametrize(
    ("make", "named"),
    [(gemma2, "layer_types"), (gemma3, "layer_types"), (t5, "model = t5"), (str, "model = str")],
)
def test_models_that_are_not_taken_are_refused_by_name(make, named):
    model = make()
    for context in (evicting, quantizing):
        with pytest.raises(Error, match=named), context(model):
            pass
    with pytest.raises(Error, match=named):
        ChunkMemory(model, None)


def test_a_memory_names_what_it_cannot_read(model):
    memory = ChunkMemory(model, None)
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        memory.encode("a text")
    with pytest.raises(InvalidArgumentError, match="tokens = 512: expected below 512"):
        memory.encode([5, 512])
    with pytest.raises(InvalidArgumentError, match="ratio = nan"):
        memory.prefill([[5, 6], [7]], recompute_ratio=float("nan"))


def test_chunks_of_another_model_or_rotation_are_not_found(model, load, model_folder, tmp_path):
    """One directory of chunks: what is not this model's is computed, and said to be missing."""
    memory = ChunkMemory(model, None, directory=tmp_path)
    chunk = memory.encode(random_tokens(40, 5))
    memory.store.flush()
    yarn = AutoModelForCausalLM.from_pretrained(model_folder("llama", "yarn"), dtype=torch.float32)
    for other in (load(num_key_value_heads=4), yarn):
        theirs = ChunkMemory(other, None, directory=tmp_path)
        assert theirs.encode(chunk.tokens).key != chunk.key
        report = theirs.prefill([[5, 6], chunk, [7, 8]]).report
        assert report["missed"] == [{"range": [2, 42], "reason": "not stored"}]
    assert (
        ChunkMemory(model, None, directory=tmp_path)
        .prefill([[5], chunk, [7]])
        .report["chunks_found"]
    )
