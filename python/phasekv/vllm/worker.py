"""The worker side of reuse: looks chunks up, runs reuse steps, stores chunks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from phasekv import _core
from phasekv.errors import Error
from phasekv.memory.chunk import StoredChunk
from phasekv.memory.keys import ChunkKey
from phasekv.memory.store import ChunkStore
from phasekv.reuse.cached_rows import CachedRows, CachedSegment
from phasekv.reuse.report import RequestReport
from phasekv.reuse.step import Batch, ReuseStep
from phasekv.vllm import active
from phasekv.vllm.decoder_hooks import DecoderHooks
from phasekv.vllm.plan import (
    PlannedChunk,
    ScheduledRequest,
    StepReuse,
    StoredContent,
)
from phasekv.vllm.ranks import Ranks
from phasekv.vllm.rows_on_cpu import rows_on_cpu

logger = logging.getLogger("phasekv")


def layers_take_no_rows(device: torch.device) -> bool:
    """Whether vLLM's layers can be run without a row: CUDA kernels cannot be launched for none."""
    return device.type == "cpu"


@dataclass
class _Held:
    """What the worker holds for a request while its chunks are being processed."""

    found: dict[PlannedChunk, StoredChunk] = field(default_factory=dict)
    missed: dict[PlannedChunk, str] = field(default_factory=dict)
    to_store: list[PlannedChunk] = field(default_factory=list)
    pinned: list[ChunkKey] = field(default_factory=list)
    uneven: set[str] = field(default_factory=set)
    unreported: bool = True


@dataclass
class _Scheduled:
    """A planned request with its place in the batch."""

    request: ScheduledRequest
    row: int
    first_batch_row: int
    begin: int
    end: int


