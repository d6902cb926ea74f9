"""The attention function that transformers calls; the cache that holds the keys does the work."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from phasekv.errors import UnsupportedError

ATTENTION = "phasekv"
"""Name of the attention function, as transformers registers them."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    _value: torch.Tensor,
    _attention_mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    cache = getattr(key, "phasekv_cache", None)
    if cache is None:
        raise UnsupportedError(
            "past_key_values",
            "a cache of another kind",
            "inside phasekv.transformers.evict a model runs with the cache of that context",
        )
    return cache.attend(module.layer_idx, query, scaling), None


AttentionInterface.register(ATTENTION, _attention)
