"""Quantises chunks as a store keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from phasekv import _core
from phasekv.errors import InvalidArgumentError
from phasekv.memory.chunk import StoredChunk
from phasekv.memory.quantized_tensor import QuantizedTensor
from phasekv.quantization import Quantization


@dataclass(frozen=True)
class ChunkQuantizer:
    """Keys in groups along tokens, turned back to position 0; values in groups along channels.

    A channel of keys that have no rotation varies less from token to token, so that a few bits tell
    it better; and such keys are rotated once, to wherever they are used.

    Parameters
    ----------
    quantization : Quantization
        Bits and group size.
    rope : phasekv._core.Rope
        The model's rotation.
    """

    quantization: Quantization
    rope: _core.Rope

    def __call__(self, chunk: StoredChunk) -> StoredChunk:
        """The chunk quantised; one that is, comes back as it is.

        Raises
        ------
        InvalidArgumentError
            If it is quantised in another way. Nothing is ever quantised twice.
        """
        if chunk.quantization == self.quantization:
            return chunk
        if isinstance(chunk.keys, QuantizedTensor) or isinstance(chunk.values, QuantizedTensor):
            assert chunk.quantization is not None
            raise InvalidArgumentError(
                "chunk", chunk.quantization.name, f"an exact one, or {self.quantization.name}"
            )
        keys = torch.empty(chunk.keys.shape, dtype=torch.float32)
        positions = torch.arange(chunk.position, chunk.position + len(chunk.tokens))
        for rows, layer in zip(keys, chunk.keys, strict=True):
            rows.copy_(layer)
            _core.rotate_keys(keys=rows, deltas=-positions, rope=self.rope, out=rows)
        quantized = QuantizedTensor.of(keys, self.quantization, "tokens")
        return replace(
            chunk,
            keys=replace(quantized, dtype=chunk.keys.dtype),
            values=QuantizedTensor.of(chunk.values, self.quantization, "channels"),
        )
