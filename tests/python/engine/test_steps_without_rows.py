"""A step in which every token is cached still gives each layer a row, where the engine asks for it.

vLLM's CUDA kernels are launched with a block per token, and a launch of none is an error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phasekv import _core
from phasekv.memory.chunk import StoredChunk
from phasekv.memory.keys import ChunkKey
from phasekv.reuse.cached_rows import CachedRows, CachedSegment
from phasekv.reuse.step import CHECK_LAYER, Batch, ReuseStep

TOKENS, LAYERS, HEADS, SIZE, BLOCK = 12, 3, 2, 8, 16


def run(method: str, keeps_a_row: bool) -> tuple[list[int], CachedRows, torch.Tensor]:
    """Rows of each layer, the cached ones, and the cache [layers, 2, ...] after the step."""
    generator = torch.Generator().manual_seed(1)
    stored = torch.randn(2, LAYERS, TOKENS, HEADS, SIZE, generator=generator)
    fresh = torch.randn(2, LAYERS, TOKENS, HEADS, SIZE, generator=generator)
    chunk = StoredChunk(ChunkKey("note"), np.arange(TOKENS, dtype=np.int32), 0, *stored)
    positions = torch.arange(TOKENS)
    rope = _core.Rope([1.0, 0.1, 0.01, 0.001], SIZE, "neox")
    cached = CachedRows(
        "one",
        _core.Method(method),
        0.0,
        [CachedSegment(chunk, 0, TOKENS, 0, TOKENS)],
        positions,
        positions,
        rope,
    )
    batch = Batch(
        slots=positions,
        positions=positions,
        requests=torch.zeros(TOKENS, dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        first_held=torch.zeros(1, dtype=torch.int64),
    )
    step = ReuseStep(batch, [cached], lambda squared: squared, keeps_a_row=keeps_a_row)
    cache = torch.zeros(LAYERS, 2, 1, HEADS, BLOCK, SIZE)
    counts = []
    for layer in range(LAYERS):
        rows = step.rows_entering(layer)
        counts.append(len(rows))
        kv = _core.strided_paged_kv(key=cache[layer, 0], value=cache[layer, 1])
        step.write_kv(layer, *fresh[:, layer, rows], kv)
    last = cache[-1, :, 0].transpose(1, 2)[:, :TOKENS]
    expected = stored[:, -1].clone()
    if keeps_a_row:
        expected[:, -1] = fresh[:, -1, -1]
    torch.testing.assert_close(last, expected, rtol=0, atol=0)
    return counts, cached, last


@pytest.mark.parametrize("method", ["full_reuse", "agentkvshift", "phaseshift", "cacheblend"])
def test_the_last_token_runs_where_none_would(method: str) -> None:
    first = 0 if method == "full_reuse" else CHECK_LAYER + 1
    counts, cached, _ = run(method, keeps_a_row=False)
    assert counts == [TOKENS] * first + [0] * (LAYERS - first)
    assert int(cached.probe.sum()) == 0
    counts, cached, _ = run(method, keeps_a_row=True)
    assert counts == [TOKENS] * first + [1] * (LAYERS - first)
    assert cached.probe.nonzero()[:, 0].tolist() == [TOKENS - 1]
