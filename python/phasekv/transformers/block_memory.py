"""Memory of many blocks: on the CPU its pages go back to the system run by run."""

from __future__ import annotations

import math
import mmap
from typing import Protocol

import torch

# From so many bytes on the system may use pages of 2 MB: writing and giving back a prompt's blocks
# then costs a fraction, and what a run of blocks cannot give back at its ends is a few percent.
_LEAST_HUGE = 64 * 1024 * 1024


class BlockMemory(Protocol):
    """Blocks of zeros.

    Attributes
    ----------
    blocks : torch.Tensor
        ``[count, *shape]``.
    block_nbytes : int
        Of one block.
    gives_back : bool
        Whether blocks that are given back take no memory any more.
    """

    blocks: torch.Tensor
    block_nbytes: int
    gives_back: bool

    def give_back(self, begin: int, end: int) -> None:
        """``blocks[begin:end]`` are not needed: their content is gone."""


def block_memory(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> BlockMemory:
    """``count`` blocks of ``shape``, at least one, on the CPU or another device."""
    if device.type == "cpu":
        return SystemBlocks(count, shape, dtype)
    return DeviceBlocks(count, shape, dtype, device)


class DeviceBlocks:
    """One tensor of a device, which takes its memory as long as it is there."""

    gives_back = False

    def __init__(
        self, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_nbytes = math.prod(shape) * dtype.itemsize
        self.blocks = torch.zeros((count, *shape), dtype=dtype, device=device)

    def give_back(self, begin: int, end: int) -> None:
        """Nothing: a tensor has no parts that could go."""


class SystemBlocks:
    """A block takes no memory before it is written, nor after it is given back.

    Nothing moves when blocks are given back: the system takes their pages, and has zeros there
    when they are used again.

    Parameters
    ----------
    count : int
        Blocks, at least 1.
    shape : tuple of int
        Of a block.
    dtype : torch.dtype
        Of its elements.
    """

    gives_back = True

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.block_nbytes = math.prod(shape) * dtype.itemsize
        # The tensor keeps the mapping alive, which is private: a forked process gets a copy.
        self._pages = mmap.mmap(
            -1, count * self.block_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if len(self._pages) >= _LEAST_HUGE:
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.blocks = torch.frombuffer(self._pages, dtype=dtype).view(count, *shape)

    def give_back(self, begin: int, end: int) -> None:
        """The pages that lie in ``blocks[begin:end]`` as a whole."""
        first = -(-begin * self.block_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end * self.block_nbytes // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._pages.madvise(mmap.MADV_DONTNEED, first, length)
