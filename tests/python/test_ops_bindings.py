"""The ops through Python, against float64 torch and against vLLM's own cache writer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import phasekv
from phasekv import _core

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_rows(
    tokens: int, heads: int, head_size: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, head_size, generator=generator).to(dtype)


def cache(
    heads: int, block_size: int, head_size: int, dtype: torch.dtype, blocks: int = 5
) -> torch.Tensor:
    return torch.full((blocks, heads, block_size, 2 * head_size), math.nan, dtype=dtype)


def rotate(
    rows: torch.Tensor, deltas: torch.Tensor, frequencies: list[float], pairing: str
) -> torch.Tensor:
    """Rotate [T, H, D] by delta * frequency in float64, by complex multiplication."""
    rows = rows.double()
    pairs = len(frequencies)
    turned, rest = rows[..., : 2 * pairs], rows[..., 2 * pairs :]
    if pairing == "neox":
        values = torch.complex(turned[..., :pairs], turned[..., pairs:])
    else:
        values = torch.complex(turned[..., 0::2].contiguous(), turned[..., 1::2].contiguous())
    phases = deltas.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    values = values * torch.polar(torch.ones_like(phases), phases)[:, None, :]
    if pairing == "neox":
        turned = torch.cat([values.real, values.imag], dim=-1)
    else:
        turned = torch.stack([values.real, values.imag], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def head_tokens(kv_cache: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one block as [H, block_size, D], by the documented arrangement of ``vec``."""
    heads, block_size, double = kv_cache.shape[1:]
    head_size = double // 2
    halves = kv_cache[block].reshape(heads, 2, block_size * head_size)
    keys = halves[:, 0].reshape(heads, head_size, block_size).transpose(1, 2)
    return keys, halves[:, 1].reshape(heads, block_size, head_size)


@pytest.fixture(params=_core.supported_cpu_isas(), autouse=True)
def cpu_isa(request: pytest.FixtureRequest) -> Any:
    before = _core.active_cpu_isa()
    _core.set_active_cpu_isa(request.param)
    yield request.param
    _core.set_active_cpu_isa(before)


