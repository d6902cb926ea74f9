"""The rotary embedding of a model that vLLM has loaded."""

from __future__ import annotations

from typing import Any

import torch

from phasekv import _core
from phasekv.reuse.rotation import check_rotation, rotation_parameters, type_of


def rope_parameters_of(text_config: Any, module: Any) -> dict[str, Any]:
    """RoPE parameters in one flat, canonical form; see ``rotation_parameters``.

    Parameters
    ----------
    text_config : transformers config
        Of the language model.
    module : vllm RotaryEmbedding
        The model's own rotary module; its ``rotary_dim``, base and pairing are taken as they are.
    """
    declared = dict(getattr(text_config, "rope_parameters", None) or {})
    type_of(declared)
    return rotation_parameters(
        declared,
        theta=module.base,
        rotary_dim=module.rotary_dim,
        pairing="neox" if module.is_neox_style else "interleaved",
    )


def check_rope(rope: _core.Rope, module: Any, head_size: int, dtype: torch.dtype) -> None:
    """Compare our rotation with the module's; see ``check_rotation``."""

    def rotate(positions: list[int], keys: torch.Tensor) -> torch.Tensor:
        flat = keys.reshape(keys.shape[0], -1).clone()
        rotated: torch.Tensor
        rows = torch.tensor(positions, device=flat.device)
        _, rotated = module.forward_native(rows, flat.clone(), flat)
        return rotated.view_as(keys)

    last = int(module.cos_sin_cache.shape[0]) - 1
    device = module.cos_sin_cache.device
    check_rotation(rope, rotate, last, head_size, dtype, device)
