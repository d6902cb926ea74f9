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


def as_queries_say(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One of the others: an engine has one function, and requests say how many queries it gets."""
    policy = {1: not_a_number, 2: wrong_shape, 3: raises}.get(len(queries), newest)
    return policy(keys, values, queries, positions)


def raises(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """No scores at all."""
    raise RuntimeError("no idea")
