"""What PhaseKV's caches have to know of a transformers model, and which models it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phasekv.errors import InvalidArgumentError, MissingCapabilityError, UnsupportedError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder's attention; ``scale`` multiplies q.k before the softmax."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float


def check_device(device: torch.device) -> None:
    """Raise ``MissingCapabilityError`` for what lies elsewhere than on the CPU."""
    if device.type != "cpu":
        raise MissingCapabilityError("device", str(device), "PhaseKV's caches are on the CPU")


def check_model_device(model: Any) -> None:
    """Raise ``MissingCapabilityError`` for a model of which a part is elsewhere."""
    for device in {parameter.device for parameter in model.parameters()}:
        check_device(device)


def shape_of(model: Any) -> ModelShape:
    """The shape of a decoder.

    Raises
    ------
    InvalidArgumentError
        For something that is no model.
    UnsupportedError
        For an encoder-decoder, sliding-window or other layers that are not full causal attention,
        logits that are capped, and shapes that differ from layer to layer.
    MissingCapabilityError
        If the model, or a part of it, is not on the CPU.
    """
    if not hasattr(model, "config"):
        raise InvalidArgumentError("model", type(model).__name__, "a model of transformers")
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError("model", model.config.model_type, "it is no decoder alone")
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds and window is not None:
        raise UnsupportedError("sliding_window", str(window), "only full attention is taken")
    if kinds - {"full_attention"}:
        raise UnsupportedError("layer_types", str(sorted(kinds)), "only full attention is taken")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedError(
            "attn_logit_softcapping", str(config.attn_logit_softcapping), "logits may not be capped"
        )
    attention = [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "scaling")
    ]
    sizes = {(float(module.scaling), int(module.head_dim)) for module in attention}
    if len(sizes) != 1 or len(attention) != config.num_hidden_layers:
        raise UnsupportedError(
            "model", model.config.model_type, "its attention layers are not all of one kind"
        )
    check_model_device(model)
    ((scale, head_size),) = sizes
    return ModelShape(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=head_size,
        dtype=model.dtype,
        scale=scale,
    )
