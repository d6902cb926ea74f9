"""Round trip through vLLM's own cache writer, so that a layout we misread is never used."""

from __future__ import annotations

from typing import Any

import torch

from phasekv import _core
from phasekv.errors import UnsupportedError


def check_layout(layout: str, dtype: torch.dtype, block_size: int, head_size: int) -> None:
    """Write two blocks with vLLM and read them with the core, and the other way round.

    Parameters
    ----------
    layout : str
        vLLM's name of the block layout (``layer.isa``).
    dtype : torch.dtype
        Of the cache.
    block_size, head_size : int
        As in the engine.

    Raises
    ------
    UnsupportedError
        For a layout that the core does not know, or whose round trip is not exact.
    """
    from vllm import _custom_ops as ops

    heads, blocks = 2, 3
    tokens = 2 * block_size
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(tokens, heads, head_size, generator=generator).to(dtype)
    values = torch.randn(tokens, heads, head_size, generator=generator).to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].to(torch.int64)

    def write_with_engine(cache: torch.Tensor) -> None:
        halves = cache.view(blocks, heads, 2 * block_size, head_size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, layout)

    theirs = torch.zeros(blocks, heads, block_size, 2 * head_size, dtype=dtype)
    write_with_engine(theirs)
    kv = _core.cpu_paged_kv(layout, theirs)
    for name, view, expected in (("keys", kv.key, keys), ("values", kv.value, values)):
        read = torch.empty_like(expected)
        _core.gather_blocks(blocks=view, slots=slots, out=read)
        _require(torch.equal(read, expected), layout, f"{name} written by vLLM are read back")

    ours = torch.zeros_like(theirs)
    kv = _core.cpu_paged_kv(layout, ours)
    _core.scatter_blocks(rows=keys, slots=slots, blocks=kv.key)
    _core.scatter_blocks(rows=values, slots=slots, blocks=kv.value)
    _require(torch.equal(ours, theirs), layout, "our blocks equal vLLM's, element by element")


def _require(holds: Any, layout: str, what: str) -> None:
    if not holds:
        raise UnsupportedError("block layout", layout, f"a layout where {what}")
