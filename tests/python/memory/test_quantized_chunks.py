"""Chunks that are kept in a few bits: in memory, on disk, and never taken for others."""

import dataclasses
from pathlib import Path

import pytest
import torch
from memory_samples import IDENTITY, assert_same_chunk, sample_chunk

from phasekv import InvalidArgumentError, _core
from phasekv.memory import (
    ChunkQuantizer,
    ChunkStore,
    DiskTier,
    ModelIdentity,
    Quantization,
    QuantizedTensor,
    StoredChunk,
    chunk_key,
)

MODEL = dataclasses.replace(IDENTITY, num_layers=3, num_kv_heads=2, head_size=64)
FREQUENCIES = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
ROPE = _core.Rope(FREQUENCIES.tolist(), 64, "neox")


def identity_of(bits: int | None, model: ModelIdentity = MODEL) -> ModelIdentity:
    return model.quantized(None if bits is None else Quantization(bits))


def chunk_of(bits: int | None, length: int = 96, seed: int = 1) -> StoredChunk:
    """The chunk of `seed`, exact, under the key that a store of this precision gives it."""
    chunk = sample_chunk(seed, length, position=20, identity=MODEL)
    return dataclasses.replace(chunk, key=chunk_key(identity_of(bits), chunk.tokens))


def quantizer_of(bits: int) -> ChunkQuantizer:
    return ChunkQuantizer(Quantization(bits), ROPE)


def turned_back(keys: torch.Tensor, position: int) -> torch.Tensor:
    """Keys ``[tokens, heads, 64]`` of tokens from `position` on, at position 0, in float64."""
    pairs = torch.complex(keys[..., :32].double(), keys[..., 32:].double())
    phases = torch.arange(position, position + len(keys))[:, None] * FREQUENCIES
    pairs = pairs * torch.polar(torch.ones_like(phases), -phases)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_in_memory_are_those_of_the_formula(bits: int) -> None:
    store = ChunkStore(1 << 20, quantizer=quantizer_of(bits))
    chunk = chunk_of(bits)
    assert store.put(chunk) == []
    elements = 2 * 3 * 96 * 2 * 64
    assert store.nbytes == elements * (bits + 1) / 8 + 96 * 4
    kept = store.get(chunk.key)
    assert kept is not None
    assert kept.nbytes == store.nbytes == store.statistics().bytes
    storages = {part.untyped_storage().data_ptr() for part in kept.parts.values()}
    assert len(storages) == 6


def test_the_limit_counts_what_is_kept() -> None:
    """An exact store of this capacity holds one of these chunks, the quantised one nine."""
    capacity = chunk_of(None).nbytes
    exact, quantized = ChunkStore(capacity), ChunkStore(capacity, quantizer=quantizer_of(2))
    for seed in range(12):
        exact.put(chunk_of(None, seed=seed))
        quantized.put(chunk_of(2, seed=seed))
    # 3 bits for 32 of each element, beside 4 bytes for each token.
    assert len(exact) == 1
    assert len(quantized) == capacity // (2 * 3 * 96 * 2 * 64 * 3 // 8 + 96 * 4) == 10
    assert quantized.nbytes <= capacity


@pytest.mark.parametrize("length", [1, 7, 32, 33, 96, 100])
def test_rows_are_near_and_any_part_of_them_is_the_same(length: int) -> None:
    chunk = chunk_of(4, length)
    quantized = quantizer_of(4)(chunk)
    for layer in range(3):
        keys, values = chunk.rows(layer, 0, length)
        for exact, kept in zip(
            (turned_back(keys, chunk.position), values),
            quantized.rows(layer, 0, length),
            strict=True,
        ):
            # Half a step of the widest group, and what float16 takes from scale and zero point.
            step = (exact.max() - exact.min()) / 15
            assert (exact - kept).abs().max() <= 0.5 * step + 0.01
            if length == 1 and exact is not values:  # a key alone in its group is its zero point
                torch.testing.assert_close(kept.double(), exact, atol=2e-3, rtol=0)
    begin, end = length // 3, max(length // 3 + 1, length - 2)
    both = zip(quantized.rows(2, begin, end), quantized.rows(2, 0, length), strict=True)
    for part, whole in both:
        assert torch.equal(part, whole[begin:end])


def test_nothing_is_quantised_twice() -> None:
    quantized = quantizer_of(2)(chunk_of(2))
    assert quantizer_of(2)(quantized) is quantized
    with pytest.raises(InvalidArgumentError, match="kivi-2-32"):
        quantizer_of(4)(quantized)
    store = ChunkStore(1 << 20, quantizer=quantizer_of(2))
    store.put(quantized)
    assert_same_parts(store.get(quantized.key), quantized)


