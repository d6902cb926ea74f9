"""A reuse method that is a Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phasekv.errors import InvalidArgumentError

FUNCTION = "function"
"""Name of the method that calls a Python function."""

FRAMES = ("rotated", "unrotated")


class FunctionMethod:
    """Calls ``function(segments, key_divergence, value_divergence, ratio)`` at the check layer.

    It stands where a ``phasekv.methods.Method`` does.

    Parameters
    ----------
    function : callable
        It is given the runs of cached tokens as (tokens, offset in the chunk, tokens of the chunk)
        each, float32 ``[tokens]`` of how far the key and the value of each token are from fresh
        ones, and the nominal ratio r. It returns (probes, weights). ``probes`` tells which tokens
        are computed again, bool ``[tokens]``, or ``[2, tokens]`` for keys and values. ``weights``
        is the share of their chunk's mean residual of the probes that other tokens receive, float
        ``[tokens]`` or ``[2, tokens]``; None: nothing is added.
    frame : str
        "rotated" or "unrotated": the coordinates in which keys' residuals are averaged.
    """

    name = FUNCTION
    check_layer = 1
    keeps_fresh_at_check_layer = True
    needs_attention = False

    def __init__(self, function: Callable[..., Any], frame: str = "rotated") -> None:
        if frame not in FRAMES:
            raise InvalidArgumentError("frame", frame, "one of " + ", ".join(FRAMES))
        self._function = function
        self.frame = frame

    def select(
        self,
        *,
        segments: Sequence[tuple[int, int, int]],
        key_divergence: Sequence[float],
        value_divergence: Sequence[float],
        ratio: float,
        attention: Sequence[float] = (),
    ) -> tuple[list[int], list[int], list[float], list[float]]:
        """What the function chooses, as ``Method.select`` gives it.

        Raises
        ------
        InvalidArgumentError
            Naming ``probes`` or ``weights``, if the function returns something else than it should.
        """
        returned = self._function(
            list(segments),
            torch.tensor(key_divergence, dtype=torch.float32),
            torch.tensor(value_divergence, dtype=torch.float32),
            ratio,
        )
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise InvalidArgumentError("function", repr(returned)[:80], "(probes, weights)")
        count = len(key_divergence)
        probes = _two_rows("probes", returned[0], count)
        if probes.dtype != torch.bool:
            raise InvalidArgumentError("probes.dtype", str(probes.dtype), "torch.bool")
        if returned[1] is None:
            return probes[0].tolist(), probes[1].tolist(), [], []
        weights = _two_rows("weights", returned[1], count).float()
        if not bool(weights.isfinite().all()):
            raise InvalidArgumentError("weights", "not finite", "finite numbers")
        return probes[0].tolist(), probes[1].tolist(), weights[0].tolist(), weights[1].tolist()


def _two_rows(name: str, value: Any, count: int) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    if tuple(tensor.shape) == (count,):
        return tensor.expand(2, count)
    if tuple(tensor.shape) != (2, count):
        raise InvalidArgumentError(
            name, f"shape {tuple(tensor.shape)}", f"[{count}] or [2, {count}], the cached tokens"
        )
    return tensor
