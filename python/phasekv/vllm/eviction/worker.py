"""The worker side of eviction: windows of the step's requests, queries, events."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from phasekv import _core
from phasekv.eviction.report import EvictionReport
from phasekv.eviction.settings import EvictionChoice, parse_request_choice
from phasekv.memory.session import StoredSession
from phasekv.memory.session_store import SessionStore, StoreChanges
from phasekv.reuse.stream import current_stream
from phasekv.vllm.eviction.sessions import SaveJob
from phasekv.vllm.request import parameters_of
from phasekv.vllm.rows_on_cpu import rows_on_cpu

logger = logging.getLogger("phasekv")


@dataclass
class _Request:
    """A request of which a window is held."""

    number: int
    choice: EvictionChoice
    window: _core.Window
    resumes: bool = False  # its state and its held keys still have to come from a session


@dataclass(frozen=True)
class StepRow:
    """One request's share of a step.

    ``first_held`` is the logical position at which the request's window begins, and its line of
    the windowed block table.
    """

    request_id: str
    request: _Request
    index: int
    first_row: int
    begin: int
    end: int
    first_held: int


class StepObserver(Protocol):
    """Looks on while requests run, for measurements; it changes nothing."""

    def layer(
        self, layer: int, row: StepRow, query: torch.Tensor, kv: _core.PagedKV, blocks: torch.Tensor
    ) -> None:
        """A request's attention was computed in a layer, and none of its keys moved yet.

        ``query`` is [tokens of the step, query heads, head size] after RoPE, ``blocks`` int32: the
        request's block table, counted from position 0.
        """

    def step_ended(self, row: StepRow, positions: list[torch.Tensor]) -> None:
        """A request's step is over; per layer, the positions of its held keys [kv heads, held]."""


def _lengths_on_cpu(metadata: Any) -> torch.Tensor:
    """Tokens of each request, which is known without a look at the device: nothing is drafted."""
    lengths: torch.Tensor | None = metadata.seq_lens_cpu_upper_bound
    return metadata.seq_lens if lengths is None else lengths


