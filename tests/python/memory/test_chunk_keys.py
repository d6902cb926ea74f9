"""Content keys: what changes them and what does not."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_samples import IDENTITY, examples

from phasekv import InvalidArgumentError
from phasekv.memory import ModelIdentity, canonical_rope, chunk_key

TOKENS = list(range(100, 120))


def test_key_is_256_bits_in_hexadecimal() -> None:
    key = chunk_key(IDENTITY, TOKENS)
    assert len(bytes.fromhex(key)) == 32
    assert key == key.lower()


def test_key_does_not_change_between_versions_of_the_code() -> None:
    """Stores on disk outlive the code; a change here needs a new FORMAT_VERSION."""
    identity = ModelIdentity("model", "bfloat16", "{}", 2, 3, 64, "adapter", 1)
    assert identity.digest().hex() == (
        "f8138373b1f42816e5540034a83f3312a064bb48fe65763441b97c7a8c0a98f8"
    )
    assert chunk_key(identity, [1, 2, 3], salt="salt", adapter="other") == (
        "616f3f01aa34a9b44d29deec34394575f2b75e901c29b79dca800cabdf3378b2"
    )


@pytest.mark.parametrize(
    "tokens", [tuple(TOKENS), np.array(TOKENS), np.array(TOKENS, np.int32), torch.tensor(TOKENS)]
)
def test_key_depends_on_the_numbers_and_not_on_their_container(tokens: Sequence[int]) -> None:
    assert chunk_key(IDENTITY, tokens) == chunk_key(IDENTITY, TOKENS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("dtype", "bfloat16"),
        ("rope", canonical_rope({"rope_theta": 500000.0}, 4)),
        ("num_layers", 3),
        ("num_kv_heads", 2),
        ("head_size", 8),
        ("adapter", "lora:1"),
        ("tensor_parallel_size", 2),
        ("quantization", "kivi-2-32"),
    ],
)
def test_every_field_of_the_model_changes_the_key(field: str, value: str | int) -> None:
    other = dataclasses.replace(IDENTITY, **{field: value})
    assert other.digest() != IDENTITY.digest()
    assert chunk_key(other, TOKENS) != chunk_key(IDENTITY, TOKENS)


def test_every_field_of_the_model_is_covered_by_the_test_above() -> None:
    mark = test_every_field_of_the_model_changes_the_key.pytestmark[0]
    assert {case[0] for case in mark.args[1]} == {
        field.name for field in dataclasses.fields(ModelIdentity)
    }


def test_salt_and_adapter_of_one_name_do_not_collide() -> None:
    """vllm#44701, sglang#24638: a LoRA name equal to a cache salt gave the same key."""
    keys = {
        chunk_key(IDENTITY, TOKENS),
        chunk_key(IDENTITY, TOKENS, salt="alice"),
        chunk_key(IDENTITY, TOKENS, adapter="alice"),
        chunk_key(IDENTITY, TOKENS, salt="alice", adapter="alice"),
        chunk_key(dataclasses.replace(IDENTITY, adapter="alice"), TOKENS),
        chunk_key(dataclasses.replace(IDENTITY, adapter="alice"), TOKENS, salt="alice"),
    }
    assert len(keys) == 6


names = st.text(max_size=8)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=8)


@examples(200)
@given(names, names, token_lists, names, names, token_lists)
def test_different_fields_give_different_keys(
    salt: str,
    adapter: str,
    tokens: list[int],
    other_salt: str,
    other_adapter: str,
    other_tokens: list[int],
) -> None:
    same = (salt, adapter, tokens) == (other_salt, other_adapter, other_tokens)
    key = chunk_key(IDENTITY, tokens, salt, adapter)
    other = chunk_key(IDENTITY, other_tokens, other_salt, other_adapter)
    assert (key == other) == same


@examples(200)
@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_moving_text_between_fields_changes_the_key(a: str, b: str, c: str) -> None:
    cut = chunk_key(IDENTITY, TOKENS, salt=a + b, adapter=c)
    moved = chunk_key(IDENTITY, TOKENS, salt=a, adapter=b + c)
    assert (cut == moved) == (b == "")


def test_key_does_not_depend_on_what_stands_around_the_chunk() -> None:
    """LMCache#2026: a chunk looked up with the next passage glued on was another chunk."""
    passage = list(range(468))
    prompt = [7, 8, *passage, *range(900, 982)]
    assert chunk_key(IDENTITY, prompt[2 : 2 + 468]) == chunk_key(IDENTITY, passage)
    assert chunk_key(IDENTITY, prompt[2:]) != chunk_key(IDENTITY, passage)


def test_shuffled_documents_keep_their_keys() -> None:
    """LMCache#4663: reuse decayed since the key to store was chained to the prefix."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 50000, size=112).tolist() for _ in range(14)]
    first = {chunk_key(IDENTITY, document) for document in documents}
    for _ in range(5):
        order = generator.permutation(14)
        prompt = [token for index in order for token in documents[index]]
        found = {chunk_key(IDENTITY, prompt[112 * i : 112 * (i + 1)]) for i in range(14)}
        assert found == first


@pytest.mark.parametrize(
    "tokens",
    [[-1], [2**31], [1.5], ["a"], [[1, 2]], 5, [None], np.array([1.0]), [2**70], [True]],
)
def test_bad_tokens_are_refused_by_name(tokens: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        chunk_key(IDENTITY, tokens)  # type: ignore[arg-type]
    assert caught.value.argument == "tokens"


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -1, "2", True, 1.0])
def test_bad_sizes_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        dataclasses.replace(IDENTITY, **{field: value})
    assert (caught.value.argument, caught.value.value) == (field, repr(value))


def test_bad_names_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="model = None"):
        dataclasses.replace(IDENTITY, model=None)


def test_rope_text_depends_on_values_and_not_on_their_order() -> None:
    one = canonical_rope({"rope_theta": 10000.0, "rope_type": "default"}, 64)
    other = canonical_rope({"rope_type": "default", "rope_theta": 10000.0}, 64)
    assert one == other
    assert one != canonical_rope({"rope_type": "default", "rope_theta": 10000.0}, 32)
    assert one != canonical_rope({"rope_type": "default", "rope_theta": 10000.5}, 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_rope_values_that_are_not_json_are_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        canonical_rope({"rope_theta": value}, 64)
    assert caught.value.argument == "rope"


@pytest.mark.parametrize(("heads", "ranks", "local"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (4, 8, 1)])
def test_kv_heads_of_one_rank(heads: int, ranks: int, local: int) -> None:
    """vllm-ascend#3366: with more ranks than KV heads, heads are replicated."""
    identity = dataclasses.replace(IDENTITY, num_kv_heads=heads, tensor_parallel_size=ranks)
    assert identity.local_kv_heads == local
