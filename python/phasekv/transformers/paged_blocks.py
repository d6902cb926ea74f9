"""Blocks of keys and values of all layers, in tensors that grow and shrink with what is held."""

from __future__ import annotations

import torch

from phasekv import _core

_LEAST_GROWTH = 8  # blocks


class PagedBlocks:
    """One pool: a block id means the same block in every layer.

    Parameters
    ----------
    layers, kv_heads, block_size, head_size : int
        Sizes; a block is ``[kv_heads, block_size, head_size]`` keys and as many values, a layer.
    dtype : torch.dtype
        float32, bfloat16 or float16.
    """

    def __init__(
        self, layers: int, kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
    ) -> None:
        self.block_size = block_size
        empty = torch.empty((0, kv_heads, block_size, head_size), dtype=dtype)
        self._keys = [empty] * layers
        self._values = [empty] * layers
        self._views: dict[int, _core.PagedKV] = {}
        self._free: list[int] = []

    @property
    def num_layers(self) -> int:
        """Layers that a block has keys and values of."""
        return len(self._keys)

    @property
    def num_blocks(self) -> int:
        """Blocks there are, free ones included."""
        return self._keys[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return sum(blocks.nbytes for blocks in (*self._keys, *self._values))

    def kv(self, layer: int) -> _core.PagedKV:
        """A layer's blocks; valid until blocks are allocated or given back."""
        if layer not in self._views:
            self._views[layer] = _core.strided_paged_kv(
                key=self._keys[layer], value=self._values[layer]
            )
        return self._views[layer]

    def rows(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots`` (int64), each [slots, kv heads, head size]."""
        kv = self.kv(layer)
        shape = (len(slots), kv.num_heads, kv.head_size)
        keys, values = self._keys[layer].new_empty(shape), self._values[layer].new_empty(shape)
        _core.gather_blocks(blocks=kv.key, slots=slots, out=keys)
        _core.gather_blocks(blocks=kv.value, slots=slots, out=values)
        return keys, values

    def allocate(self, count: int) -> list[int]:
        """Ids of ``count`` blocks, of any content."""
        missing = count - len(self._free)
        if missing > 0:
            begin = self.num_blocks
            growth = max(missing, _LEAST_GROWTH, begin // 8)
            self._resize(begin + growth, torch.arange(begin))
            self._free += range(begin, begin + growth)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, blocks: list[int], tables: list[list[int]]) -> None:
        """Give blocks back; where more than a few are free then, the memory too.

        Parameters
        ----------
        blocks : list of int
            No longer used.
        tables : list of list of int
            All blocks in use. Their ids change, in place, when the tensors shrink.
        """
        self._free += blocks
        used = [block for table in tables for block in table]
        if len(self._free) <= max(_LEAST_GROWTH, len(used) // 4):
            return
        self._resize(len(used), torch.tensor(used, dtype=torch.int64))
        self._free = []
        begin = 0
        for table in tables:
            table[:] = range(begin, begin + len(table))
            begin += len(table)

    def _resize(self, count: int, kept: torch.Tensor) -> None:
        """``count`` blocks, of which the first are those of ``kept``; layer after layer."""
        self._views.clear()
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = old.new_empty((count, *old.shape[1:]))
                if len(kept):
                    torch.index_select(old, 0, kept, out=new[: len(kept)])
                tensors[layer] = new