class ReuseWorker:
    """One per worker process.

    Parameters
    ----------
    hooks : DecoderHooks
        Of the loaded model.
    rope : phasekv._core.Rope
        The model's rotation.
    store : ChunkStore
        Chunks of this rank's KV heads.
    layers : dict
        Attention layer name -> (layer index, blocks).
    block_size : int
        Tokens in a block.
    dtype : torch.dtype
        Of the cache.
    ranks : Ranks
        The tensor-parallel group.
    """

    def __init__(
        self,
        hooks: DecoderHooks,
        rope: _core.Rope,
        store: ChunkStore,
        layers: dict[str, tuple[int, _core.PagedKV]],
        block_size: int,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        self._hooks = hooks
        self._rope = rope
        self.store = store
        self._layers = layers
        self._block_size = block_size
        self._dtype = dtype
        self._ranks = ranks
        self._held: dict[str, _Held] = {}
        self._scheduled: list[_Scheduled] = []
        self._batch: Batch | None = None
        self._step: ReuseStep | None = None
        self._reports: dict[str, RequestReport] = {}
        self._stored: list[StoredContent] = []
        self._gone: list[str] = []

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self._layers)

    @property
    def is_first_rank(self) -> bool:
        """Whether this worker's reports are the ones that count."""
        return self._ranks.is_first

    @property
    def reused_rows(self) -> torch.Tensor | None:
        """Rows of the running step's batch that stand in reused chunks, int64; None: no chunk."""
        if self._step is None:
            return None
        return torch.cat([cached.rows for cached in self._step.cached])

    def release(self, request_ids: Sequence[str]) -> None:
        """Let go of what is held for requests that are over, or begin anew."""
        for request_id in request_ids:
            held = self._held.pop(request_id, None)
            if held is not None:
                for key in held.pinned:
                    self.store.unpin(key)

    def begin_step(
        self, plan: StepReuse, forward_context: Any, first_held: Sequence[int] = ()
    ) -> None:
        """Look up this step's chunks and, where some are found, set the model up to reuse them.

        Parameters
        ----------
        plan : StepReuse
            From the scheduler.
        forward_context : vllm ForwardContext
            Of the forward pass that is about to run.
        first_held : sequence of int
            For each request of the batch, the token at which its line of the block table begins,
            where eviction holds a window; empty: 0 for all.
        """
        if not plan.requests or forward_context.attn_metadata is None:
            return
        self._batch, starts = self._view(forward_context, first_held)
        self._scheduled = self._locate(plan.requests, starts)
        cached = []
        for scheduled in self._scheduled:
            held = self._hold(scheduled.request)
            rows = self._cached_rows(scheduled, held)
            if rows is not None:
                cached.append(rows)
        if not cached:
            return
        keeps_a_row = not layers_take_no_rows(self._batch.device)
        self._step = ReuseStep(self._batch, cached, self._ranks.add, keeps_a_row)
        self._hooks.install(self._step)
        forward_context.skip_compiled = True
        active.begin(self._step, self._layers)

    def end_step(self, moved: Collection[str] = ()) -> None:
        """Account for the step, store chunks that are complete, and let go of everything.

        Parameters
        ----------
        moved : collection of str
            Requests whose keys eviction has moved: their tokens do not lie where they were written.
        """
        active.end()
        self._hooks.remove()
        try:
            for scheduled in self._scheduled:
                self._report(scheduled)
                self._store_complete(scheduled, scheduled.request.request_id in moved)
        finally:
            self._scheduled = []
            self._step = None
            self._batch = None

    def take_reports(self) -> dict[str, RequestReport]:
        """Reports of requests whose chunks were processed since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    def take_store_changes(self) -> tuple[list[StoredContent], list[str]]:
        """Chunks stored and keys of chunks gone since the last call."""
        stored, self._stored = self._stored, []
        gone, self._gone = self._gone, []
        return stored, gone

    def _view(self, forward_context: Any, first_held: Sequence[int]) -> tuple[Batch, list[int]]:
        name = next(iter(self._layers))
        metadata = forward_context.attn_metadata[name]
        starts = metadata.query_start_loc.to(torch.int64)
        rows = int(metadata.num_actual_tokens)
        device = starts.device
        lengths = starts[1:] - starts[:-1]
        requests = torch.arange(len(lengths), device=device)
        requests = requests.repeat_interleave(lengths, output_size=rows)
        computed = metadata.seq_lens.to(torch.int64)[: len(lengths)] - lengths
        positions = torch.arange(rows, device=device) - (starts[:-1] - computed)[requests]
        batch = Batch(
            slots=forward_context.slot_mapping[name][:rows].to(torch.int64),
            positions=positions,
            requests=requests.to(torch.int32),
            block_table=metadata.block_table.to(torch.int32),
            first_held=torch.tensor(list(first_held) or [0] * len(lengths), device=device),
        )
        return batch, starts.tolist()

    def _locate(
        self, requests: tuple[ScheduledRequest, ...], starts: list[int]
    ) -> list[_Scheduled]:
        assert self._batch is not None
        first_rows = torch.tensor(starts[:-1], device=self._batch.device)
        row_of = {slot: row for row, slot in enumerate(self._batch.slots[first_rows].tolist())}
        located = []
        for request in requests:
            row = row_of.get(request.first_slot)
            if row is None:
                raise AssertionError(f"request {request.request_id} is not in this step's batch")
            begin = int(self._batch.positions[starts[row]] + self._batch.first_held[row])
            located.append(
                _Scheduled(request, row, starts[row], begin, begin + starts[row + 1] - starts[row])
            )
        located.sort(key=lambda scheduled: scheduled.row)
        return located

    def _hold(self, request: ScheduledRequest) -> _Held:
        held = self._held.get(request.request_id)
        if held is not None:
            return held
        held = self._held[request.request_id] = _Held()
        plan = request.plan
        chunks = [self.store.get(chunk.key) if plan.reuse else None for chunk in plan.chunks]
        agreed = self._ranks.all_have([chunk is not None for chunk in chunks])
        for planned, chunk, everywhere in zip(plan.chunks, chunks, agreed, strict=True):
            if not plan.reuse:
                held.missed[planned] = "asked to be stored, not reused"
            elif chunk is None:
                held.missed[planned] = "not stored"
            elif not everywhere:
                held.missed[planned] = "not stored on every tensor-parallel rank"
                held.uneven.add(planned.key)
            elif planned.chunk_begin + planned.end - planned.begin > len(chunk.tokens):
                held.missed[planned] = "stored with fewer tokens"
            else:
                # A chunk that is too large for memory cannot be pinned; we hold it all the same.
                if self.store.pin(planned.key):
                    held.pinned.append(planned.key)
                held.found[planned] = chunk
        held.to_store = [planned for planned in held.missed if planned.tokens]
        return held

    def _cached_rows(self, scheduled: _Scheduled, held: _Held) -> CachedRows | None:
        assert self._batch is not None
        plan = scheduled.request.plan
        segments = []
        for planned, chunk in held.found.items():
            begin = max(planned.begin, scheduled.begin)
            # The last prompt token always runs: the first answer token is sampled from it.
            end = min(planned.end, scheduled.end, plan.prompt_tokens - 1)
            if begin < end:
                segments.append(
                    CachedSegment(
                        chunk=chunk,
                        begin=begin,
                        tokens=end - begin,
                        chunk_offset=planned.chunk_begin + begin - planned.begin,
                        chunk_tokens=planned.chunk_begin + planned.end - planned.begin,
                    )
                )
        if not segments:
            return None
        offset = scheduled.first_batch_row - scheduled.begin
        device = self._batch.device
        rows = torch.cat(
            [torch.arange(s.begin, s.begin + s.tokens, device=device) + offset for s in segments]
        )
        return CachedRows(
            scheduled.request.request_id,
            plan.choice.build(),
            plan.choice.ratio,
            segments,
            rows,
            self._batch.slots[rows],
            self._rope,
        )

    def _report(self, scheduled: _Scheduled) -> None:
        request_id = scheduled.request.request_id
        held = self._held[request_id]
        report = self._reports.setdefault(request_id, RequestReport())
        report.layers = self.num_layers
        if held.unreported:
            held.unreported = False
            report.found = {(c.begin, c.end): c.key for c in held.found}
            report.missed = {(c.begin, c.end): why for c, why in held.missed.items()}
        if self._step is None:
            return
        for rows in self._step.cached:
            if rows.request_id == request_id:
                report.cached_tokens += len(rows.rows)
                report.probes += int(rows.probe.sum())
                report.charged += self._step.charge(rows, self.num_layers)
                report.failure = report.failure or rows.failure

    def _store_complete(self, scheduled: _Scheduled, moved: bool) -> None:
        assert self._batch is not None
        plan = scheduled.request.plan
        held = self._held[scheduled.request.request_id]
        complete = [planned for planned in held.to_store if planned.end <= scheduled.end]
        held.to_store = [planned for planned in held.to_store if planned.end > scheduled.end]
        if moved:
            report = self._reports[scheduled.request.request_id]
            for planned in complete:
                report.missed[planned.begin, planned.end] = (
                    f"{held.missed[planned]}, and evicted from before it could be"
                )
            return
        for planned in complete:
            # Where only some ranks lack it all replace it: halves must come from one encoding.
            self._store(scheduled, planned, plan.replace or planned.key in held.uneven)

    def _store(self, scheduled: _Scheduled, planned: PlannedChunk, replace: bool) -> None:
        assert self._batch is not None
        device = self._batch.device
        positions = torch.arange(planned.begin, planned.end, device=device)
        blocks = self._batch.block_table[scheduled.row].to(torch.int64)
        slots = blocks[positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        keys, values = rows_on_cpu(self._layers, slots, self._dtype)
        chunk = StoredChunk(
            key=planned.key,
            tokens=np.array(planned.tokens, dtype=np.int32),
            position=planned.begin,
            keys=keys,
            values=values,
        )
        try:
            gone = self.store.put(chunk, replace=replace)
        except Error as error:
            logger.warning("PhaseKV: a chunk of %d tokens is not stored: %s", len(slots), error)
            return
        self._gone.extend(gone)
        if planned.key in gone:
            return
        self._stored.append(
            StoredContent(planned.key, planned.tokens, scheduled.request.plan.domain)
        )
        self._reports[scheduled.request.request_id].stored += 1
