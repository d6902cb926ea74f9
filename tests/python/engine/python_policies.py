"""Policies that a researcher might write in Python, good and bad, for the tests' engines."""

from __future__ import annotations

import torch


def newest(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Keep the newest tokens."""
    assert keys.shape == values.shape
    assert keys.shape[:2] == positions.shape
    assert len(queries) == 32
    assert bool(keys.isfinite().all())
    return positions.float()


def not_a_number(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Scores that are not finite."""
    return positions.float() * float("nan")


def wrong_shape(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One score too few."""
    return positions.float()[:, 1:]


def raises(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """No scores at all."""
    raise RuntimeError("no idea")
