"""Keys and values of some slots, out of the cache of every layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phasekv import _core
from phasekv.reuse.stream import current_stream


def rows_on_cpu(
    layers: Mapping[str, tuple[int, _core.PagedKV]], slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy them to the CPU.

    A device has room for one layer's at a time: vLLM leaves little beside its cache.

    Parameters
    ----------
    layers : mapping
        Attention layer name -> (layer index, blocks).
    slots : torch.Tensor
        int64 [tokens], where the cache is.
    dtype : torch.dtype
        Of the cache.

    Returns
    -------
    (torch.Tensor, torch.Tensor)
        [layers, tokens, kv heads, head size] each.
    """
    kv = next(iter(layers.values()))[1]
    shape = (len(layers), len(slots), kv.num_heads, kv.head_size)
    keys, values = (torch.empty(shape, dtype=dtype) for _ in range(2))
    stream = current_stream(slots.device)
    for index, layer in layers.values():
        for blocks, rows in ((layer.key, keys[index]), (layer.value, values[index])):
            gathered = torch.empty_like(rows, device=slots.device) if slots.is_cuda else rows
            _core.gather_blocks(blocks=blocks, slots=slots, out=gathered, stream=stream)
            if gathered is not rows:
                rows.copy_(gathered)
    return keys, values
