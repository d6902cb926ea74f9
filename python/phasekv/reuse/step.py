"""One engine step in which cached tokens are reused: which rows run in which layer.

Rows are the scheduled tokens of the whole batch, in the engine's order. Three sets matter:

* all rows: what the engine computes embeddings for,
* ``entered``: rows that run from layer 0 on (all but the tokens a method dropped beforehand),
* ``active``: rows that run from the check layer's attention on (probes, and every token that is in
  no reused chunk).

``attention.py`` calls ``write_kv`` and ``attend`` in each layer; ``decoder_hooks.py`` drops rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phasekv import _core
from phasekv.reuse.cached_rows import CachedRows
from phasekv.reuse.stream import current_stream

CHECK_LAYER = 1


@dataclass(frozen=True)
class Batch:
    """The engine's view of the step.

    Attributes
    ----------
    slots : torch.Tensor
        int64 [rows].
    positions : torch.Tensor
        int64 [rows]: index of each row's token in its request's line of the block table.
    requests : torch.Tensor
        int32 [rows]: index into ``block_table``, non-decreasing.
    block_table : torch.Tensor
        int32 [requests, blocks].
    first_held : torch.Tensor
        int64 [requests]: the request's token at which its line of the block table begins.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    block_table: torch.Tensor
    first_held: torch.Tensor

    @property
    def rows(self) -> int:
        """Scheduled tokens."""
        return int(self.slots.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the step's tensors lie, the cache among them."""
        return self.slots.device


class ReuseStep:
    """Row bookkeeping and per-layer work of one step.

    Parameters
    ----------
    batch : Batch
        What is scheduled.
    cached : list of CachedRows
        One for each request that reuses something in this step.
    combine : callable
        See ``CachedRows.select``.
    keeps_a_row : bool
        Where nothing would run in a layer, the last cached token is computed again: CUDA kernels of
        vLLM's layers cannot be launched for no rows.
    """

    def __init__(
        self,
        batch: Batch,
        cached: list[CachedRows],
        combine: Callable[[torch.Tensor], torch.Tensor],
        keeps_a_row: bool = False,
    ) -> None:
        self.batch = batch
        self.cached = cached
        self._combine = combine
        self._keeps_a_row = keeps_a_row
        self._beforehand = [rows for rows in cached if rows.method.check_layer == 0]
        self._checked = [rows for rows in cached if rows.method.check_layer == CHECK_LAYER]
        for rows in self._beforehand:
            rows.select_beforehand()
        everything = torch.ones(batch.rows, dtype=torch.bool, device=batch.device)
        self.entered = self._without_reused(self._beforehand, everything)
        self.active = self.entered
        self._entered_index = _index_of(self.entered, batch.rows)
        self._active_index = self._entered_index
        # Fresh keys and values of active rows that are written; where a method keeps a shifted key
        # for a token that is recomputed for its value only (or the reverse), that slot is padding.
        self._key_slots = batch.slots[self.entered]
        self._value_slots = self._key_slots
        self.kept_at_check: torch.Tensor | None = None
        # Rows of the forward pass with the engine's padding; known when the model runs.
        self.total_rows = batch.rows

    def _without_reused(self, groups: list[CachedRows], keep: torch.Tensor) -> torch.Tensor:
        keep = keep.clone()
        for rows in groups:
            keep[rows.rows[~rows.probe]] = False
        kept = keep.nonzero()[:, 0]
        if len(kept) or not groups or not self._keeps_a_row:
            return kept
        groups[-1].compute_last_again()
        return groups[-1].rows[-1:]

    def rows_entering(self, layer: int) -> torch.Tensor:
        """Batch rows whose hidden states go into ``layer``, int64."""
        return self.entered if layer <= CHECK_LAYER else self.active

    def write_kv(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, kv: _core.PagedKV
    ) -> None:
        """Fill the blocks of one layer, for every scheduled token.

        Parameters
        ----------
        layer : int
            Index of the layer.
        keys, values : torch.Tensor
            [rows entering the layer, kv heads, head size], keys after RoPE.
        kv : phasekv._core.PagedKV
            The layer's blocks.
        """
        expected = len(self.rows_entering(layer))
        if keys.shape[0] < expected:
            raise AssertionError(f"layer {layer}: {keys.shape[0]} rows of keys, not {expected}")
        if layer == CHECK_LAYER:
            self._check(keys, values)
        for rows in self._beforehand:
            rows.write(layer, kv, None, None, None)
        key_slots, value_slots = self._key_slots, self._value_slots
        if layer == CHECK_LAYER:
            key_slots = value_slots = self._write_at_check(layer, kv)
        elif layer > CHECK_LAYER:
            for rows in self._checked:
                rows.write(layer, kv, keys, values, self._active_index)
        stream = current_stream(self.batch.device)
        _core.scatter_blocks(rows=keys[:expected], slots=key_slots, blocks=kv.key, stream=stream)
        _core.scatter_blocks(
            rows=values[:expected], slots=value_slots, blocks=kv.value, stream=stream
        )

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for rows in self._checked:
            fresh = self._entered_index[rows.rows]
            rows.select(CHECK_LAYER, keys[fresh], values[fresh], self._combine)
        entered = torch.zeros(self.batch.rows, dtype=torch.bool, device=self.batch.device)
        entered[self.entered] = True
        self.active = self._without_reused(self._checked, entered)
        self._active_index = _index_of(self.active, self.batch.rows)
        self.kept_at_check = self._entered_index[self.active]
        self._key_slots = self._slots_of_fresh(lambda rows: rows.key_probe)
        self._value_slots = self._slots_of_fresh(lambda rows: rows.value_probe)

    def _slots_of_fresh(self, fresh: Callable[[CachedRows], torch.Tensor]) -> torch.Tensor:
        slots = self.batch.slots.clone()
        for rows in self._checked:
            slots[rows.rows[~fresh(rows)]] = -1
        return slots[self.active]

    def _write_at_check(self, layer: int, kv: _core.PagedKV) -> torch.Tensor:
        """Where the fresh keys and values of the check layer go; cached ones are written here."""
        slots = self.batch.slots.clone()
        for rows in self._checked:
            if not rows.method.keeps_fresh_at_check_layer:
                rows.write(layer, kv, None, None, None)
                slots[rows.rows[~rows.probe]] = -1
        return slots[self.entered]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        kv: _core.PagedKV,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Attention of the rows that go on from ``layer``, into the first rows of ``out``.

        Parameters
        ----------
        layer : int
            Index of the layer.
        query, out : torch.Tensor
            [rows entering the layer, query heads, head size].
        kv : phasekv._core.PagedKV
            The layer's blocks, complete up to this step's tokens.
        scale : float
            Of the logits.
        """
        rows = self.entered if layer < CHECK_LAYER else self.active
        if layer == CHECK_LAYER:
            assert self.kept_at_check is not None
            if len(self.active) != len(self.entered):
                query = query[self.kept_at_check]
        _core.attend_rows(
            query=query[: len(rows)],
            kv=kv,
            block_table=self.batch.block_table,
            row_requests=self.batch.requests[rows],
            row_limits=self.batch.positions[rows] + 1,
            scale=scale,
            out=out[: len(rows)],
            stream=current_stream(self.batch.device),
        )

    def query_rows(self, layer: int) -> torch.Tensor:
        """Where each row of the batch stands in the queries of ``layer``; -1: nowhere. int64."""
        return self._entered_index if layer <= CHECK_LAYER else self._active_index

    def charge(self, rows: CachedRows, layers: int) -> int:
        """(layer, cached token) pairs that this step recomputes for one request."""
        tokens, probes = len(rows.rows), int(rows.probe.sum())
        full_layers = rows.method.check_layer + 1 if rows.method.check_layer else 0
        return full_layers * tokens + (layers - full_layers) * probes


def _index_of(rows: torch.Tensor, total: int) -> torch.Tensor:
    index = torch.full((total,), -1, dtype=torch.int64, device=rows.device)
    index[rows] = torch.arange(len(rows), device=rows.device)
    return index
