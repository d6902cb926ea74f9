"""Agreement between tensor-parallel ranks: all must drop the same rows."""

from __future__ import annotations

from typing import Any

import torch


class Ranks:
    """The tensor-parallel group of this worker.

    Parameters
    ----------
    group : vllm GroupCoordinator or None
        None stands for a single rank.
    head_copies : int
        Ranks that hold the same KV head (more than one when there are more ranks than heads).
    """

    def __init__(self, group: Any = None, head_copies: int = 1) -> None:
        self._group = group if group is not None and group.world_size > 1 else None
        self._head_copies = head_copies

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self._group is None or self._group.rank_in_group == 0

    def add(self, squared: torch.Tensor) -> torch.Tensor:
        """Sum of squared divergences over ranks, bit for bit the same on each of them."""
        if self._group is None:
            return squared
        total = self._group.all_reduce(squared.contiguous()) / self._head_copies
        shared: torch.Tensor = self._group.broadcast(total.contiguous(), src=0)
        return shared

    def all_have(self, present: list[bool]) -> list[bool]:
        """For each item, whether every rank has it."""
        if self._group is None or not present:
            return present
        flags = torch.tensor(present, dtype=torch.float32, device=self._group.device)
        counts = self._group.all_reduce(flags)
        everywhere: list[bool] = (counts > self._group.world_size - 0.5).tolist()
        return everywhere
