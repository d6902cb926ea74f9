"""What PhaseKV's caches have to know of a transformers model, and which models it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phasekv import _core
from phasekv.errors import InvalidArgumentError, MissingCapabilityError, UnsupportedError


@dataclass(frozen=True)
class ModelShape:
    """A decoder's attention; ``scale`` multiplies q.k before the softmax."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float
    device: torch.device


def check_on_cpu(shape: ModelShape, what: str) -> None:
    """Raise ``MissingCapabilityError`` for a model elsewhere; ``what`` begins the reason."""
    if shape.device.type != "cpu":
        raise MissingCapabilityError("device", str(shape.device), f"{what} on the CPU only")


def check_device(device: torch.device) -> None:
    """Raise ``MissingCapabilityError`` for one that PhaseKV does not run on."""
    if device.type == "cuda":
        _core.check_cuda_device(device.index or 0)
    elif device.type != "cpu":
        raise MissingCapabilityError("device", str(device), "PhaseKV runs on CPUs and CUDA devices")


def check_same_device(device: torch.device, before: torch.device) -> None:
    """Raise an error that names ``device`` where it is not the one that was used ``before``."""
    if device == before:
        return
    check_device(device)
    raise InvalidArgumentError("device", str(device), f"{before}, as before")


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
        If the model is on a device that is neither the CPU nor one that the CUDA kernels run on, or
        on several.
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
    ((scale, head_size),) = sizes
    return ModelShape(
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=head_size,
        dtype=model.dtype,
        scale=scale,
        device=device_of(model),
    )


def device_of(model: Any) -> torch.device:
    """Where the whole model lies.

    Raises
    ------
    MissingCapabilityError
        See ``shape_of``.
    """
    devices: list[torch.device] = sorted({part.device for part in model.parameters()}, key=str)
    for device in devices:
        check_device(device)
    if len(devices) != 1:
        names = ", ".join(str(device) for device in devices)
        raise MissingCapabilityError("device", names, "PhaseKV takes models on one device")
    return devices[0]
