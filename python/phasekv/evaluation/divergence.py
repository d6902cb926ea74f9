"""How far a method's next-token distributions are from those of full recompute.

All functions take log-probabilities over the whole vocabulary, float arrays of shape
[positions, vocabulary] in nats, and compute in double precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError

Floats = npt.NDArray[np.float64]


def kl_divergence(full: npt.ArrayLike, method: npt.ArrayLike) -> Floats:
    """KL(full ‖ method) at each position, in nats, shape [positions].

    A token that is impossible under ``full`` (minus infinity) adds nothing. The mathematical value
    is never negative; what rounding leaves below zero is kept, so that a mean stays unbiased.
    """
    p, q = _pair(full, method)
    with np.errstate(invalid="ignore"):
        terms = np.exp(p) * (p - q)
    divergence: Floats = np.where(np.isneginf(p), 0.0, terms).sum(axis=1)
    return divergence


def top1_agreement(full: npt.ArrayLike, method: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether both put the same token first, at each position; of equals, the lowest id."""
    p, q = _pair(full, method)
    return np.asarray(p.argmax(axis=1) == q.argmax(axis=1))


def negative_log_likelihood(log_probs: npt.ArrayLike, tokens: Sequence[int]) -> Floats:
    """-log p(token) at each position, in nats; ``tokens[i]`` is what follows position i."""
    values = _rows(log_probs, "log_probs")
    if len(tokens) != len(values):
        raise InvalidArgumentError("tokens", f"{len(tokens)} ids", f"{len(values)} ids")
    likelihood: Floats = values[np.arange(len(values)), np.asarray(tokens, dtype=np.int64)]
    return -likelihood


def _rows(values: npt.ArrayLike, name: str) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2:
        raise InvalidArgumentError(name, f"shape {array.shape}", "[positions, vocabulary]")
    if np.isnan(array).any():
        raise InvalidArgumentError(name, "NaN", "log-probabilities")
    return array


def _pair(full: Any, method: Any) -> tuple[Floats, Floats]:
    p, q = _rows(full, "full"), _rows(method, "method")
    if p.shape != q.shape:
        raise InvalidArgumentError("method", f"shape {q.shape}", f"the shape of full, {p.shape}")
    return p, q
