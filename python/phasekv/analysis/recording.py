"""The queries, keys and values of a model's attention, as they enter the softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "phasekv_recording"
"""Name of the attention function, as transformers registers them."""

Layer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with a layer's index, queries ``[query heads, new tokens, head size]`` and keys and values
``[kv heads, all tokens, head size]``, queries and keys after RoPE."""


@contextmanager
def record_attention(model: Any, layer: Layer) -> Iterator[None]:
    """Call ``layer`` in every layer of the forward passes of one sequence.

    The model computes what it computes otherwise, with torch's attention.
    """
    previous = model.config._attn_implementation
    handle = model.register_forward_pre_hook(
        lambda _, arguments, named: (arguments, {**named, "phasekv_layer": layer}), with_kwargs=True
    )
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)
        handle.remove()


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    phasekv_layer: Layer,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    phasekv_layer(module.layer_idx, query[0], key[0], value[0])
    out: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **named
    )
    return out


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
