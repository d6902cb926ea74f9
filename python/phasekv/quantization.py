"""Keys and values in 2 or 4 bits, as KIVI does it (arXiv 2402.02750): `docs/quantization.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from phasekv import _core
from phasekv.errors import InvalidArgumentError
from phasekv.reuse.stream import current_stream

GroupAxis = Literal["tokens", "channels"]
"""What the elements of a group follow each other along: ``tokens`` for keys, where a few channels
are far larger than the others, ``channels`` for values."""

_MOST_GROUP_SIZE = 1 << 20


@dataclass(frozen=True)
class Quantization:
    """How finely, and over how many elements that share a scale and a zero point.

    Parameters
    ----------
    bits : int
        2 or 4.
    group_size : int
        A multiple of ``32 / bits``, so that groups begin with a word of codes.

    Raises
    ------
    InvalidArgumentError
        For other numbers.
    """

    bits: int
    group_size: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (2, 4):
            raise InvalidArgumentError("bits", repr(self.bits), "2 or 4")
        size = self.group_size
        is_number = isinstance(size, int) and not isinstance(size, bool)
        if not is_number or not 0 < size <= _MOST_GROUP_SIZE or size % self.codes_in_word:
            raise InvalidArgumentError(
                "group_size", repr(size), f"a multiple of {self.codes_in_word}, at most 2**20"
            )

    @property
    def codes_in_word(self) -> int:
        """Codes that one word of 32 bits holds."""
        return 32 // self.bits

    @property
    def bits_per_element(self) -> float:
        """Where groups are full: a code's bits, and its share of two float16 for each group."""
        return self.bits + 32 / self.group_size

    @property
    def name(self) -> str:
        """Tells it from every other way of keeping keys and values."""
        return f"kivi-{self.bits}-{self.group_size}"


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Quantised rows ``[tokens, heads, head size]``.

    Parameters
    ----------
    quantization : Quantization
        Bits and group size.
    axis : str
        Along which groups lie.
    tokens : int
        How many there are.
    codes, scales, zero_points : torch.Tensor
        int32, float16 and float16, as ``include/phasekv/ops/quantize.h`` describes them.
    """

    quantization: Quantization
    axis: GroupAxis
    tokens: int
    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, quantization: Quantization, axis: GroupAxis) -> QuantizedRows:
        """Quantise rows of float32, bfloat16 or float16, the last dimension contiguous."""
        codes, scales = part_shapes(tuple(rows.shape), quantization, axis)
        quantized = cls(
            quantization,
            axis,
            rows.shape[0],
            torch.empty(codes, dtype=torch.int32, device=rows.device),
            torch.empty(scales, dtype=torch.float16, device=rows.device),
            torch.empty(scales, dtype=torch.float16, device=rows.device),
        )
        quantized.fill(rows)
        return quantized

    def fill(self, rows: torch.Tensor) -> None:
        """Quantise rows of this size into these tensors."""
        _core.quantize(
            rows=rows,
            bits=self.quantization.bits,
            group_size=self.quantization.group_size,
            axis=self.axis,
            codes=self.codes,
            scales=self.scales,
            zero_points=self.zero_points,
            stream=current_stream(rows.device),
        )

    def read(self, first_token: int, out: torch.Tensor) -> None:
        """Dequantise ``out.shape[0]`` tokens from ``first_token`` on into ``out``."""
        _core.dequantize(
            codes=self.codes,
            scales=self.scales,
            zero_points=self.zero_points,
            bits=self.quantization.bits,
            group_size=self.quantization.group_size,
            axis=self.axis,
            tokens=self.tokens,
            first_token=first_token,
            out=out,
            stream=current_stream(out.device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zero_points))

    def followed_by(self, others: Iterable[QuantizedRows]) -> QuantizedRows:
        """These tokens and more of the same kind.

        Along tokens every one but the last must end with a full group, or its rest would be taken
        for the beginning of the next.
        """
        all_rows = [self, *others]
        for rows in all_rows[:-1]:
            if self.axis == "tokens" and rows.tokens % self.quantization.group_size:
                raise InvalidArgumentError(
                    "tokens", str(rows.tokens), f"a multiple of {self.quantization.group_size}"
                )
        joined = [
            torch.cat(parts)
            for parts in zip(
                *((rows.codes, rows.scales, rows.zero_points) for rows in all_rows), strict=True
            )
        ]
        return QuantizedRows(
            self.quantization, self.axis, sum(rows.tokens for rows in all_rows), *joined
        )

    def with_parts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedRows:
        """The same with every tensor changed alike: other heads, say."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zero_points=change(self.zero_points),
        )


def part_shapes(
    shape: tuple[int, ...], quantization: Quantization, axis: GroupAxis
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes, and of the scales, of rows ``[tokens, heads, head size]``."""
    tokens, heads, head_size = shape
    in_word, group_size = quantization.codes_in_word, quantization.group_size
    if axis == "tokens":
        return (
            (-(-tokens // in_word), heads, head_size),
            (-(-tokens // group_size), heads, head_size),
        )
    return (tokens, heads, -(-head_size // in_word)), (tokens, heads, -(-head_size // group_size))
