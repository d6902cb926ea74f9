"""What an ``EvictingCache`` holds its keys and values in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from phasekv import _core


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass.

    Attributes
    ----------
    shape : tuple of int
        (batch, columns).
    places : torch.Tensor or None
        int64, ascending, on the model's device: which of the batch x columns places hold tokens;
        None: all. The others are padding.
    tokens : list of torch.Tensor
        int32 on the CPU, those of each row without padding.
    begins : list of int
        Tokens that each row had computed before.
    """

    shape: tuple[int, int]
    places: torch.Tensor | None
    tokens: list[torch.Tensor]
    begins: list[int]


class HeldKeys(Protocol):
    """Keys and values of the rows of a batch, and the evictor that decides which of them stay.

    A forward pass calls ``begin``, then for each layer ``store`` and ``attend``, then ``finish``.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""

    @property
    def state_nbytes(self) -> int:
        """Bytes that the policy carries along."""

    def begin(self, step: Step) -> None:
        """The tokens of a forward pass are there."""

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's new keys and values, [batch, kv heads, columns, head size]."""

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of ``query`` [batch, query heads, columns, head size] over what is held.

        Returns ``[batch, columns, query heads, head size]``, zero for padding. An event follows
        where it is due.
        """

    def finish(self) -> list[tuple[_core.EvictionReport, list[float]]]:
        """All layers ran. Returns the events, each with the tokens kept of each phase after it."""

    def positions(self, row: int, layer: int) -> torch.Tensor:
        """Positions of a row's held keys, [kv heads, most held]; -1 where a head holds fewer."""


def token_rows(states: torch.Tensor, step: Step) -> torch.Tensor:
    """From [batch, heads, columns, head size] to [tokens, heads, head size], without padding."""
    rows: torch.Tensor = states.detach().transpose(1, 2).flatten(0, 1)
    return rows if step.places is None else rows[step.places]


def with_padding(rows: torch.Tensor, step: Step) -> torch.Tensor:
    """From [tokens, heads, head size] to [batch, columns, heads, head size], zero for padding."""
    if step.places is not None:
        whole = rows.new_zeros((math.prod(step.shape), *rows.shape[1:]))
        whole[step.places] = rows
        rows = whole
    return rows.view(*step.shape, *rows.shape[1:])
