"""What an ``EvictingCache`` holds its keys and values in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from phasekv import _core


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass.

    Attributes
    ----------
    is_token : torch.Tensor
        bool [batch, columns]; the others are padding.
    tokens : list of torch.Tensor
        int32, those of each row without padding.
    begins : list of int
        Tokens that each row had computed before.
    """

    is_token: torch.Tensor
    tokens: list[torch.Tensor]
    begins: list[int]


class HeldKeys(Protocol):
    """Keys and values of the rows of a batch, and the evictor that decides which of them stay.

    A forward pass calls ``begin``, then for each layer ``store`` and ``attend``, then ``finish``.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, free ones included."""

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
    return states.detach().transpose(1, 2)[step.is_token]


def with_padding(rows: torch.Tensor, step: Step) -> torch.Tensor:
    """From [tokens, heads, head size] to [batch, columns, heads, head size], zero for padding."""
    whole = rows.new_zeros((*step.is_token.shape, *rows.shape[1:]))
    whole[step.is_token] = rows
    return whole
