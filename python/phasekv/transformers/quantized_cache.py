"""A transformers cache that keeps all but the newest keys and values in 2 or 4 bits (KIVI).

A layer's attention sees everything dequantised, for as long as that layer runs: what is saved is
the memory that stays, not the memory that one layer needs for a moment.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.quantization import GroupAxis, Quantization, QuantizedRows
from phasekv.transformers.models import check_device, check_same_device
from phasekv.transformers_versions import new_tokens_of

RESIDUAL = 128
"""Of KIVI's published tables."""


class QuantizedCache(Cache):  # type: ignore[misc]
    """Keys and values of a batch: KIVI's quantised ones, and the newest as they are.

    With a residual of R tokens, after each forward pass: keys are quantised in blocks of R, so that
    the newest (tokens mod R) stay exact; of the values exactly the newest R stay exact. A pass
    attends the exact keys and values of its own tokens, and of those before it what is kept.

    ``phasekv.transformers.quantize`` makes one for each generation; one made by hand is passed to
    ``generate`` as ``past_key_values``.

    Parameters
    ----------
    layers : int
        Decoder layers of the model.
    quantization : Quantization
        Bits and group size.
    residual : int
        R in tokens, a multiple of the group size.

    Raises
    ------
    InvalidArgumentError
        For another residual.
    """

    def __init__(self, layers: int, quantization: Quantization, residual: int = RESIDUAL) -> None:
        is_number = isinstance(residual, int) and not isinstance(residual, bool)
        if not is_number or residual < 1 or residual % quantization.group_size:
            raise InvalidArgumentError(
                "residual", repr(residual), f"a multiple of {quantization.group_size} tokens"
            )
        super().__init__(layers=[_Layer(quantization, residual) for _ in range(layers)])
        self.quantization = quantization
        self.residual = residual

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a layer attends, its new ones included."""
        if layer_idx >= len(self.layers):
            raise InvalidArgumentError(
                "past_key_values", f"{len(self.layers)} layers", "as many as the model has"
            )
        attended: tuple[torch.Tensor, torch.Tensor]
        attended = self.layers[layer_idx].update(key_states, value_states)
        return attended

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache keeps, measured."""
        return sum(part.nbytes for part in self._parts())

    @property
    def report(self) -> dict[str, int | float]:
        """What is kept, for one row of the batch and one layer in tokens, for all of them in bytes.

        ``bytes`` is measured; ``bytes_by_formula`` is bits + 32 / group size for each quantised
        element and the dtype's size for each other, which is the same where groups of channels are
        full; ``bytes_exact`` is what an exact cache takes.
        """
        parts = list(self._parts())
        layer = self.layers[0]
        per_element = self.quantization.bits_per_element / 8
        return {
            "tokens": layer.get_seq_length(),
            "quantized_key_tokens": layer.key_part.quantized_tokens,
            "quantized_value_tokens": layer.value_part.quantized_tokens,
            "bytes": self.nbytes,
            "bytes_by_formula": sum(
                part.quantized_elements * per_element + part.recent_bytes for part in parts
            ),
            "bytes_exact": sum(
                part.quantized_elements * part.element_size + part.recent_bytes for part in parts
            ),
        }

    def crop(self, *_: Any, **__: Any) -> None:
        """Refused: a quantised group cannot lose tokens (assisted decoding)."""
        raise UnsupportedError("assisted decoding", "on", "quantised tokens cannot be taken back")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        for part in self._parts():
            part.select(torch.arange(part.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        for part in self._parts():
            part.select(indices)

    def _parts(self) -> list[_Part]:
        return [part for layer in self.layers for part in (layer.key_part, layer.value_part)]


class _Part:
    """Keys or values of a layer: quantised ones, then those that are kept as they are."""

    def __init__(self, quantization: Quantization, axis: GroupAxis) -> None:
        self._quantization = quantization
        self._axis: GroupAxis = axis
        self._quantized: QuantizedRows | None = None  # rows of [tokens, batch * heads, head size]
        self._recent: torch.Tensor | None = None  # [batch, heads, tokens, head size]

    @property
    def batch(self) -> int:
        return 0 if self._recent is None else self._recent.shape[0]

    @property
    def quantized_tokens(self) -> int:
        return 0 if self._quantized is None else self._quantized.tokens

    @property
    def tokens(self) -> int:
        return self.quantized_tokens + (0 if self._recent is None else self._recent.shape[2])

    @property
    def quantized_elements(self) -> int:
        if self._recent is None:
            return 0
        batch, heads, _, head_size = self._recent.shape
        return self.quantized_tokens * batch * heads * head_size

    @property
    def element_size(self) -> int:
        return 0 if self._recent is None else self._recent.element_size()

    @property
    def recent_bytes(self) -> int:
        """Of the whole storage, should the tensor be a view of one that is larger."""
        return 0 if self._recent is None else self._recent.untyped_storage().nbytes()

    @property
    def nbytes(self) -> int:
        return self.recent_bytes + (0 if self._quantized is None else self._quantized.nbytes)

    def followed_by(self, new: torch.Tensor) -> torch.Tensor:
        """Everything kept, dequantised, and new ``[batch, heads, tokens, head size]``."""
        if self._recent is None:
            check_device(new.device)
            return new
        check_same_device(new.device, self._recent.device)
        batch, heads, recent, head_size = self._recent.shape
        if (batch, heads, head_size) != (*new.shape[:2], new.shape[3]):
            raise InvalidArgumentError(
                "past_key_values",
                f"{batch} rows of {heads} heads of {head_size}",
                f"{new.shape[0]} of {new.shape[1]} of {new.shape[3]}, as the model's",
            )
        begin = self.quantized_tokens
        out = new.new_empty((batch, heads, begin + recent + new.shape[2], head_size))
        if self._quantized is not None:
            self._quantized.read(0, out.flatten(0, 1)[:, :begin].transpose(0, 1))
        out[:, :, begin : begin + recent] = self._recent
        out[:, :, begin + recent :] = new
        return out

    def keep(self, new: torch.Tensor, quantize: int) -> None:
        """Take new ones, and quantise the oldest ``quantize`` of those that are exact."""
        new = new.detach()
        recent = new if self._recent is None else torch.cat([self._recent, new], dim=2)
        if quantize:
            rows = recent[:, :, :quantize].permute(2, 0, 1, 3).flatten(1, 2).contiguous()
            quantized = QuantizedRows.of(rows, self._quantization, self._axis)
            before = self._quantized
            self._quantized = quantized if before is None else before.followed_by([quantized])
        # A copy where it is a view: it would keep what was quantised in memory.
        self._recent = recent[:, :, quantize:].clone(memory_format=torch.contiguous_format)

    def select(self, rows: torch.Tensor) -> None:
        if self._recent is None:
            return
        batch = self.batch
        self._recent = self._recent.index_select(0, rows)
        if self._quantized is not None:
            self._quantized = self._quantized.with_parts(
                lambda part: part.unflatten(1, (batch, -1)).index_select(1, rows).flatten(1, 2)
            )


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer."""

    is_sliding = False

    def __init__(self, quantization: Quantization, residual: int) -> None:
        super().__init__()
        self._quantization = quantization
        self._residual = residual
        self.reset()

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: sizes come with the first keys."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values to attend now; what is quantised here is seen by the next pass."""
        keys = self.key_part.followed_by(key_states)
        values = self.value_part.followed_by(value_states)
        tokens = keys.shape[2]
        end = tokens // self._residual * self._residual
        self.key_part.keep(key_states, end - self.key_part.quantized_tokens)
        end = max(0, tokens - self._residual)
        self.value_part.keep(value_states, end - self.value_part.quantized_tokens)
        return keys, values

    def reset(self) -> None:
        """Forget everything."""
        self.key_part = _Part(self._quantization, "tokens")
        self.value_part = _Part(self._quantization, "channels")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search: rows change places."""
        self.key_part.select(beam_idx)
        self.value_part.select(beam_idx)

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.key_part.tokens

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Length and offset of what a mask covers."""
        return self.get_seq_length() + new_tokens_of(query), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1
