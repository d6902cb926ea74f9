"""KIVI's quantisation in plain torch, group by group."""

from __future__ import annotations

import torch


def kept(states: torch.Tensor, bits: int, group_size: int, dim: int) -> torch.Tensor:
    """What is left of states that were quantised in groups along `dim`."""
    pieces = [_kept_group(group.float(), bits, dim) for group in states.split(group_size, dim=dim)]
    return torch.cat(pieces, dim=dim).to(states.dtype)


def _kept_group(group: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    most = 2**bits - 1
    least, largest = group.amin(dim, keepdim=True), group.amax(dim, keepdim=True)
    zero_point = least.half().float()
    scale = ((largest - least) / most).half().float()
    codes = ((group - zero_point) / scale).clamp(0, most).round()  # half to even
    return torch.where(scale > 0, codes, 0.0) * scale + zero_point
