"""The model's rotary embedding as data for the core, checked against the model's own module."""

from __future__ import annotations

from typing import Any

import torch

from phasekv import _core
from phasekv.errors import UnsupportedError

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")

# The model's own table holds phases position * frequency in float32, so at position p its angles
# may be off by p * 2**-23 radians at the highest frequency of 1; ours are exact to float64.
PHASE_ERROR_PER_POSITION = 2.0**-23


def rope_parameters_of(text_config: Any, module: Any) -> dict[str, Any]:
    """RoPE parameters in one flat, canonical form.

    Parameters
    ----------
    text_config : transformers config
        Of the language model.
    module : vllm RotaryEmbedding
        The model's own rotary module; its ``rotary_dim``, base and pairing are taken as they are.

    Returns
    -------
    dict
        Keyword arguments of ``phasekv._core.RopeConfig``.

    Raises
    ------
    UnsupportedError
        For M-RoPE, dynamic NTK and every other type that is not in ``SUPPORTED_TYPES``.
    """
    declared = dict(getattr(text_config, "rope_parameters", None) or {})
    if "mrope_section" in declared:
        raise UnsupportedError(
            "rope_parameters", "mrope", "its positions have several axes; use a text model"
        )
    kind = declared.get("rope_type", "default")
    if kind not in SUPPORTED_TYPES:
        raise UnsupportedError(
            "rope_type", str(kind), "supported are " + ", ".join(SUPPORTED_TYPES)
        )
    parameters: dict[str, Any] = {
        "type": kind,
        "theta": float(module.base),
        "rotary_dim": int(module.rotary_dim),
        "pairing": "neox" if module.is_neox_style else "interleaved",
    }
    if kind != "default":
        parameters["factor"] = float(declared["factor"])
    if kind == "llama3":
        parameters["low_freq_factor"] = float(declared["low_freq_factor"])
        parameters["high_freq_factor"] = float(declared["high_freq_factor"])
    if kind in ("llama3", "yarn"):
        parameters["original_max_position"] = int(declared["original_max_position_embeddings"])
    if kind == "yarn":
        parameters["beta_fast"] = float(declared.get("beta_fast", 32))
        parameters["beta_slow"] = float(declared.get("beta_slow", 1))
        parameters["truncate"] = bool(declared.get("truncate", True))
    return parameters


def rope_of(parameters: dict[str, Any]) -> _core.Rope:
    """The rotation that the ops take, from ``rope_parameters_of``."""
    frequencies = _core.rope_frequencies(_core.RopeConfig(**parameters))
    return _core.Rope(frequencies, parameters["rotary_dim"], parameters["pairing"])


def check_rope(rope: _core.Rope, module: Any, head_size: int, dtype: torch.dtype) -> None:
    """Compare our rotation with the model's own on random keys at three positions.

    Raises
    ------
    UnsupportedError
        When a key moved by us from position 0 is not the key that the module puts there: a RoPE
        that is declared wrongly would otherwise corrupt reused keys without a sign.
    """
    last = int(module.cos_sin_cache.shape[0]) - 1
    positions = sorted({min(1, last), last // 2, last})
    generator = torch.Generator().manual_seed(0)
    count = len(positions)
    keys = torch.randn(count, 1, head_size, generator=generator).to(dtype)
    there = _apply(module, positions, keys)
    moved = torch.empty_like(keys)
    _core.rotate_keys(
        keys=_apply(module, [0] * count, keys),
        deltas=torch.tensor(positions, dtype=torch.int64),
        rope=rope,
        out=moved,
    )
    scale = float(keys.float().abs().max())
    for row, position in enumerate(positions):
        error = float((moved[row].float() - there[row].float()).abs().max()) / scale
        allowed = 8 * torch.finfo(dtype).eps + 4 * position * PHASE_ERROR_PER_POSITION
        if error > allowed:
            raise UnsupportedError(
                "rope",
                f"relative error {error:.2e} at position {position}",
                f"moved keys within {allowed:.1e} of the model's own rotary module",
            )


def _apply(module: Any, positions: list[int], keys: torch.Tensor) -> torch.Tensor:
    flat = keys.reshape(keys.shape[0], -1).clone()
    rotated: torch.Tensor
    _, rotated = module.forward_native(torch.tensor(positions), flat.clone(), flat)
    return rotated.view_as(keys)
