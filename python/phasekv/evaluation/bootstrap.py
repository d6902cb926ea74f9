"""Means with bootstrap intervals, where the questions are what is resampled.

Positions of one answer depend on each other, so an interval that resampled positions would be too
narrow. Each question brings a group of values; a resample draws questions with replacement and
takes the mean of all their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError

DEFAULT_RESAMPLES = 2000
DEFAULT_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and its percentile-bootstrap interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """The three numbers, for JSON."""
        return asdict(self)


def bootstrap_mean(
    groups: Sequence[npt.ArrayLike],
    *,
    resamples: int = DEFAULT_RESAMPLES,
    confidence: float = DEFAULT_CONFIDENCE,
    seed: int = 0,
) -> Estimate:
    """The mean of all values, with an interval from resampling whole groups.

    Parameters
    ----------
    groups
        One array of values per question, of any length above zero; a bare number is one value.
    resamples
        How many bootstrap resamples to draw.
    confidence
        The share of resampled means the interval holds, such as 0.95.
    seed
        The same seed draws the same questions, so that methods are compared on equal draws.
    """
    arrays = [np.atleast_1d(np.asarray(group, dtype=np.float64)) for group in groups]
    if not arrays:
        raise InvalidArgumentError("groups", "[]", "at least one group")
    if any(array.size == 0 for array in arrays):
        raise InvalidArgumentError("groups", "an empty group", "at least one value in each")
    if not 0.0 < confidence < 1.0:
        raise InvalidArgumentError("confidence", str(confidence), "a share inside (0, 1)")
    if resamples < 1:
        raise InvalidArgumentError("resamples", str(resamples), "a positive count")
    sums = np.array([array.sum() for array in arrays])
    counts = np.array([array.size for array in arrays], dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(arrays), size=(resamples, len(arrays)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high))


def paired_difference(
    first: Sequence[npt.ArrayLike],
    second: Sequence[npt.ArrayLike],
    *,
    resamples: int = DEFAULT_RESAMPLES,
    confidence: float = DEFAULT_CONFIDENCE,
    seed: int = 0,
) -> Estimate:
    """The mean of ``first`` minus ``second``, value by value, resampled by question.

    Both hold the same questions in the same order. An interval that excludes zero says that the
    two methods differ on this data.
    """
    if len(first) != len(second):
        raise InvalidArgumentError("second", f"{len(second)} groups", f"{len(first)} groups")
    differences = []
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        left = np.atleast_1d(np.asarray(one, dtype=np.float64))
        right = np.atleast_1d(np.asarray(other, dtype=np.float64))
        if left.shape != right.shape:
            raise InvalidArgumentError(
                f"second[{index}]", f"shape {right.shape}", f"shape {left.shape}"
            )
        differences.append(left - right)
    return bootstrap_mean(differences, resamples=resamples, confidence=confidence, seed=seed)
