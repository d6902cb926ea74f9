"""A layer's blocks as the core sees them."""

from __future__ import annotations

import torch

from phasekv import _core
from phasekv.errors import UnsupportedError


def flash_attention_blocks(cache: torch.Tensor) -> _core.PagedKV:
    """Blocks of vLLM's FlashAttention backend, in any of its memory orders.

    Parameters
    ----------
    cache : torch.Tensor
        [num_blocks, kv heads, block size, 2 * head size] with any strides: a token's key, and its
        value beside it.

    Raises
    ------
    UnsupportedError
        For a cache of another shape.
    """
    if cache.dim() != 4 or cache.shape[3] % 2 != 0:
        raise UnsupportedError(
            "kv_cache", str(list(cache.shape)), "[blocks, kv heads, block size, 2 * head size]"
        )
    key, value = cache.chunk(2, dim=3)
    return _core.strided_paged_kv(key=key, value=value)
