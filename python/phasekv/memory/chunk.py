"""A stored chunk: the tokens of a memory note with the keys and values they were encoded to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phasekv.errors import InvalidArgumentError
from phasekv.memory.keys import ChunkKey, int32_tokens


@dataclass(eq=False)
class StoredChunk:
    """Keys and values of a chunk on one rank. Not changed once it is stored.

    Parameters
    ----------
    key : ChunkKey
        Content key.
    tokens : npt.NDArray[np.int32]
        Token ids, ``[tokens]``, at least one.
    position : int
        Position that the first token had when the chunk was encoded. Keys are post-RoPE: token
        ``i`` is rotated to ``position + i``.
    keys : torch.Tensor
        ``[layers, tokens, local KV heads, head size]`` on the CPU.
    values : torch.Tensor
        As `keys`, of the same dtype.

    Raises
    ------
    InvalidArgumentError
        Where the parts do not fit each other.
    """

    key: ChunkKey
    tokens: npt.NDArray[np.int32]
    position: int
    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        tokens: Any = self.tokens
        self.tokens = int32_tokens(tokens).copy()
        if self.tokens.size == 0:
            raise InvalidArgumentError("tokens", "[]", "at least one token")
        if not 0 <= self.position < 2**31:
            raise InvalidArgumentError("position", str(self.position), "at least 0, below 2**31")
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise InvalidArgumentError(
                    name, f"{tensor.layout} on {tensor.device}", "a dense tensor on the CPU"
                )
            if tensor.ndim != 4 or tensor.shape[1] != self.tokens.size or tensor.numel() == 0:
                raise InvalidArgumentError(
                    name,
                    f"shape {tuple(tensor.shape)}",
                    f"[layers, {self.tokens.size}, KV heads, head size]",
                )
        self.keys, self.values = self.keys.detach(), self.values.detach()
        if self.keys.shape != self.values.shape or self.keys.dtype != self.values.dtype:
            raise InvalidArgumentError(
                "values",
                f"{self.values.dtype} {tuple(self.values.shape)}",
                f"as the keys: {self.keys.dtype} {tuple(self.keys.shape)}",
            )

    @property
    def nbytes(self) -> int:
        """Memory that the chunk keeps alive, measured: its whole storages and its tokens."""
        storages = (self.keys.untyped_storage(), self.values.untyped_storage())
        # Keys and values may be two views of one storage.
        measured = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(measured.values()) + self.tokens.nbytes

    def compact(self) -> StoredChunk:
        """Return this chunk, or a copy if its tensors are views of something larger.

        A view of a whole prompt's keys would keep all of them in memory for as long as the chunk
        is stored.
        """
        if self.nbytes <= self.keys.nbytes + self.values.nbytes + self.tokens.nbytes:
            return self
        keys, values = (
            tensor.detach().clone(memory_format=torch.contiguous_format)
            for tensor in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values)
