"""A stored chunk: the tokens of a memory note with the keys and values they were encoded to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phasekv.errors import InvalidArgumentError
from phasekv.memory.keys import ChunkKey, int32_tokens
from phasekv.memory.quantized_tensor import QuantizedTensor
from phasekv.quantization import Quantization


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
        Position that the first token had when the chunk was encoded.
    keys : torch.Tensor or QuantizedTensor
        ``[layers, tokens, local KV heads, head size]`` on the CPU. Tensors are post-RoPE: token
        ``i`` is rotated to ``position + i``. Quantised ones are not rotated, as at position 0.
    values : torch.Tensor or QuantizedTensor
        As `keys`, of the same dtype, and quantised alike if they are.

    Raises
    ------
    InvalidArgumentError
        Where the parts do not fit each other.
    """

    key: ChunkKey
    tokens: npt.NDArray[np.int32]
    position: int
    keys: torch.Tensor | QuantizedTensor
    values: torch.Tensor | QuantizedTensor

    def __post_init__(self) -> None:
        tokens: Any = self.tokens
        self.tokens = int32_tokens(tokens).copy()
        if self.tokens.size == 0:
            raise InvalidArgumentError("tokens", "[]", "at least one token")
        if not 0 <= self.position < 2**31:
            raise InvalidArgumentError("position", str(self.position), "at least 0, below 2**31")
        for name in ("keys", "values"):
            tensor = getattr(self, name)
            if isinstance(tensor, torch.Tensor):
                if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                    raise InvalidArgumentError(
                        name, f"{tensor.layout} on {tensor.device}", "a dense tensor on the CPU"
                    )
                setattr(self, name, tensor.detach())
            shape = tuple(tensor.shape)
            if len(shape) != 4 or shape[1] != self.tokens.size or 0 in shape:
                raise InvalidArgumentError(
                    name, f"shape {shape}", f"[layers, {self.tokens.size}, KV heads, head size]"
                )
        if _kind_of(self.keys) != _kind_of(self.values):
            raise InvalidArgumentError(
                "values", _kind_of(self.values), f"as the keys: {_kind_of(self.keys)}"
            )

    @property
    def quantization(self) -> Quantization | None:
        """How it is quantised; None: it is exact."""
        return self.keys.quantization if isinstance(self.keys, QuantizedTensor) else None

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors it consists of, by name, keys first."""
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if isinstance(tensor, torch.Tensor):
                parts[name] = tensor
            else:
                parts[f"{name}.codes"] = tensor.codes
                parts[f"{name}.scales"] = tensor.scales
                parts[f"{name}.zero_points"] = tensor.zero_points
        return parts

    @property
    def nbytes(self) -> int:
        """Memory that the chunk keeps alive, measured: its whole storages and its tokens."""
        storages = [part.untyped_storage() for part in self.parts.values()]
        # Keys and values may be two views of one storage.
        measured = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(measured.values()) + self.tokens.nbytes

    def compact(self) -> StoredChunk:
        """Return this chunk, or a copy if its tensors are views of something larger.

        A view of a whole prompt's keys would keep all of them in memory for as long as the chunk
        is stored.
        """
        if self.nbytes <= sum(part.nbytes for part in self.parts.values()) + self.tokens.nbytes:
            return self
        keys, values = (
            tensor.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(tensor, torch.Tensor)
            else replace(
                tensor,
                codes=tensor.codes.clone(),
                scales=tensor.scales.clone(),
                zero_points=tensor.zero_points.clone(),
            )
            for tensor in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values)

    def rows(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer's tokens, ``[end - begin, KV heads, head size]`` each.

        Views of an exact chunk, and new tensors of a quantised one, whose keys are not rotated.
        """
        if isinstance(self.keys, torch.Tensor) and isinstance(self.values, torch.Tensor):
            return self.keys[layer, begin:end], self.values[layer, begin:end]
        keys, values = torch.empty((2, end - begin, *self.keys.shape[2:]), dtype=self.keys.dtype)
        self.read(layer, begin, keys, values)
        return keys, values

    def read(self, layer: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `rows` gives into tensors of ``[tokens, KV heads, head size]``."""
        for tensor, out in ((self.keys, keys), (self.values, values)):
            if isinstance(tensor, QuantizedTensor):
                tensor.layer(layer).read(begin, out)
            else:
                out.copy_(tensor[layer, begin : begin + out.shape[0]])


def _kind_of(tensor: torch.Tensor | QuantizedTensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    return kind if isinstance(tensor, torch.Tensor) else f"{kind} {tensor.quantization.name}"