def assert_same_parts(found: StoredChunk | None, expected: StoredChunk) -> None:
    assert found is not None
    assert found.key == expected.key
    assert found.position == expected.position
    assert found.quantization == expected.quantization
    assert found.keys.dtype == expected.keys.dtype
    assert list(found.parts) == list(expected.parts)
    for one, other in zip(found.parts.values(), expected.parts.values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("length", [1, 40, 96])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_hold_codes_and_come_back_bit_for_bit(
    tmp_path: Path, bits: int, length: int, dtype: str
) -> None:
    model = identity_of(bits, dataclasses.replace(MODEL, dtype=dtype))
    chunk = sample_chunk(3, length, identity=model)
    store = ChunkStore(1 << 20, DiskTier(tmp_path, model), quantizer=quantizer_of(bits))
    store.put(chunk)
    assert store.disk is not None
    kept = store.get(chunk.key)
    assert kept is not None
    tensors = sum(part.nbytes for part in kept.parts.values())
    assert tensors < store.disk.nbytes < tensors + 1500 + 8 * length  # a header, and tokens in it
    store.clear()
    assert_same_parts(store.get(chunk.key), kept)
    assert store.statistics().disk_hits == 1
    again = DiskTier(tmp_path, model)
    loaded = again.load(chunk.key)
    assert_same_parts(loaded, kept)
    assert loaded is not None
    assert loaded.nbytes == kept.nbytes
    assert [scanned.key for scanned in again.scan()] == [chunk.key]


def test_another_precision_is_a_miss(tmp_path: Path) -> None:
    """One directory, three stores: each finds its own, also under another's key."""
    chunks = {bits: chunk_of(bits) for bits in (None, 2, 4)}
    assert len({chunk.key for chunk in chunks.values()}) == 3
    stores = {
        bits: ChunkStore(
            1 << 20,
            DiskTier(tmp_path, identity_of(bits)),
            quantizer=None if bits is None else quantizer_of(bits),
        )
        for bits in (None, 2, 4)
    }
    stores[2].put(chunks[2])
    for bits in (None, 4):
        for key in (chunks[bits].key, chunks[2].key):
            assert stores[bits].get(key) is None
            assert list(stores[bits].disk.scan()) == []  # type: ignore[union-attr]
        assert stores[bits].statistics().damaged_files == 0
    stores[None].put(chunks[None])
    assert_same_chunk(stores[None].get(chunks[None].key), chunks[None])
    # A file that is named as one of another precision is not believed.
    disk, other = stores[2].disk, stores[4].disk
    assert disk is not None
    assert other is not None
    disk.path_of(chunks[2].key).rename(other.path_of(chunks[2].key))
    assert stores[4].get(chunks[2].key) is None
    assert stores[4].statistics().damaged_files == 1


def test_a_tier_takes_its_own_precision_only(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, identity_of(2))
    for quantizer in (None, quantizer_of(4), ChunkQuantizer(Quantization(2, 64), ROPE)):
        with pytest.raises(InvalidArgumentError, match="quantization"):
            ChunkStore(1 << 20, disk, quantizer=quantizer)
    for chunk in (chunk_of(2), quantizer_of(4)(chunk_of(2))):
        with pytest.raises(InvalidArgumentError, match="quantization 'kivi-2-32'"):
            disk.put(chunk)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9, 0.999])
def test_a_damaged_file_is_a_miss(tmp_path: Path, place: float) -> None:
    disk = DiskTier(tmp_path, identity_of(2))
    chunk = quantizer_of(2)(chunk_of(2))
    disk.put(chunk)
    path = disk.path_of(chunk.key)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0x20
    path.write_bytes(data)
    assert disk.load(chunk.key) is None
    assert disk.statistics().damaged == 1


def test_views_are_copied() -> None:
    quantized = quantizer_of(2)(chunk_of(2))
    assert quantized.compact() is quantized
    keys = quantized.keys
    assert isinstance(keys, QuantizedTensor)
    larger = torch.zeros(6, *keys.codes.shape[1:], dtype=torch.int32)
    larger[:3] = keys.codes
    view = dataclasses.replace(quantized, keys=dataclasses.replace(keys, codes=larger[:3]))
    assert view.nbytes > quantized.nbytes
    assert view.compact().nbytes == quantized.nbytes
    assert_same_parts(view.compact(), quantized)


def test_keys_and_values_are_quantised_alike() -> None:
    exact = chunk_of(2)
    quantized = quantizer_of(2)(exact)
    with pytest.raises(InvalidArgumentError, match="values"):
        dataclasses.replace(exact, values=quantized.values)
    keys = quantized.keys
    assert isinstance(keys, QuantizedTensor)
    with pytest.raises(InvalidArgumentError, match="scales"):
        dataclasses.replace(keys, scales=keys.scales[:, :-1])


def test_exact_chunks_keep_the_keys_they_had() -> None:
    assert identity_of(None) == MODEL
    digests = {identity_of(bits).digest() for bits in (None, 2, 4)}
    digests.add(MODEL.quantized(Quantization(2, 64)).digest())
    assert len(digests) == 4