class EvictionWorker:
    """One per worker process.

    A step runs ``window_metadata`` (the metadata is built), ``begin_step`` (the forward pass
    begins), ``layer`` in each layer and ``end_step``.

    Parameters
    ----------
    runner : vllm model runner
        Its input batch tells which request stands in which line.
    evictor : phasekv._core.Evictor
        State of all requests.
    engine_choice : EvictionChoice
        What a request gets that does not say otherwise.
    layers : dict
        Attention layer name -> (layer index, blocks).
    sessions : SessionStore
        Of this worker.
    dtype : torch.dtype
        Of the cache.
    markers : phasekv._core.MarkerAutomaton or None
        Tells phases from tokens; None: one phase for everything.
    statistics : phasekv._core.TriattentionStatistics or None
        Calibration of this worker's query heads.
    """

    def __init__(
        self,
        runner: Any,
        evictor: _core.Evictor,
        engine_choice: EvictionChoice,
        layers: dict[str, tuple[int, _core.PagedKV]],
        sessions: SessionStore,
        dtype: torch.dtype,
        markers: Any = None,
        statistics: _core.TriattentionStatistics | None = None,
    ) -> None:
        self._runner = runner
        self._evictor = evictor
        self._engine_choice = engine_choice
        self._layers = layers
        self._sessions = sessions
        self._dtype = dtype
        self._device = torch.device(next(iter(layers.values()))[1].device)
        self._markers = markers
        self._statistics = statistics
        self._policies: dict[EvictionChoice, _core.Policy] = {}
        self._requests: dict[str, _Request] = {}
        self._names: dict[int, str] = {}
        self._next_number = 0
        self._rows: list[StepRow] = []
        self._block_table: torch.Tensor | None = None
        self._is_running = False
        self._query_rows: tuple[torch.Tensor, torch.Tensor] | None = None
        self._reports: dict[str, EvictionReport] = {}
        self.observer: StepObserver | None = None

    @property
    def scale(self) -> float:
        """What multiplies q.k before the softmax."""
        return self._evictor.scale

    @property
    def rows(self) -> list[StepRow]:
        """The requests of the step whose metadata was built last, in the batch's order."""
        return self._rows

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Wall time so far of collecting queries, scoring and compacting."""
        return self._evictor.seconds

    def window_metadata(self, metadata: Any) -> Any:
        """vLLM's metadata of a step, with every request's window in the place of its tokens.

        Parameters
        ----------
        metadata : vllm CommonAttentionMetadata
            Of the step. Its slots and positions stay as they are: keys keep their own rotation.
        """
        count = metadata.num_reqs
        request_ids = self._runner.input_batch.req_ids
        self._rows = []
        if len(request_ids) < count:
            return metadata  # a dummy step, in which no request runs
        first_rows = metadata.query_start_loc_cpu[: count + 1].tolist()
        ends = _lengths_on_cpu(metadata)[:count].tolist()
        for index in range(count):
            begin = ends[index] - (first_rows[index + 1] - first_rows[index])
            request = self._request(request_ids[index], begin)
            self._rows.append(
                StepRow(
                    request_id=request_ids[index],
                    request=request,
                    index=index,
                    first_row=first_rows[index],
                    begin=begin,
                    end=ends[index],
                    first_held=request.window.start(begin),
                )
            )
        self._block_table = metadata.block_table_tensor
        if not any(row.first_held for row in self._rows):
            return metadata
        first_held = torch.tensor([row.first_held for row in self._rows], dtype=torch.int32)
        held = torch.tensor([row.end - row.first_held for row in self._rows], dtype=torch.int32)
        table = metadata.block_table_tensor
        columns = torch.arange(table.shape[1]) + (first_held // self._evictor.block_size)[:, None]
        columns = columns.clamp_(max=table.shape[1] - 1)
        columns = columns.to(table.device, torch.int64, non_blocking=True)
        return replace(
            metadata,
            seq_lens=held.to(metadata.seq_lens.device, non_blocking=True),
            seq_lens_cpu_upper_bound=held,
            block_table_tensor=table[:count].gather(1, columns).contiguous(),
            max_seq_len=int(held.max()),
        )

    def begin_step(
        self, resumed: Mapping[str, str], reused_rows: torch.Tensor | None = None
    ) -> None:
        """Take in the step's tokens.

        Parameters
        ----------
        resumed : mapping
            Request -> key of the session whose state and keys it goes on with.
        reused_rows : torch.Tensor or None
            int64: rows of the batch whose tokens stand in reused chunks. Their queries exist in
            some layers only, so that they enter no buffer.
        """
        self._evictor.begin_step()
        self._is_running = bool(self._rows)
        if not self._rows:
            return
        assert self._block_table is not None
        batch = self._runner.input_batch
        computed: torch.Tensor | None = None
        if reused_rows is not None and len(reused_rows):
            last = self._rows[-1]
            computed = torch.ones(last.first_row + last.end - last.begin, dtype=torch.bool)
            computed[reused_rows.cpu()] = False
        # Only an event looks at blocks: a step without one does not wait for a device.
        has_event = any(row.request.window.start(row.end) > row.first_held for row in self._rows)
        tables = self._block_table.cpu() if has_event else torch.zeros(len(self._rows), 0)
        tables = tables.to(torch.int32)
        for row in self._rows:
            if row.request.resumes:
                self._resume(row, resumed[row.request_id])
            line = batch.req_id_to_index[row.request_id]
            end_row = row.first_row + row.end - row.begin
            self._evictor.schedule(
                row.request.number,
                begin=row.begin,
                first_row=row.first_row,
                tokens=batch.token_ids_cpu_tensor[line, row.begin : row.end],
                block_table=tables[row.index],
                computed=None if computed is None else computed[row.first_row : end_row],
            )

    def layer(self, name: str, query: torch.Tensor, query_rows: torch.Tensor | None) -> None:
        """After a layer's attention: buffer its queries, and let its keys be scored at an event.

        Parameters
        ----------
        name : str
            Of the attention layer.
        query : torch.Tensor
            [rows, query heads, head size] after RoPE.
        query_rows : torch.Tensor or None
            int64 [rows of the batch]: where each row's query stands, or -1; None: in its place.
        """
        if not self._is_running:
            return
        index, kv = self._layers[name]
        if self.observer is not None and query_rows is None:
            assert self._block_table is not None
            for row in self._rows:
                end_row = row.first_row + row.end - row.begin
                self.observer.layer(
                    index, row, query[row.first_row : end_row], kv, self._block_table[row.index]
                )
        self._evictor.layer(
            index,
            query=query,
            kv=kv,
            query_rows=None if query_rows is None else self._on_cpu(query_rows),
            stream=current_stream(self._device),
        )

    def end_step(self) -> frozenset[str]:
        """After the forward pass. Returns the step's requests whose keys have been moved so far."""
        if not self._is_running:
            return frozenset()
        self._is_running = False
        self._query_rows = None
        for event in self._evictor.finish():
            request_id = self._names[event.request]
            if event.failure:
                logger.error("PhaseKV: request %s: %s", request_id, event.failure)
            kept = self._evictor.kept_by_phase(event.request)
            report = EvictionReport.of_event(event, kept)
            self._reports.setdefault(request_id, EvictionReport()).add(report)
        if self.observer is not None:
            for row in self._rows:
                self.observer.step_ended(row, self._positions(row.request.number))
        return frozenset(
            row.request_id for row in self._rows if row.request.window.start(row.end) > 0
        )

    def save(self, job: SaveJob) -> StoreChanges:
        """Keep a finished request as a session. Returns which sessions left memory for it."""
        request = self._requests.get(job.request_id)
        if request is None or self._evictor.computed(request.number) != job.computed:
            return StoreChanges([job.key], [])
        blocks = torch.tensor(job.block_ids, dtype=torch.int32)
        slots = self._held_slots(blocks, request.window.start(job.computed), job.computed)
        keys, values = rows_on_cpu(self._layers, slots, self._dtype)
        return self._sessions.put(
            StoredSession(
                key=job.key,
                settings=job.settings,
                tokens=job.tokens,
                computed=job.computed,
                keys=keys,
                values=values,
                state=self._evictor.save(request.number),
            )
        )

    def policy_of(self, request_id: str) -> str:
        """Name of the policy of a running request."""
        return self._requests[request_id].choice.policy

    def take_reports(self) -> dict[str, EvictionReport]:
        """Reports of requests that had events since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    def release(self, request_ids: set[str]) -> None:
        """Forget requests that are finished."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._evictor.remove(request.number)
                del self._names[request.number]

    def _request(self, request_id: str, begin: int) -> _Request:
        """The request, which has ``begin`` tokens computed before this step."""
        known = self._requests.get(request_id)
        if known is not None and self._evictor.computed(known.number) == begin:
            return known
        # New, or preempted and begun anew; from a session if it has computed tokens already.
        self.release({request_id})
        return self._add(request_id, begin)

    def _resume(self, row: StepRow, key: str) -> None:
        assert self._block_table is not None
        session = self._sessions.get(key)
        if session is None or session.computed != row.begin:
            raise AssertionError(f"request {row.request_id}: session {key} is not here")
        self._evictor.restore(row.request.number, session.state)
        slots = self._held_slots(self._block_table[row.index].cpu(), row.first_held, row.begin)
        keys, values = session.keys.to(self._device), session.values.to(self._device)
        stream = current_stream(self._device)
        for index, kv in self._layers.values():
            _core.scatter_blocks(rows=keys[index], slots=slots, blocks=kv.key, stream=stream)
            _core.scatter_blocks(rows=values[index], slots=slots, blocks=kv.value, stream=stream)
        row.request.resumes = False

    def _on_cpu(self, query_rows: torch.Tensor) -> torch.Tensor:
        """A copy, which layers that share the list share too: each would wait for a device."""
        if self._query_rows is None or self._query_rows[0] is not query_rows:
            self._query_rows = query_rows, query_rows.cpu()
        return self._query_rows[1]

    def _positions(self, number: int) -> list[torch.Tensor]:
        return [
            torch.tensor(self._evictor.positions(number, layer)).view(kv.num_heads, -1)
            for layer, kv in sorted(self._layers.values(), key=lambda layer_and_kv: layer_and_kv[0])
        ]

    def _held_slots(self, blocks: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Slots of logical positions [begin, end) in blocks that are counted from position 0."""
        size = self._evictor.block_size
        positions = torch.arange(begin, end)
        slots = blocks[positions // size].to(torch.int64) * size + positions % size
        return slots.to(self._device)

    def _add(self, request_id: str, computed: int) -> _Request:
        state = self._runner.requests[request_id]
        extra = state.sampling_params.extra_args if state.sampling_params is not None else None
        parameters = parameters_of((extra or {}).get("kv_transfer_params"))
        choice = parse_request_choice(parameters.get("eviction"), self._engine_choice)
        assert choice is not None
        window = choice.window(len(state.prompt_token_ids), computed)
        request = _Request(self._next_number, choice, window, resumes=computed > 0)
        self._next_number += 1
        self._evictor.add(
            request.number, policy=self._policy(choice), window=window, markers=self._markers
        )
        self._requests[request_id] = request
        self._names[request.number] = request_id
        return request

    def _policy(self, choice: EvictionChoice) -> _core.Policy:
        policy = self._policies.get(choice)
        if policy is None:
            policy = self._policies[choice] = choice.build(self._statistics)
        return policy