@pytest.fixture(scope="module")
def write_to_cache() -> Callable[..., str]:
    """vLLM's own writer into its CPU cache; returns the layout's name."""
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    def write(
        kv_cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> str:
        blocks, heads, block_size, double = kv_cache.shape
        halves = kv_cache.view(blocks, heads, 2 * block_size, double // 2).chunk(2, dim=2)
        name = _get_attn_isa(kv_cache.dtype, block_size, double // 2)
        ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, name)
        return str(name)

    return write


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_size", [32, 64, 80, 128])
def test_layout_is_vllms(
    write_to_cache: Callable[..., str], dtype: torch.dtype, block_size: int, head_size: int
) -> None:
    tokens = 2 * block_size + 3
    keys = random_rows(tokens, 2, head_size, dtype, seed=1)
    values = random_rows(tokens, 2, head_size, dtype, seed=2)
    # From the middle of block 3 to its end, block 1, and the beginning of block 4.
    positions = torch.arange(tokens) + block_size // 2
    slots = torch.tensor([3, 1, 4])[positions // block_size] * block_size + positions % block_size
    theirs = torch.zeros(5, 2, block_size, 2 * head_size, dtype=dtype)
    name = write_to_cache(theirs, keys, values, slots)

    paged = _core.cpu_paged_kv(name, theirs)
    read = torch.empty_like(keys)
    _core.gather_blocks(blocks=paged.key, slots=slots, out=read)
    assert torch.equal(read, keys)
    _core.gather_blocks(blocks=paged.value, slots=slots, out=read)
    assert torch.equal(read, values)

    ours = torch.zeros_like(theirs)
    paged = _core.cpu_paged_kv(name, ours)
    _core.scatter_blocks(rows=keys, slots=slots, blocks=paged.key)
    _core.scatter_blocks(rows=values, slots=slots, blocks=paged.value)
    assert torch.equal(ours, theirs)


def test_paged_kv_describes_the_cache_and_follows_its_strides() -> None:
    whole = torch.zeros(4, 6, 16, 64)
    part = whole[1:3, ::2]
    paged = _core.cpu_paged_kv("vec", part)
    assert (paged.num_blocks, paged.num_heads) == (2, 3)
    assert (paged.block_size, paged.head_size) == (16, 32)
    rows = random_rows(1, 3, 32, torch.float32)
    _core.scatter_blocks(rows=rows, slots=int64([21]), blocks=paged.key)
    assert torch.equal(head_tokens(whole, 2)[0][::2, 5], rows[0])
    assert torch.count_nonzero(whole[:, 1::2]) == 0


@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [16, 40, 64])
def test_rotate_keys(pairing: str, dtype: torch.dtype, rotary_dim: int) -> None:
    config = _core.RopeConfig(rotary_dim=rotary_dim, theta=1e5)
    frequencies = _core.rope_frequencies(config)
    rope = _core.Rope(frequencies, rotary_dim, pairing)
    keys = random_rows(6, 3, 64, dtype)
    deltas = int64([0, 1, -1, 1000, -131071, 131071])
    out = torch.empty_like(keys)
    _core.rotate_keys(keys=keys, deltas=deltas, rope=rope, out=out)
    close(out, rotate(keys, deltas, frequencies, pairing), dtype)
    assert torch.equal(out[0], keys[0])
    _core.rotate_keys(keys=keys, deltas=deltas, rope=rope, out=keys)
    assert torch.equal(keys, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_divergence(dtype: torch.dtype) -> None:
    fresh = random_rows(7, 3, 40, dtype, seed=1)
    cached = random_rows(7, 6, 40, torch.float32, seed=2)[:, ::2]
    out = torch.empty(7)
    _core.divergence(fresh=fresh, cached=cached, out=out)
    expected = (fresh.double() - cached.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=0)


def test_select_top_takes_pinned_first_and_breaks_ties_by_index() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 0.5, 9.0, 2.0, 2.0])
    starts = int64([0, 4, 4, 7])
    counts = int64([2, 5, 1])
    assert _core.select_top(scores=scores, segment_starts=starts, counts=counts) == [1, 2, 4]
    pinned = torch.tensor([0, 0, 0, 1, 0, 1, 1], dtype=torch.uint8)
    chosen = _core.select_top(scores=scores, segment_starts=starts, counts=counts, pinned=pinned)
    assert chosen == [1, 3, 5, 6]
    scores[3] = math.nan
    with pytest.raises(_core.InvalidArgumentError, match=r"scores\[3\] = nan"):
        _core.select_top(scores=scores, segment_starts=starts, counts=counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotates", [False, True])
def test_mean_residual(dtype: torch.dtype, rotates: bool) -> None:
    frequencies = _core.rope_frequencies(_core.RopeConfig(rotary_dim=32))
    fresh = random_rows(9, 2, 48, dtype, seed=1)
    cached = random_rows(5, 2, 48, torch.float32, seed=2)
    fresh_rows, cached_rows = int64([8, 0, 3, 3]), int64([4, 1, 0, 2])
    starts = int64([0, 3, 3, 4])
    deltas = int64([-7, 90, 0, 4000])
    out = torch.full((3, 2, 48), math.nan)
    _core.mean_residual(
        fresh=fresh,
        cached=cached,
        fresh_rows=fresh_rows,
        cached_rows=cached_rows,
        segment_starts=starts,
        fresh_deltas=-deltas if rotates else None,
        cached_deltas=deltas if rotates else None,
        rope=_core.Rope(frequencies, 32, "neox") if rotates else None,
        out=out,
    )
    left, right = fresh[fresh_rows].double(), cached[cached_rows].double()
    if rotates:
        left = rotate(left, -deltas, frequencies, "neox")
        right = rotate(right, deltas, frequencies, "neox")
    residual = left - right
    expected = torch.stack([residual[:3].mean(0), torch.zeros_like(residual[0]), residual[3]])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_mean_deltas", [False, True])
def test_apply_shift(dtype: torch.dtype, has_mean_deltas: bool) -> None:
    head_size, block_size = 64, 32
    frequencies = _core.rope_frequencies(_core.RopeConfig(rotary_dim=head_size))
    cached = random_rows(60, 3, head_size, dtype, seed=1)
    mean = random_rows(2, 3, head_size, torch.float32, seed=2)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:50]
    weights = torch.rand(50, generator=torch.Generator().manual_seed(4))
    mean_deltas = torch.arange(50) * 40 - 300
    starts, deltas = int64([0, 20, 50]), int64([-5, 700])
    segment = torch.tensor([0] * 20 + [1] * 30)
    slots = torch.arange(50) + block_size + 7
    slots[3] = -1
    kv_cache = cache(3, block_size, head_size, dtype)
    paged = _core.cpu_paged_kv("vec", kv_cache)
    _core.apply_shift(
        cached=cached,
        cached_rows=rows,
        slots=slots,
        segment_starts=starts,
        deltas=deltas,
        rope=_core.Rope(frequencies, head_size, "neox"),
        mean=mean,
        weights=weights,
        mean_deltas=mean_deltas if has_mean_deltas else None,
        blocks=paged.key,
    )
    shift = mean[segment].double()
    if has_mean_deltas:
        shift = rotate(shift, mean_deltas, frequencies, "neox")
    moved = rotate(cached[rows], deltas[segment], frequencies, "neox")
    expected = moved + weights[:, None, None].double() * shift
    written = torch.cat([head_tokens(kv_cache, block)[0] for block in range(5)], dim=1)
    kept = slots >= 0
    close(written.transpose(0, 1)[slots[kept]], expected[kept], dtype)
    untouched = torch.ones(5 * block_size, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert written[:, untouched].isnan().all()
    assert torch.cat([head_tokens(kv_cache, b)[1] for b in range(5)], dim=1).isnan().all()


def test_apply_shift_of_values_needs_no_rope() -> None:
    cached = random_rows(4, 2, 32, torch.float32)
    kv_cache = cache(2, 16, 32, torch.float32)
    paged = _core.cpu_paged_kv("vec", kv_cache)
    _core.apply_shift(
        cached=cached,
        cached_rows=torch.arange(4),
        slots=torch.arange(4),
        segment_starts=int64([0, 4]),
        blocks=paged.value,
    )
    assert torch.equal(head_tokens(kv_cache, 0)[1][:, :4].transpose(0, 1), cached)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_rows(dtype: torch.dtype) -> None:
    head_size, block_size = 64, 16
    kv_cache = cache(2, block_size, head_size, dtype)
    paged = _core.cpu_paged_kv("vec", kv_cache)
    keys = random_rows(40, 2, head_size, dtype, seed=1)
    values = random_rows(40, 2, head_size, dtype, seed=2)
    table = torch.tensor([[4, 0, 2]], dtype=torch.int32)
    positions = torch.arange(40)
    slots = table[0].long()[positions // block_size] * block_size + positions % block_size
    _core.scatter_blocks(rows=keys, slots=slots, blocks=paged.key)
    _core.scatter_blocks(rows=values, slots=slots, blocks=paged.value)
    query = random_rows(3, 6, head_size, dtype, seed=3)
    limits = int64([1, 17, 40])
    out = torch.empty_like(query)
    _core.attend_rows(
        query=query,
        kv=paged,
        block_table=table,
        row_requests=torch.zeros(3, dtype=torch.int32),
        row_limits=limits,
        scale=0.125,
        out=out,
    )
    for row, limit in enumerate(limits.tolist()):
        k = keys[:limit].double().repeat_interleave(3, dim=1)
        v = values[:limit].double().repeat_interleave(3, dim=1)
        scores = torch.einsum("hd,thd->ht", query[row].double(), k) * 0.125
        close(out[row], torch.einsum("ht,thd->hd", scores.softmax(-1), v), dtype)


class CachedRequest:
    """A request's random keys and values in a cache whose other slots are NaN."""

    def __init__(self, tokens: int, heads: int, head_size: int, dtype: torch.dtype) -> None:
        self.block_size, self.first_token = 16, 21
        end = self.first_token + tokens
        self.tensor = cache(heads, self.block_size, head_size, dtype, blocks=end // 16 + 4)
        self.kv = _core.cpu_paged_kv("vec", self.tensor)
        # The first block is gone; the others are in no order.
        blocks = torch.randperm(end // 16 + 4, generator=torch.Generator().manual_seed(1))
        self.block_table = blocks[: (end + 15) // 16].to(torch.int32)
        self.block_table[0] = -1
        positions = torch.arange(self.first_token, end)
        self.slots = blocks[positions // 16] * 16 + positions % 16
        self.keys = random_rows(tokens, heads, head_size, dtype, seed=2)
        self.values = random_rows(tokens, heads, head_size, dtype, seed=3)
        _core.scatter_blocks(rows=self.keys, slots=self.slots, blocks=self.kv.key)
        _core.scatter_blocks(rows=self.values, slots=self.slots, blocks=self.kv.value)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.empty_like(self.keys), torch.empty_like(self.values)
        _core.gather_blocks(blocks=self.kv.key, slots=self.slots, out=keys)
        _core.gather_blocks(blocks=self.kv.value, slots=self.slots, out=values)
        return keys, values

    def logits(self, query: torch.Tensor, limits: torch.Tensor, scale: float) -> torch.Tensor:
        """Return masked logits [queries, KV heads, group, tokens] in float64."""
        heads = self.keys.shape[1]
        grouped = query.double().unflatten(1, (heads, query.shape[1] // heads))
        logits = scale * torch.einsum("qhgd,thd->qhgt", grouped, self.keys.double())
        masked = torch.arange(len(self.keys)) >= limits[:, None, None, None]
        return logits.masked_fill(masked, -math.inf)


@pytest.mark.parametrize("dtype", DTYPES)
def test_push_queries(dtype: torch.dtype) -> None:
    query = random_rows(6, 4, 40, torch.float32)
    buffer = torch.full((5, 4, 40), math.nan, dtype=dtype)
    _core.push_queries(query=query, rows=int64([5, 0]), entries=int64([1, 4]), buffer=buffer)
    assert torch.equal(buffer[[1, 4]], query[[5, 0]].to(dtype))
    assert buffer[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", ["none", "max", "average"])
@pytest.mark.parametrize("group", ["max_logit", "max", "mean"])
def test_score_keys(dtype: torch.dtype, group: str, pooling: str) -> None:
    request = CachedRequest(150, 2, 64, dtype)
    query = random_rows(9, 6, 64, dtype, seed=5)
    limits = int64([150, 3, 0, 77, 150, 1, 140, 149, 128])
    excluded = 8
    scores = torch.full((2, 150), math.nan)
    _core.score_keys(
        query=query,
        key=request.kv.key,
        block_table=request.block_table,
        first_token=request.first_token,
        tokens=150,
        query_limits=limits,
        excluded_recent=excluded,
        group=group,
        pooling=pooling,
        pooling_kernel=5,
        scale=0.125,
        scores=scores,
    )
    logits = request.logits(query, limits, 0.125)[..., :-excluded]
    logits = logits[limits > 0]
    if group == "max_logit":
        mean = logits.amax(dim=2).softmax(-1).mean(dim=0)
    elif group == "max":
        mean = logits.softmax(-1).amax(dim=2).mean(dim=0)
    else:
        mean = logits.softmax(-1).mean(dim=(0, 2))
    pool = torch.nn.functional
    if pooling == "max":
        mean = pool.max_pool1d(mean, 5, stride=1, padding=2)
    elif pooling == "average":
        mean = pool.avg_pool1d(mean, 5, stride=1, padding=2)
    expected = pool.pad(mean, (0, excluded))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_attention(dtype: torch.dtype) -> None:
    request = CachedRequest(90, 3, 32, dtype)
    query = random_rows(20, 9, 32, dtype, seed=5)
    limits = torch.arange(71, 91)
    phases = torch.arange(20, dtype=torch.int32) % 3
    table = torch.ones(4, 3, 100)
    _core.accumulate_attention(
        query=query,
        query_limits=limits,
        query_phases=phases,
        key=request.kv.key,
        block_table=request.block_table,
        first_token=request.first_token,
        tokens=90,
        scale=0.2,
        sums=table[..., 5:],
    )
    paid = request.logits(query, limits, 0.2).softmax(-1).mean(dim=2)
    expected = torch.ones(4, 3, 100, dtype=torch.float64)
    expected[..., 5:95].index_add_(0, phases, paid)
    torch.testing.assert_close(table.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compact(dtype: torch.dtype) -> None:
    request = CachedRequest(100, 2, 40, dtype)
    generator = torch.Generator().manual_seed(1)
    kept = torch.stack([torch.randperm(100, generator=generator)[:30] for _ in range(2)])
    kept = kept.sort(dim=1).values
    sources = torch.empty_like(kept)
    moves = _core.plan_compaction(kept_indices=kept, tokens=100, sources=sources)
    assert torch.equal(sources.sort(dim=1).values, kept)
    assert moves.starts[-1] == len(moves) == len(moves.from_indices) == len(moves.to_indices)
    assert len(moves) == int((kept < 70).sum())
    _core.compact(
        kv=request.kv,
        block_table=request.block_table,
        first_token=request.first_token,
        moves=moves,
    )
    keys, values = request.read()
    for head in range(2):
        assert torch.equal(keys[70:, head], request.keys[sources[head], head])
        assert torch.equal(values[70:, head], request.values[sources[head], head])
    assert torch.equal(keys[:70], request.keys[:70])
    assert torch.equal(values[:70], request.values[:70])


@pytest.mark.parametrize("dtype", DTYPES)
def test_key_redundancy(dtype: torch.dtype) -> None:
    request = CachedRequest(60, 2, 32, dtype)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(7))
    for positions in (None, torch.stack([order, order.flip(0)]).to(torch.int32)):
        redundancy = torch.full((2, 60), math.nan)
        _core.key_redundancy(
            key=request.kv.key,
            block_table=request.block_table,
            first_token=request.first_token,
            tokens=60,
            positions=positions,
            threshold=0.25,
            redundancy=redundancy,
        )
        for head in range(2):
            keys = request.keys[:, head].double()
            unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
            cosine = (unit @ unit.T).fill_diagonal_(0.0)
            order = torch.arange(60) if positions is None else positions[head].long()
            # No similar key leaves the smallest position, 0, the largest of the row.
            last = torch.where(cosine > 0.25, order, 0).amax(dim=1)
            cosine[torch.arange(60), order.argsort()[last]] = 0.0
            expected = cosine.mean(dim=0).softmax(dim=0)
            torch.testing.assert_close(redundancy[head].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keydiff_score(dtype: torch.dtype) -> None:
    request = CachedRequest(60, 2, 32, dtype)
    scores = torch.full((2, 60), math.nan)
    _core.keydiff_score(
        key=request.kv.key,
        block_table=request.block_table,
        first_token=request.first_token,
        tokens=60,
        scores=scores,
    )
    unit = torch.nn.functional.normalize(request.keys.double(), dim=-1)
    expected = -torch.nn.functional.cosine_similarity(unit, unit.mean(0, keepdim=True), dim=-1)
    torch.testing.assert_close(scores.double(), expected.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
def test_expected_attention_score(dtype: torch.dtype, pairing: str) -> None:
    sinks, horizon = 3, 20
    request = CachedRequest(60, 2, 40, dtype)
    frequencies = _core.rope_frequencies(_core.RopeConfig(rotary_dim=32))
    query = random_rows(9, 6, 40, dtype, seed=4)
    query_positions = torch.arange(9) * 7 + 1
    order = torch.randperm(60, generator=torch.Generator().manual_seed(7))
    for positions in (None, torch.stack([order, order.flip(0)]).to(torch.int32)):
        scores = torch.full((2, 60), math.nan)
        _core.expected_attention_score(
            query=query,
            query_positions=query_positions,
            kv=request.kv,
            block_table=request.block_table,
            first_token=request.first_token,
            tokens=60,
            positions=positions,
            sinks=sinks,
            rope=_core.Rope(frequencies, 32, pairing),
            next_position=100,
            horizon=horizon,
            scale=0.2,
            scores=scores,
        )
        counted = query[query_positions >= sinks]
        back = -query_positions[query_positions >= sinks]
        ahead = torch.stack(
            [rotate(counted, back + 100 + i, frequencies, pairing) for i in range(horizon)]
        ).mean(dim=0)
        logits = torch.einsum(
            "qhgd,thd->qhgt", ahead.unflatten(1, (2, 3)), 0.2 * request.keys.double()
        )
        logits = logits.mean(dim=0) + logits.var(dim=0, correction=0) / 2
        at = torch.arange(60).expand(2, -1) if positions is None else positions
        weights = logits.masked_fill((at < sinks)[:, None], -math.inf).softmax(-1).mean(dim=1)
        expected = weights * request.values.double().norm(dim=-1).T
        torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pairing", ["neox", "interleaved"])
def test_triattention_score(dtype: torch.dtype, normalize: bool, pairing: str) -> None:
    head_size, rotary_dim, time = 40, 32, 700
    request = CachedRequest(60, 2, head_size, dtype)
    frequencies = _core.rope_frequencies(_core.RopeConfig(rotary_dim=rotary_dim))
    rope = _core.Rope(frequencies, rotary_dim, pairing)
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(6, rotary_dim // 2, 2, generator=generator)
    norm = mean.norm(dim=-1) + torch.rand(6, rotary_dim // 2, generator=generator)
    query = torch.full((6, head_size), math.nan)
    weights = torch.full((6, rotary_dim // 2), math.nan)
    _core.triattention_query(
        rope=rope,
        mean_query=mean,
        mean_norm=norm,
        time=time,
        synthetic_query=query,
        norm_weights=weights,
    )
    scores = torch.full((2, 60), math.nan)
    _core.triattention_score(
        key=request.kv.key,
        block_table=request.block_table,
        first_token=request.first_token,
        tokens=60,
        synthetic_query=query,
        norm_weights=weights,
        pairing=pairing,
        normalize=normalize,
        scores=scores,
    )
    # The mean query, laid out as a row, at each future position.
    first = torch.arange(rotary_dim // 2) * (1 if pairing == "neox" else 2)
    second = first + (rotary_dim // 2 if pairing == "neox" else 1)
    row = torch.zeros(1, 6, head_size)
    row[0][:, first], row[0][:, second] = mean[..., 0], mean[..., 1]
    offsets = 2 ** torch.arange(17)
    future = rotate(row.expand(17, -1, -1), time + offsets, frequencies, pairing).mean(dim=0)
    keys = request.keys.double()
    norms = (keys[..., first].square() + keys[..., second].square()).sqrt()
    expected = torch.einsum("hgd,thd->hgt", future.unflatten(0, (2, 3)), keys)
    missing = (norm - mean.norm(dim=-1)).double().unflatten(0, (2, 3))
    expected = expected + torch.einsum("hgf,thf->hgt", missing, norms)
    if normalize:
        expected = (expected - expected.mean(-1, True)) / expected.std(-1, False, True)
    torch.testing.assert_close(scores.double(), expected.amax(dim=1), rtol=1e-5, atol=1e-5)


def test_ops_over_a_request_refuse_what_is_not_in_its_block_table() -> None:
    request = CachedRequest(100, 2, 32, torch.float32)
    query = random_rows(1, 2, 32, torch.float32)
    arguments = {
        "query": query,
        "key": request.kv.key,
        "block_table": request.block_table,
        "first_token": request.first_token,
        "tokens": 100,
        "scale": 1.0,
        "scores": torch.empty(2, 100),
    }

    def refused(argument: str, value: str, **changes: Any) -> None:
        with pytest.raises(_core.InvalidArgumentError) as caught:
            _core.score_keys(**(arguments | changes))
        assert (caught.value.argument, caught.value.value) == (argument, value)

    _core.score_keys(**arguments)
    refused("block_table", "[7]", block_table=request.block_table[:-1])
    refused("block_table[0]", "-1", first_token=15)
    refused("first_token", "-1", first_token=-1)
    refused("tokens", "-1", tokens=-1)
    refused("scores", "[2, 99]", scores=torch.empty(2, 99))
    refused("block_table.dtype", "int64", block_table=request.block_table.long())
    refused("group", "sum", group="sum")
    refused("pooling", "min", pooling="min")
    refused("pooling_kernel", "4", pooling="max", pooling_kernel=4)
    refused("query.heads", "3", query=random_rows(1, 3, 32, torch.float32))
    kept = int64([0, 1]).expand(3, 2).contiguous()
    moves = _core.plan_compaction(kept_indices=kept, tokens=100)
    with pytest.raises(_core.InvalidArgumentError, match="moves = of 3 KV heads"):
        _core.compact(kv=request.kv, block_table=request.block_table, first_token=0, moves=moves)
    moves = _core.plan_compaction(kept_indices=kept[:2], tokens=200)
    with pytest.raises(_core.InvalidArgumentError, match=r"block_table = \[8\]"):
        _core.compact(kv=request.kv, block_table=request.block_table, first_token=0, moves=moves)


ROPE_PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
]


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("parameters", ROPE_PARAMETERS, ids=lambda p: str(p["rope_type"]))
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any], head_size: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    name = parameters["rope_type"]
    if name == "default":
        theirs, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(model)
    else:
        theirs, _ = ROPE_INIT_FUNCTIONS[name](model, torch.device("cpu"))
    fields = {"rope_type": "type", "rope_theta": "theta"}
    fields["original_max_position_embeddings"] = "original_max_position"
    config = _core.RopeConfig(
        rotary_dim=head_size, **{fields.get(key, key): value for key, value in parameters.items()}
    )
    ours = torch.tensor(_core.rope_frequencies(config), dtype=torch.float64)
    torch.testing.assert_close(ours, theirs.double(), rtol=3e-6, atol=0)


@pytest.mark.parametrize("name", ["mrope", "dynamic", "longrope"])
def test_unknown_rope_is_refused_by_name(name: str) -> None:
    with pytest.raises(phasekv.UnsupportedError, match=name) as caught:
        _core.rope_frequencies(_core.RopeConfig(type=name, rotary_dim=64))
    assert (caught.value.argument, caught.value.value) == ("rope.type", name)


def test_errors_name_the_argument_and_its_value() -> None:
    paged = _core.cpu_paged_kv("vec", cache(2, 16, 32, torch.float32))
    rows = random_rows(2, 2, 32, torch.float32)

    def refused(argument: str, value: str, **changes: Any) -> None:
        arguments = {"blocks": paged.key, "slots": int64([0, 1]), "out": rows} | changes
        with pytest.raises(_core.InvalidArgumentError) as caught:
            _core.gather_blocks(**arguments)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, phasekv.Error)
        assert (caught.value.argument, caught.value.value) == (argument, value)

    refused("slots[1]", "80", slots=int64([0, 80]))
    refused("slots[0]", "-1", slots=int64([-1, 0]))
    refused("slots", "[3]", slots=int64([0, 1, 2]))
    refused("slots.dtype", "int32", slots=torch.zeros(2, dtype=torch.int32))
    refused("slots", "list", slots=[0, 1])
    refused("rows.head_size", "16", out=torch.zeros(2, 2, 16))
    refused("rows.dtype", "bfloat16", out=torch.zeros(2, 2, 32, dtype=torch.bfloat16))
    refused("out.dtype", "float64", out=torch.zeros(2, 2, 32, dtype=torch.float64))
    refused("out", "[2, 64]", out=torch.zeros(2, 64))
    refused("out.stride", "[64, 1, 2]", out=torch.zeros(2, 32, 2).transpose(1, 2))
    refused("rows.token_stride", "0", out=torch.zeros(1, 2, 32).expand(2, 2, 32))
    refused("out.device", "meta", out=torch.zeros(2, 2, 32, device="meta"))


def test_unknown_layout_and_isa_are_refused_by_name() -> None:
    kv_cache = cache(2, 16, 32, torch.float32)
    with pytest.raises(_core.UnsupportedError, match="neon"):
        _core.cpu_paged_kv("neon", kv_cache)
    with pytest.raises(_core.InvalidArgumentError, match=r"kv_cache\.dtype = float32"):
        _core.cpu_paged_kv("amx", kv_cache)
    with pytest.raises(_core.InvalidArgumentError, match="kv_cache"):
        _core.cpu_paged_kv("vec", kv_cache.transpose(2, 3))
    with pytest.raises(_core.InvalidArgumentError, match="mmx"):
        _core.set_active_cpu_isa("mmx")
    for name in {"avx2", "avx512", "avx512bf16"} - set(_core.supported_cpu_isas()):
        with pytest.raises(_core.MissingCapabilityError, match=name):
            _core.set_active_cpu_isa(name)


def test_no_tokens_are_ordinary() -> None:
    paged = _core.cpu_paged_kv("vec", cache(2, 16, 32, torch.float32))
    none, nothing = torch.empty(0, 2, 32), int64([])
    _core.gather_blocks(blocks=paged.key, slots=nothing, out=none)
    _core.scatter_blocks(rows=none, slots=nothing, blocks=paged.key)
    _core.divergence(fresh=none, cached=none, out=torch.empty(0))
    assert _core.select_top(scores=torch.empty(0), segment_starts=int64([0]), counts=nothing) == []
