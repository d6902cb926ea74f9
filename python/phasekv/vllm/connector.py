"""vLLM's KV connector interface over planner, ledgers (scheduler side) and workers.

The interface is made for whole prefixes that come from elsewhere, which is what a session is. For
everything else it is the channel that vLLM keeps open between scheduler, workers and responses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.forward_context import get_forward_context, is_forward_context_available

from phasekv.errors import InvalidArgumentError
from phasekv.eviction.report import EvictionReport
from phasekv.memory.session_store import StoreChanges
from phasekv.reuse.report import RequestReport
from phasekv.vllm import prefix_cache, setup
from phasekv.vllm.eviction.sessions import SaveJob
from phasekv.vllm.metrics import PhaseKVPromMetrics, PhaseKVStats
from phasekv.vllm.plan import StepReuse, StoredContent
from phasekv.vllm.planner import domain_of
from phasekv.vllm.request import PARAMETER


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step."""

    reuse: StepReuse = field(default_factory=StepReuse)
    resumed: dict[str, str] = field(default_factory=dict)
    saves: tuple[SaveJob, ...] = ()


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, in steps where something happened; only the first rank speaks."""

    reports: dict[str, RequestReport]
    stored: list[StoredContent]
    gone: list[str]
    evictions: dict[str, EvictionReport]
    sessions: StoreChanges

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Never needed: only one rank reports."""
        raise AssertionError("two ranks reported")


class PhaseKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Thin: every decision is the planner's or the worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker: Any = None
        self._evictions: Any = None
        self._planner: Any = None
        self._ledger: Any = None
        self._sessions: Any = None
        self._saved: set[str] = set()
        self._session_changes = StoreChanges([], [])
        self._stats = PhaseKVStats()
        if role == KVConnectorRole.SCHEDULER:
            self._planner = setup.build_planner(vllm_config)
            self._ledger = setup.build_ledger(vllm_config)
            self._sessions = setup.build_session_ledger(vllm_config)
            prefix_cache.set_planner(self._planner.plan)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine has made its cache: everything the worker needs is known now."""
        self._worker = setup.build_worker(self._vllm_config, kv_caches)
        self._evictions = setup.build_eviction_worker(self._vllm_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before every forward pass, inside its forward context."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._evictions is not None:
            for job in connector_metadata.saves:
                changes = self._evictions.save(job)
                self._session_changes.gone.extend(changes.gone)
                self._session_changes.on_disk.extend(changes.on_disk)
                self._saved.add(job.request_id)
        if self._worker is None:
            return
        self._worker.release(connector_metadata.reuse.released)
        # A step in which no token runs may have none: vLLM's second runner makes none for it.
        if not is_forward_context_available():
            return
        context = get_forward_context()
        rows = self._evictions.rows if self._evictions is not None else []
        self._worker.begin_step(connector_metadata.reuse, context, [row.first_held for row in rows])
        if self._evictions is not None and context.attn_metadata is not None:
            self._evictions.begin_step(connector_metadata.resumed, self._worker.reused_rows)

    def wait_for_save(self) -> None:
        """Called after every forward pass."""
        moved: frozenset[str] = frozenset()
        if self._evictions is not None:
            moved = self._evictions.end_step()
        if self._worker is not None:
            self._worker.end_step(moved)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler must hear of this step."""
        if self._worker is None:
            return None
        reports = self._worker.take_reports()
        stored, gone = self._worker.take_store_changes()
        evictions = {} if self._evictions is None else self._evictions.take_reports()
        changes, self._session_changes = self._session_changes, StoreChanges([], [])
        has_news = reports or stored or gone or evictions or any(changes)
        if not self._worker.is_first_rank or not has_news:
            return None
        for report in reports.values():
            self._stats.observe_reuse(report)
        for request_id, eviction in evictions.items():
            self._stats.observe_eviction(self._evictions.policy_of(request_id), eviction)
        return WorkerMetadata(reports, stored, gone, evictions, changes)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose caches have been saved: their blocks can go."""
        if self._evictions is not None:
            self._evictions.release(finished_req_ids)
        saved, self._saved = self._saved, set()
        return saved, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded as a whole; layers are filled as they run."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Chunks are stored after the forward pass."""

    def get_kv_connector_stats(self) -> PhaseKVStats | None:
        """Counts since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, PhaseKVStats()
        return stats

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of a request's prompt that its session has computed."""
        if self._sessions is None:
            return 0, False
        computed = self._sessions.match(request)
        if computed is None:
            return None, False
        self._ledger.resume(request, computed)
        return max(0, computed - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing was claimed."""

    def on_new_request(self, request: Any) -> None:
        """Remember the plan that the request's block hashes were made with."""
        plan = prefix_cache.plan_of(request)
        if plan is not None:
            self._planner.register(request.request_id, plan)
        if self._ledger is not None:
            choice = self._ledger.register(request)
            self._sessions.register(request, choice, domain_of(request))

    def continued(self, name: str, domain: tuple[str, str]) -> list[int]:
        """Token ids of the session that a request appends to."""
        if self._sessions is None:
            raise InvalidArgumentError("append", "true", "absent: this engine has no sessions")
        tokens: list[int] = self._sessions.continued(name, domain).tolist()
        return tokens

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The planned requests of this step."""
        step = StepMetadata(self._planner.schedule(scheduler_output))
        if self._sessions is not None:
            started = [new.req_id for new in scheduler_output.scheduled_new_reqs]
            started += scheduler_output.scheduled_cached_reqs.resumed_req_ids
            keys = {request_id: self._sessions.key_resumed_by(request_id) for request_id in started}
            step.resumed = {request_id: key for request_id, key in keys.items() if key is not None}
            step.saves = self._sessions.take_jobs()
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' reports."""
        metadata = connector_output.kv_connector_worker_meta
        if not isinstance(metadata, WorkerMetadata):
            metadata = WorkerMetadata({}, [], [], {}, StoreChanges([], []))
        self._planner.update(metadata.reports, metadata.stored, metadata.gone)
        if self._ledger is not None:
            self._ledger.update(metadata.evictions)
            self._sessions.saved(connector_output.finished_sending or ())
            self._sessions.update(metadata.sessions)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The report goes into the response; a session's blocks are freed when it is saved."""
        response = self._planner.finish(request.request_id)
        keep_blocks = False
        if self._ledger is not None:
            response = {} if response is None else response
            response["eviction"] = self._ledger.finish(request)
            keep_blocks, session = self._sessions.finish(request, block_ids)
            if session is not None:
                response["session"] = session
        return keep_blocks, None if response is None else {PARAMETER: response}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    # Metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PhaseKVStats:
        """Stats as they come out of another process."""
        return PhaseKVStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PhaseKVPromMetrics:
        """The Prometheus side."""
        return PhaseKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
