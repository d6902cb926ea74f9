"""The attention function that transformers calls; the cache that holds the keys does the work."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

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
    cache = key.phasekv_cache  # type: ignore[attr-defined]
    return cache.attend(module.layer_idx, query, scaling), None


AttentionInterface.register(ATTENTION, _attention)
