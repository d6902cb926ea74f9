"""A model's rotary embedding as data for the core, checked against the model's own rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from phasekv import _core
from phasekv.errors import UnsupportedError
from phasekv.reuse.stream import current_stream

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")

# The model's own table holds phases position * frequency in float32, so at position p its angles
# may be off by p * 2**-23 radians at the highest frequency of 1; ours are exact to float64.
PHASE_ERROR_PER_POSITION = 2.0**-23


def rotation_parameters(
    declared: Mapping[str, Any], *, theta: float, rotary_dim: int, pairing: str
) -> dict[str, Any]:
    """RoPE parameters in one flat, canonical form.

    Parameters
    ----------
    declared : mapping
        ``rope_parameters`` of the model's configuration.
    theta : float
        Base of the frequencies.
    rotary_dim : int
        Dimensions of a head that are rotated.
    pairing : str
        "neox" or "interleaved".

    Returns
    -------
    dict
        Keyword arguments of ``phasekv._core.RopeConfig``.

    Raises
    ------
    UnsupportedError
        For M-RoPE, dynamic NTK and every other type that is not in ``SUPPORTED_TYPES``.
    """
    kind = type_of(declared)
    parameters: dict[str, Any] = {
        "type": kind,
        "theta": float(theta),
        "rotary_dim": int(rotary_dim),
        "pairing": pairing,
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


def type_of(declared: Mapping[str, Any]) -> str:
    """The type of RoPE; see ``rotation_parameters`` for what is refused."""
    if "mrope_section" in declared:
        raise UnsupportedError(
            "rope_parameters", "mrope", "its positions have several axes; use a text model"
        )
    kind = declared.get("rope_type", "default")
    if kind not in SUPPORTED_TYPES:
        raise UnsupportedError(
            "rope_type", str(kind), "supported are " + ", ".join(SUPPORTED_TYPES)
        )
    return str(kind)


def rope_of(parameters: dict[str, Any]) -> _core.Rope:
    """The rotation of keys on the CPU that the ops take, from ``rotation_parameters``."""
    frequencies = _core.rope_frequencies(_core.RopeConfig(**parameters))
    return _core.Rope(frequencies, parameters["rotary_dim"], parameters["pairing"])


def rope_on(rope: _core.Rope, device: torch.device) -> _core.Rope:
    """A rotation of keys on the CPU as one of keys on ``device``."""
    if device.type == "cpu":
        return rope
    return rope.on(torch.tensor(rope.frequencies, dtype=torch.float64, device=device))


def check_rotation(
    rope: _core.Rope,
    rotate: Callable[[list[int], torch.Tensor], torch.Tensor],
    last_position: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Compare our rotation with the model's own on random keys at three positions.

    Parameters
    ----------
    rope : phasekv._core.Rope
        Ours.
    rotate : callable
        The model's: keys [tokens, 1, head size] as they are at these positions.
    last_position, head_size : int
        Of the model.
    dtype : torch.dtype
        Of the keys.
    device : torch.device or None
        Of the keys; None: the CPU.

    Raises
    ------
    UnsupportedError
        When a key moved by us from position 0 is not the key that the model puts there: a RoPE
        that is declared wrongly would otherwise corrupt reused keys without a sign.
    """
    positions = sorted({min(1, last_position), last_position // 2, last_position})
    generator = torch.Generator().manual_seed(0)
    count = len(positions)
    keys = torch.randn(count, 1, head_size, generator=generator).to(device, dtype)
    there = rotate(positions, keys)
    moved = torch.empty_like(keys)
    _core.rotate_keys(
        keys=rotate([0] * count, keys),
        deltas=torch.tensor(positions, dtype=torch.int64, device=device),
        rope=rope,
        out=moved,
        stream=current_stream(keys.device),
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
