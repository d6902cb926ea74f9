"""The rotary embedding of a transformers model."""

from __future__ import annotations

from typing import Any

import torch

from phasekv import _core
from phasekv.errors import UnsupportedError
from phasekv.reuse.rotation import check_rotation, rope_of, rope_on, rotation_parameters
from phasekv.transformers.models import ModelShape
from phasekv.transformers_versions import declared_rotation


def rope_of_model(model: Any, shape: ModelShape) -> _core.Rope:
    """The model's rotation of keys on the CPU, compared with what its own module does.

    Parameters
    ----------
    model : transformers model
        Any with a rotary embedding.
    shape : ModelShape
        Of it.

    Raises
    ------
    UnsupportedError
        For a type of RoPE that the core does not know, or one that turns out otherwise.
    """
    config = model.config.get_text_config(decoder=True)
    module = getattr(getattr(model, "model", None), "rotary_emb", None)
    if module is None:
        raise UnsupportedError("model", model.config.model_type, "it has no rotary embedding")
    declared = declared_rotation(config)
    parameters = rotation_parameters(
        declared,
        theta=declared["rope_theta"],
        rotary_dim=int(shape.head_size * declared.get("partial_rotary_factor", 1.0)),
        pairing="neox",
    )

    def rotate(positions: list[int], keys: torch.Tensor) -> torch.Tensor:
        cosines, sines = module(keys, torch.tensor([positions], device=keys.device))
        first, second = keys.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        rotated: torch.Tensor = keys * cosines[0][:, None] + turned * sines[0][:, None]
        return rotated

    rope = rope_of(parameters)
    check_rotation(
        rope_on(rope, shape.device),
        rotate,
        config.max_position_embeddings - 1,
        shape.head_size,
        shape.dtype,
        shape.device,
    )
    return rope
