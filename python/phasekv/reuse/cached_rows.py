"""One request's cached tokens in one engine step, and what happens to them layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phasekv import _core
from phasekv.memory.chunk import StoredChunk
from phasekv.reuse.function_method import FUNCTION, FunctionMethod
from phasekv.reuse.stream import current_stream

logger = logging.getLogger("phasekv")


@dataclass(frozen=True)
class CachedSegment:
    """The part of one found chunk that is scheduled in this step.

    Attributes
    ----------
    chunk : StoredChunk
        Where its keys and values come from.
    begin : int
        First prompt position that is filled.
    tokens : int
        How many.
    chunk_offset : int
        Token of the stored chunk that goes to ``begin``.
    chunk_tokens : int
        Tokens of the chunk in the prompt, over all steps.
    """

    chunk: StoredChunk
    begin: int
    tokens: int
    chunk_offset: int
    chunk_tokens: int

    @property
    def delta(self) -> int:
        """Positions by which the rows that are read of the chunk are moved."""
        if self.chunk.quantization is not None:
            return 0  # they are rotated to their place as they are dequantised
        return self.begin - (self.chunk.position + self.chunk_offset)


@dataclass(frozen=True)
class _Residuals:
    """What a mean residual is taken of; see the op."""

    fresh_rows: torch.Tensor
    cached_rows: torch.Tensor
    segment_starts: torch.Tensor
    fresh_deltas: torch.Tensor | None
    cached_deltas: torch.Tensor | None


class CachedRows:
    """The cached tokens of one request in one step, in prompt order.

    Parameters
    ----------
    request_id : str
        Whose they are.
    method : phasekv._core.Method or FunctionMethod
        Decides which are computed again.
    ratio : float
        Nominal recompute ratio.
    segments : list of CachedSegment
        Not empty.
    rows : torch.Tensor
        int64 [tokens]: row of each token in the batch.
    slots : torch.Tensor
        int64 [tokens]: where its keys and values go.
    rope : phasekv._core.Rope
        The model's rotation.
    attention : sequence of float
        Per token what the question attends it, for a method that needs it.

    Attributes
    ----------
    failure : str
        What a method that is a Python function did wrong; all tokens are computed again then.
    """

    def __init__(
        self,
        request_id: str,
        method: _core.Method | FunctionMethod,
        ratio: float,
        segments: list[CachedSegment],
        rows: torch.Tensor,
        slots: torch.Tensor,
        rope: _core.Rope,
        attention: Sequence[float] = (),
    ) -> None:
        self.request_id = request_id
        self.method = method
        self.ratio = ratio
        self.segments = segments
        self.rows = rows
        self.slots = slots
        self.failure = ""
        self._rope = rope
        self._attention = attention
        self._device = device = slots.device
        lengths = torch.tensor([segment.tokens for segment in segments], device=device)
        self._starts = _starts(lengths)
        self._deltas = torch.tensor([segment.delta for segment in segments], device=device)
        self._token_deltas = self._deltas.repeat_interleave(lengths)
        self._order = torch.arange(len(rows), device=device)
        self._positions = torch.cat(
            [torch.arange(s.begin, s.begin + s.tokens, device=device) for s in segments]
        )
        self._segment_of = torch.arange(len(segments), device=device).repeat_interleave(lengths)
        self._joined: torch.Tensor | None = None
        self._key_weight: torch.Tensor | None = None
        self._value_weight: torch.Tensor | None = None
        self._residuals: dict[str, _Residuals] = {}
        self.key_probe = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.value_probe = torch.zeros(len(rows), dtype=torch.bool, device=device)

    @property
    def probe(self) -> torch.Tensor:
        """bool [tokens]: computed again, for its key, its value or both."""
        return self.key_probe | self.value_probe

    def _cached(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values of one layer, [tokens, kv heads, head size] each.

        Keys are rotated to ``delta`` positions before their place in the prompt.
        """
        first = self.segments[0]
        if len(self.segments) == 1 and first.chunk.quantization is None:
            begin, end = first.chunk_offset, first.chunk_offset + first.tokens
            return self._here(*first.chunk.rows(layer, begin, end))
        if self._joined is None:
            # One buffer for all layers: it stays in the processor's cache, fresh memory would not.
            shape = (2, len(self.rows), *first.chunk.keys.shape[2:])
            self._joined = torch.empty(shape, dtype=first.chunk.keys.dtype)
        keys, values = self._joined
        lengths = [segment.tokens for segment in self.segments]
        for segment, key_rows, value_rows in zip(
            self.segments, keys.split(lengths), values.split(lengths), strict=True
        ):
            segment.chunk.read(layer, segment.chunk_offset, key_rows, value_rows)
        keys, values = self._here(keys, values)
        if first.chunk.quantization is not None:  # one store's chunks are all alike
            stream = current_stream(self._device)
            _core.rotate_keys(
                keys=keys, deltas=self._positions, rope=self._rope, out=keys, stream=stream
            )
        return keys, values

    def _here(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks are kept on the CPU; on a device they are copied there, layer by layer.

        Nobody has to wait for the device's work before: memory that is not pinned has been read by
        the time a copy returns.
        """
        device = self._device
        return keys.to(device, non_blocking=True), values.to(device, non_blocking=True)

    def select(
        self,
        layer: int,
        fresh_keys: torch.Tensor,
        fresh_values: torch.Tensor,
        combine: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Choose the probes by the divergence of fresh from cached at the check layer.

        Parameters
        ----------
        layer : int
            The check layer.
        fresh_keys, fresh_values : torch.Tensor
            [tokens, kv heads, head size] of exactly these tokens.
        combine : callable
            Adds squared divergences [2, tokens] over tensor-parallel ranks, the same on each.
        """
        keys, values = self._cached(layer)
        moved = torch.empty_like(keys)
        stream = current_stream(self._device)
        _core.rotate_keys(
            keys=keys, deltas=self._token_deltas, rope=self._rope, out=moved, stream=stream
        )
        squared = torch.empty(2, len(self.rows), dtype=torch.float32, device=self._device)
        _core.divergence(fresh=fresh_keys, cached=moved, out=squared[0], stream=stream)
        _core.divergence(fresh=fresh_values, cached=values, out=squared[1], stream=stream)
        divergence = combine(squared).sqrt_()
        self._take(divergence[0].tolist(), divergence[1].tolist())

    def select_beforehand(self) -> None:
        """Choose the tokens of a method that measures nothing on the way."""
        self._take([], [])

    def compute_last_again(self) -> None:
        """Make the last token a probe where there is none, and add its residual to no other."""
        self.key_probe[-1] = True
        self.value_probe[-1] = True
        self._key_weight = self._value_weight = None

    def _take(self, key_divergence: list[float], value_divergence: list[float]) -> None:
        try:
            key_probe, value_probe, key_weight, value_weight = self.method.select(
                segments=[(s.tokens, s.chunk_offset, s.chunk_tokens) for s in self.segments],
                key_divergence=key_divergence,
                value_divergence=value_divergence,
                ratio=self.ratio,
                attention=self._attention,
            )
        except Exception as error:
            if self.method.name != FUNCTION:
                raise
            # The user's mistake shall not stop the engine: this is exact, and the report tells.
            logger.warning("PhaseKV: the method's function failed, all is recomputed: %s", error)
            self.failure = f"{type(error).__name__}: {error}"
            key_probe = value_probe = [1] * len(self.rows)
            key_weight = value_weight = []
        device = self._device
        self.key_probe = torch.tensor(key_probe, dtype=torch.bool, device=device)
        self.value_probe = torch.tensor(value_probe, dtype=torch.bool, device=device)
        if key_weight:
            self._key_weight = torch.tensor(key_weight, dtype=torch.float32, device=device)
            self._value_weight = torch.tensor(value_weight, dtype=torch.float32, device=device)

    def write(
        self,
        layer: int,
        kv: _core.PagedKV,
        fresh_keys: torch.Tensor | None,
        fresh_values: torch.Tensor | None,
        fresh_row_of: torch.Tensor | None,
    ) -> None:
        """Write moved (and shifted) keys and values of all these tokens into the blocks.

        Probes are overwritten with their fresh keys and values afterwards: writing whole runs is
        faster than stepping around them.

        Parameters
        ----------
        layer : int
            Whose cache ``kv`` is.
        kv : phasekv._core.PagedKV
            The blocks.
        fresh_keys, fresh_values : torch.Tensor or None
            [active rows, kv heads, head size] of the probes among others; None: nothing is shifted.
        fresh_row_of : torch.Tensor or None
            int64 [batch rows]: row of ``fresh_keys`` for a batch row.
        """
        keys, values = self._cached(layer)
        stream = current_stream(self._device)
        key_mean = value_mean = None
        unrotated = self.method.frame == "unrotated"
        if self._key_weight is not None and fresh_keys is not None:
            assert fresh_values is not None
            assert fresh_row_of is not None
            key_mean = self._mean(
                keys, fresh_keys, fresh_row_of, self.key_probe, "unrotated" if unrotated else "key"
            )
            value_mean = self._mean(values, fresh_values, fresh_row_of, self.value_probe, "value")
        _core.apply_shift(
            cached=keys,
            cached_rows=self._order,
            slots=self.slots,
            segment_starts=self._starts,
            deltas=self._deltas,
            rope=self._rope,
            mean=key_mean,
            weights=None if key_mean is None else self._key_weight,
            mean_deltas=self._positions if unrotated and key_mean is not None else None,
            blocks=kv.key,
            stream=stream,
        )
        _core.apply_shift(
            cached=values,
            cached_rows=self._order,
            slots=self.slots,
            segment_starts=self._starts,
            mean=value_mean,
            weights=None if value_mean is None else self._value_weight,
            blocks=kv.value,
            stream=stream,
        )

    def _mean(
        self,
        cached: torch.Tensor,
        fresh: torch.Tensor,
        fresh_row_of: torch.Tensor,
        probe: torch.Tensor,
        kind: str,
    ) -> torch.Tensor:
        """Mean residual of the probes per segment, float32 [segments, kv heads, head size]."""
        residuals = self._residuals.get(kind)
        if residuals is None:
            residuals = self._residuals[kind] = self._residuals_of(fresh_row_of, probe, kind)
        shape = (len(self.segments), *cached.shape[1:])
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        _core.mean_residual(
            fresh=fresh,
            cached=cached,
            fresh_rows=residuals.fresh_rows,
            cached_rows=residuals.cached_rows,
            segment_starts=residuals.segment_starts,
            fresh_deltas=residuals.fresh_deltas,
            cached_deltas=residuals.cached_deltas,
            rope=None if kind == "value" else self._rope,
            out=out,
            stream=current_stream(self._device),
        )
        return out

    def _residuals_of(
        self, fresh_row_of: torch.Tensor, probe: torch.Tensor, kind: str
    ) -> _Residuals:
        """Which rows a mean is taken of: the same in all layers above the check layer.

        How many they are is asked of the device, once.
        """
        probes = probe.nonzero()[:, 0]
        counts = torch.bincount(self._segment_of[probes], minlength=len(self.segments))
        fresh_deltas = cached_deltas = None
        if kind == "key":
            cached_deltas = self._token_deltas[probes]
        elif kind == "unrotated":
            fresh_deltas = -self._positions[probes]
            cached_deltas = self._token_deltas[probes] - self._positions[probes]
        return _Residuals(
            fresh_row_of[self.rows[probes]], probes, _starts(counts), fresh_deltas, cached_deltas
        )


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
