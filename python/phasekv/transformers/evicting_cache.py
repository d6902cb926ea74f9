"""A transformers cache whose rows hold a window of their tokens, chosen by an eviction policy.

The core does the work: keys and values lie in blocks, `attend_rows` attends them, and the evictor
chooses survivors and moves them, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from phasekv import _core
from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.eviction.report import EvictionReport
from phasekv.eviction.settings import EvictionChoice
from phasekv.transformers.models import ModelShape
from phasekv.transformers.paged_blocks import PagedBlocks


@dataclass
class _Sequence:
    """One row of the batch. ``blocks`` are those of [first_held, computed), padding excluded."""

    window: _core.Window
    computed: int = 0
    first_held: int = 0
    blocks: list[int] = field(default_factory=list)
    report: EvictionReport = field(default_factory=EvictionReport)


@dataclass
class _Step:
    """The tokens of one forward pass: ``rows`` of the flattened batch, without padding."""

    shape: tuple[int, int]
    rows: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    limits: torch.Tensor
    block_table: torch.Tensor


class EvictingCache(Cache):  # type: ignore[misc]
    """Keys and values of a batch, at most the budget of each row after an event.

    ``phasekv.transformers.evict`` makes it and tells it of each forward pass.

    Parameters
    ----------
    shape : ModelShape
        Of the model.
    choice : EvictionChoice
        Policy, budget and stride.
    markers : phasekv._core.MarkerAutomaton or None
        Tells phases from tokens; None: one phase for everything.
    block_size : int
        Tokens in a block; budget and stride are multiples of it.
    """

    def __init__(
        self,
        shape: ModelShape,
        choice: EvictionChoice,
        markers: _core.MarkerAutomaton | None = None,
        block_size: int = 16,
    ) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(shape.layers)])
        self._shape = shape
        self._choice = choice
        self._markers = markers
        self._policy = choice.build()
        self._blocks = PagedBlocks(
            shape.layers, shape.kv_heads, block_size, shape.head_size, shape.dtype
        )
        self._evictor: _core.Evictor | None = None
        self._sequences: list[_Sequence] = []
        self._step: _Step | None = None
        self._seen = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, and what the policy carries along."""
        carried = 0
        if self._evictor is not None:
            carried = sum(self._evictor.nbytes(row) for row in range(len(self._sequences)))
        return self._blocks.nbytes + carried

    @property
    def reports(self) -> list[dict[str, Any]]:
        """For each row the ``eviction`` object that vLLM's responses have."""
        return [
            one.report.as_response(self._choice, one.computed, one.computed - one.first_held)
            for one in self._sequences
        ]

    def positions(self, row: int, layer: int) -> torch.Tensor:
        """Positions of a row's held keys, [kv heads, held]; padding does not count."""
        assert self._evictor is not None
        return torch.tensor(self._evictor.positions(row, layer)).view(self._shape.kv_heads, -1)

    def begin(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        """A forward pass of ``tokens`` begins.

        Parameters
        ----------
        tokens : torch.Tensor
            int64 [batch, new tokens].
        mask : torch.Tensor or None
            [batch, seen and new tokens]: 0 for padding, which stands before a row's tokens.
        """
        batch, count = tokens.shape
        if not self._sequences:
            self._start(batch)
        if batch != len(self._sequences):
            raise InvalidArgumentError(
                "input_ids", str(list(tokens.shape)), f"{len(self._sequences)} rows, as before"
            )
        is_token = torch.ones((batch, count), dtype=torch.bool)
        if mask is not None:
            is_token = mask[:, -count:].bool()
        self._refuse_later_padding(is_token)
        assert self._evictor is not None
        self._evictor.begin_step()
        size = self._blocks.block_size
        new = is_token.sum(1).tolist()
        requests, slots, limits = [], [], []
        tables = []
        first_row = 0
        for row, sequence in enumerate(self._sequences):
            begin, end = sequence.computed, sequence.computed + new[row]
            held_blocks = -(-(end - sequence.first_held) // size)
            sequence.blocks += self._blocks.allocate(held_blocks - len(sequence.blocks))
            blocks = torch.tensor(sequence.blocks, dtype=torch.int32)
            tables.append(blocks)
            index = torch.arange(begin, end) - sequence.first_held
            slots.append(blocks[index // size].to(torch.int64) * size + index % size)
            limits.append(index + 1)
            requests.append(torch.full((new[row],), row, dtype=torch.int32))
            if new[row]:
                before = torch.zeros(sequence.first_held // size, dtype=torch.int32)
                self._evictor.schedule(
                    row,
                    begin=begin,
                    first_row=first_row,
                    tokens=tokens[row][is_token[row]].to(torch.int32),
                    block_table=torch.cat([before, blocks]),
                )
            first_row += new[row]
            sequence.computed = end
        self._step = _Step(
            shape=(batch, count),
            rows=is_token.reshape(-1).nonzero()[:, 0],
            requests=torch.cat(requests),
            slots=torch.cat(slots),
            limits=torch.cat(limits),
            block_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
        )

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a layer's new keys and values ``[batch, kv heads, new tokens, head size]``."""
        step, kv = self._current(), self._blocks.kv(layer)
        _core.scatter_blocks(rows=_rows(keys, step.rows), slots=step.slots, blocks=kv.key)
        _core.scatter_blocks(rows=_rows(values, step.rows), slots=step.slots, blocks=kv.value)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of ``query`` [batch, query heads, new tokens, head size] over what is held.

        Returns ``[batch, new tokens, query heads, head size]``, zero for padding. An event follows
        where it is due.
        """
        step, kv = self._current(), self._blocks.kv(layer)
        rows = _rows(query, step.rows)
        out = torch.empty_like(rows)
        _core.attend_rows(
            query=rows,
            kv=kv,
            block_table=step.block_table,
            row_requests=step.requests,
            row_limits=step.limits,
            scale=scale,
            out=out,
        )
        assert self._evictor is not None
        self._evictor.layer(layer, query=rows, kv=kv)
        if layer == self._shape.layers - 1:
            self._finish()
        batch, count = step.shape
        whole = query.new_zeros((batch * count, *rows.shape[1:]))
        whole[step.rows] = out
        return whole.view(batch, count, *rows.shape[1:])

    def seen(self) -> int:
        """Tokens of a row so far, padding included."""
        return self._seen

    def reset(self) -> None:
        """Forget everything."""
        self._sequences, self._evictor, self._step, self._seen = [], None, None, 0
        self._blocks.release([], [])

    def crop(self, *_: Any, **__: Any) -> None:
        """Refused: evicted keys do not come back (assisted decoding)."""
        raise UnsupportedError("assisted decoding", "on", "evicted keys do not come back")

    def reorder_cache(self, *_: Any, **__: Any) -> None:
        """Refused (beam search)."""
        raise UnsupportedError("num_beams", "more than 1", "rows keep windows of their own")

    def batch_repeat_interleave(self, *_: Any, **__: Any) -> None:
        """Refused: repeat the prompts instead."""
        raise UnsupportedError("cache", "repeated", "repeat the prompts instead")

    def batch_select_indices(self, *_: Any, **__: Any) -> None:
        """Refused (contrastive search)."""
        raise UnsupportedError("cache", "selected rows", "rows keep windows of their own")

    def _start(self, batch: int) -> None:
        # Before a token is there no layer has a view to tell its sizes by.
        self._blocks.allocate(0)
        self._evictor = _core.Evictor(
            layers=self._shape.layers,
            query_heads=self._shape.query_heads,
            kv=self._blocks.kv(0),
            scale=self._shape.scale,
        )
        for row in range(batch):
            window = self._choice.window(0)
            self._sequences.append(_Sequence(window))
            self._evictor.add(row, policy=self._policy, window=window, markers=self._markers)

    def _refuse_later_padding(self, is_token: torch.Tensor) -> None:
        has_begun = torch.tensor([one.computed > 0 for one in self._sequences])
        goes_on = is_token.cummax(1).values if is_token.numel() else is_token
        if bool((~is_token & (has_begun[:, None] | goes_on)).any()):
            raise UnsupportedError(
                "attention_mask", "padding after tokens", "pad batches on the left"
            )

    def _current(self) -> _Step:
        if self._step is None:
            raise RuntimeError("the model ran outside of phasekv.transformers.evict")
        return self._step

    def _finish(self) -> None:
        assert self._evictor is not None
        for event in self._evictor.finish():
            sequence = self._sequences[event.request]
            kept = self._evictor.kept_by_phase(event.request)
            sequence.report.add(EvictionReport.of_event(event, kept))
            first_held = sequence.window.start(sequence.computed)
            freed = (first_held - sequence.first_held) // self._blocks.block_size
            blocks, sequence.blocks = sequence.blocks[:freed], sequence.blocks[freed:]
            sequence.first_held = first_held
            self._blocks.release(blocks, [one.blocks for one in self._sequences])
        self._seen += self._current().shape[1]
        self._step = None


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer."""

    is_sliding = False

    def __init__(self, cache: EvictingCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: the cache has its sizes from the model."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes into the blocks; the attention function finds the cache by the keys returned."""
        self._cache.store(self._index, key_states, value_states)
        key_states.phasekv_cache = self._cache  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self._cache.seen()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask would cover."""
        return self._cache.seen() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1


def _rows(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """From [batch, heads, tokens, head size] to the chosen [rows, heads, head size]."""
    flat = states.detach().transpose(1, 2).flatten(0, 1)
    return flat[rows].contiguous()
