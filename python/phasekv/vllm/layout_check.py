"""Round trip through vLLM's own cache writer, so that a layout we misread is never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phasekv import _core
from phasekv.errors import UnsupportedError
from phasekv.reuse.stream import current_stream
from phasekv.vllm.blocks import flash_attention_blocks

BLOCKS = 3


def check_layout(layout: str, dtype: torch.dtype, block_size: int, head_size: int) -> None:
    """Write two blocks of the CPU with vLLM and read them with the core, and the other way round.

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

    heads = 2

    def write(keys: Any, values: Any, cache: Any, slots: Any) -> None:
        halves = cache.view(BLOCKS, heads, 2 * block_size, head_size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, layout)

    _check_round_trip(
        layout,
        torch.zeros(BLOCKS, heads, block_size, 2 * head_size, dtype=dtype),
        write,
        lambda cache: _core.cpu_paged_kv(layout, cache),
    )


def check_device_layout(layer: Any, cache: torch.Tensor) -> None:
    """Do the same with the blocks of a device, as a layer's own attention writes them.

    Parameters
    ----------
    layer : vllm Attention
        No step may be active.
    cache : torch.Tensor
        The layer's, of which only shape and memory order are looked at.

    Raises
    ------
    UnsupportedError
        For a layout whose round trip is not exact.
    """
    shape = (BLOCKS, *cache.shape[1:])
    strides = cache.stride()
    order = sorted(range(4), key=lambda dimension: -strides[dimension])
    memory = torch.zeros([shape[i] for i in order], dtype=cache.dtype, device=cache.device)
    _check_round_trip(
        type(layer.impl).__name__,
        memory.permute([order.index(i) for i in range(4)]),
        lambda *arguments: layer.impl.do_kv_cache_update(layer, *arguments),
        flash_attention_blocks,
    )


def _check_round_trip(
    layout: str,
    cache: torch.Tensor,
    write_with_engine: Callable[..., None],
    view: Callable[[torch.Tensor], _core.PagedKV],
) -> None:
    """``cache`` is [BLOCKS, kv heads, block size, 2 * head size] of zeros, as the engine has it."""
    heads, block_size, head_size = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    device, tokens = cache.device, 2 * block_size
    stream = current_stream(device)
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        torch.randn(tokens, heads, head_size, generator=generator).to(device, cache.dtype)
        for _ in range(2)
    )
    slots = torch.randperm(BLOCKS * block_size, generator=generator)[:tokens].to(device)

    theirs, ours = cache, torch.zeros_like(cache)
    write_with_engine(keys, values, theirs, slots)
    kv = view(theirs)
    for name, part, expected in (("keys", kv.key, keys), ("values", kv.value, values)):
        read = torch.empty_like(expected)
        _core.gather_blocks(blocks=part, slots=slots, out=read, stream=stream)
        _require(torch.equal(read, expected), layout, f"{name} written by vLLM are read back")
    kv = view(ours)
    _core.scatter_blocks(rows=keys, slots=slots, blocks=kv.key, stream=stream)
    _core.scatter_blocks(rows=values, slots=slots, blocks=kv.value, stream=stream)
    _require(torch.equal(ours, theirs), layout, "our blocks equal vLLM's, element by element")


def _require(holds: Any, layout: str, what: str) -> None:
    if not holds:
        raise UnsupportedError("block layout", layout, f"a layout where {what}")
