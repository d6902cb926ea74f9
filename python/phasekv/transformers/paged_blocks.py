"""Blocks of keys and values of all layers, in memory that grows and shrinks with what is held."""

from __future__ import annotations

import itertools

import torch

from phasekv import _core
from phasekv.reuse.stream import current_stream
from phasekv.transformers.block_memory import block_memory

_LEAST_BLOCKS = 8
_COPIED_AT_ONCE = 64  # blocks: what exists twice while a pool grows


class PagedBlocks:
    """One pool: a block id means the same block in every layer.

    A block lies in one piece, ``[layers, 2, kv_heads, block_size, head_size]``: first a layer's
    keys, then its values.

    Parameters
    ----------
    layers, kv_heads, block_size, head_size : int
        Sizes.
    dtype : torch.dtype
        float32, bfloat16 or float16.
    device : torch.device
        The CPU or a CUDA device.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_layers = layers
        self._block_shape = (layers, 2, kv_heads, block_size, head_size)
        self._memory = block_memory(_LEAST_BLOCKS, self._block_shape, dtype, device)
        self._views: dict[int, _core.PagedKV] = {}
        self._free = list(range(_LEAST_BLOCKS))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' keys and values, and on a device those of free blocks too.

        On the CPU free blocks take no memory, but a page that one shares with a block in use stays.
        """
        free = len(self._free) if self._memory.gives_back else 0
        return (self._capacity - free) * self._memory.block_nbytes

    def kv(self, layer: int) -> _core.PagedKV:
        """A layer's blocks; valid until blocks are allocated."""
        if layer not in self._views:
            self._views[layer] = _core.strided_paged_kv(
                key=self._memory.blocks[:, layer, 0], value=self._memory.blocks[:, layer, 1]
            )
        return self._views[layer]

    def rows(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots`` (int64), each [slots, kv heads, head size]."""
        kv = self.kv(layer)
        shape = (len(slots), kv.num_heads, kv.head_size)
        keys, values = (self._memory.blocks.new_empty(shape) for _ in range(2))
        stream = current_stream(keys.device)
        _core.gather_blocks(blocks=kv.key, slots=slots, out=keys, stream=stream)
        _core.gather_blocks(blocks=kv.value, slots=slots, out=values, stream=stream)
        return keys, values

    def allocate(self, count: int) -> list[int]:
        """Ids of ``count`` blocks, of any content, in ascending order."""
        missing = count - len(self._free)
        if missing > 0:
            # More than is needed now: growing copies all. On a device what is free takes memory.
            needed = self._capacity + missing
            self._grow(2 * needed if self._memory.gives_back else needed + needed // 8)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, blocks: list[int]) -> dict[int, int]:
        """Give blocks and their memory back.

        Returns the ids that blocks in use have now, by those before; empty: they stay as they are.
        On a device blocks in use move to a smaller tensor once half of all are free.
        """
        self._free = sorted(self._free + blocks)
        if not self._memory.gives_back:
            return self._shrink() if 2 * len(self._free) > self._capacity else {}
        released = set(blocks)
        for begin, end in _runs(self._free):
            if not released.isdisjoint(range(begin, end)):
                self._memory.give_back(begin, end)
        return {}

    @property
    def _capacity(self) -> int:
        return self._memory.blocks.shape[0]

    def _blocks_in_use(self) -> list[int]:
        free = set(self._free)
        return [block for block in range(self._capacity) if block not in free]

    def _shrink(self) -> dict[int, int]:
        in_use = self._blocks_in_use()
        capacity = max(_LEAST_BLOCKS, len(in_use) + len(in_use) // 8)
        if capacity >= self._capacity:
            return {}
        old = self._memory.blocks
        self._memory = block_memory(capacity, self._block_shape, old.dtype, old.device)
        self._memory.blocks[: len(in_use)] = old[torch.tensor(in_use, device=old.device)]
        self._free = list(range(len(in_use), capacity))
        self._views.clear()
        return {before: now for now, before in enumerate(in_use)}

    def _grow(self, capacity: int) -> None:
        old = self._memory
        new = block_memory(capacity, self._block_shape, old.blocks.dtype, old.blocks.device)
        for begin, end in _runs(self._blocks_in_use()):
            for first in range(begin, end, _COPIED_AT_ONCE):
                last = min(end, first + _COPIED_AT_ONCE)
                new.blocks[first:last] = old.blocks[first:last]
                old.give_back(first, last)
        self._free += range(self._capacity, capacity)
        self._memory = new
        self._views.clear()


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """[begin, end) of the ids that follow each other, of ascending ones."""
    gaps = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    bounds = itertools.pairwise([0, *gaps, len(blocks)]) if blocks else []
    return [(blocks[begin], blocks[end - 1] + 1) for begin, end in bounds]
