"""Keys or values of all layers of a chunk, quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phasekv.errors import InvalidArgumentError
from phasekv.quantization import GroupAxis, Quantization, QuantizedRows, part_shapes


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """``[layers, tokens, KV heads, head size]`` in a few bits.

    Parameters
    ----------
    quantization : Quantization
        Bits and group size. A last group that is not full has a scale and a zero point of its own.
    axis : str
        Along which groups lie: ``tokens`` or ``channels``.
    shape : tuple of int
        Layers, tokens, KV heads, head size.
    dtype : torch.dtype
        Of what it was quantised from, and is dequantised to.
    codes, scales, zero_points : torch.Tensor
        Those of each layer's ``QuantizedRows``, one after the other.

    Raises
    ------
    InvalidArgumentError
        Where the parts do not have the shapes that follow from this.
    """

    quantization: Quantization
    axis: GroupAxis
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor

    def __post_init__(self) -> None:
        codes, scales = part_shapes(self.shape[1:], self.quantization, self.axis)
        for name, shape, dtype in (
            ("codes", codes, torch.int32),
            ("scales", scales, torch.float16),
            ("zero_points", scales, torch.float16),
        ):
            part: torch.Tensor = getattr(self, name)
            expected = (self.shape[0], *shape)
            if part.dtype != dtype or tuple(part.shape) != expected or not part.is_contiguous():
                raise InvalidArgumentError(
                    name, f"{part.dtype} {tuple(part.shape)}", f"contiguous {dtype} {expected}"
                )

    @classmethod
    def of(
        cls, tensor: torch.Tensor, quantization: Quantization, axis: GroupAxis
    ) -> QuantizedTensor:
        """Quantise ``[layers, tokens, KV heads, head size]``, layer by layer."""
        layers, tokens, heads, head_size = tensor.shape
        codes, scales = part_shapes((tokens, heads, head_size), quantization, axis)
        quantized = cls(
            quantization,
            axis,
            (layers, tokens, heads, head_size),
            tensor.dtype,
            torch.empty((layers, *codes), dtype=torch.int32),
            torch.empty((layers, *scales), dtype=torch.float16),
            torch.empty((layers, *scales), dtype=torch.float16),
        )
        for layer in range(layers):
            rows = tensor[layer]
            quantized.layer(layer).fill(rows if rows.stride(-1) == 1 else rows.contiguous())
        return quantized

    def layer(self, index: int) -> QuantizedRows:
        """One layer's rows: views, not copies."""
        return QuantizedRows(
            self.quantization,
            self.axis,
            self.shape[1],
            self.codes[index],
            self.scales[index],
            self.zero_points[index],
        )

    def dequantized(self) -> torch.Tensor:
        """All of it in the dtype that it came from."""
        out = torch.empty(self.shape, dtype=self.dtype)
        for index in range(self.shape[0]):
            self.layer(index).read(0, out[index])
        return out
