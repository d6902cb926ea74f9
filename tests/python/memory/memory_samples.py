"""Small chunks with known contents for the tests of the memory."""

import dataclasses

import torch
from hypothesis import settings

from phasekv.memory import ModelIdentity, StoredChunk, canonical_rope, chunk_key

IDENTITY = ModelIdentity(
    model="sample@1",
    dtype="float32",
    rope=canonical_rope({"rope_type": "default", "rope_theta": 10000.0}, rotary_dim=4),
    num_layers=2,
    num_kv_heads=1,
    head_size=4,
)

LARGE = dataclasses.replace(IDENTITY, num_layers=8, num_kv_heads=4, head_size=32)
"""Chunks of this model take a while to write: 8 KiB a token."""


def examples(count: int) -> settings:
    """As many examples of a property, the same ones in every run."""
    return settings(max_examples=count, derandomize=True, deadline=None)


def sample_chunk(
    seed: int, length: int = 3, position: int = 0, identity: ModelIdentity = IDENTITY
) -> StoredChunk:
    """A chunk whose tokens, keys and values follow from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50000, (length,), generator=generator).tolist()
    shape = (identity.num_layers, length, identity.local_kv_heads, identity.head_size)
    dtype = getattr(torch, identity.dtype)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return StoredChunk(chunk_key(identity, tokens), tokens, position, keys, values)


def assert_same_chunk(found: StoredChunk | None, expected: StoredChunk) -> None:
    """Compare all fields, tensors bit for bit."""
    assert found is not None
    assert found.key == expected.key
    assert found.position == expected.position
    assert found.tokens.tolist() == expected.tokens.tolist()
    for name in ("keys", "values"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        # As bytes, so that NaN equals itself and -0.0 is not 0.0.
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
