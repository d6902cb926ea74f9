"""vLLM's KV connector interface over the planner (scheduler side) and the worker.

The interface is made for whole prefixes that come from elsewhere; PhaseKV never claims any. It uses
it as the channel that vLLM keeps open between scheduler, workers and responses.
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

from phasekv.vllm import prefix_cache, setup
from phasekv.vllm.metrics import ReusePromMetrics, ReuseStats
from phasekv.vllm.plan import RequestReport, StepReuse, StoredContent
from phasekv.vllm.request import PARAMETER


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step."""

    reuse: StepReuse = field(default_factory=StepReuse)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, in steps where something happened; only the first rank speaks."""

    reports: dict[str, RequestReport]
    stored: list[StoredContent]
    gone: list[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Never needed: only one rank reports."""
        raise AssertionError("two ranks reported")


class PhaseKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Thin: every decision is the planner's or the worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker: Any = None
        self._planner: Any = None
        self._stats = ReuseStats()
        if role == KVConnectorRole.SCHEDULER:
            self._planner = setup.build_planner(vllm_config)
            prefix_cache.set_planner(self._planner.plan)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine has made its cache: everything the worker needs is known now."""
        self._worker = setup.build_worker(self._vllm_config, kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before every forward pass, inside its forward context."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._worker is not None and is_forward_context_available():
            self._worker.begin_step(connector_metadata.reuse, get_forward_context())

    def wait_for_save(self) -> None:
        """Called after every forward pass."""
        if self._worker is not None:
            self._worker.end_step()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler must hear of this step."""
        if self._worker is None:
            return None
        reports = self._worker.take_reports()
        stored, gone = self._worker.take_store_changes()
        if not self._worker.is_first_rank or not (reports or stored or gone):
            return None
        for report in reports.values():
            self._stats.observe(report)
        return WorkerMetadata(reports, stored, gone)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded as a whole; layers are filled as they run."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Chunks are stored after the forward pass."""

    def get_kv_connector_stats(self) -> ReuseStats | None:
        """Counts since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, ReuseStats()
        return stats

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No prefix is computed elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing was claimed."""

    def on_new_request(self, request: Any) -> None:
        """Remember the plan that the request's block hashes were made with."""
        plan = prefix_cache.plan_of(request)
        if plan is not None:
            self._planner.register(request.request_id, plan)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The planned requests of this step."""
        return StepMetadata(self._planner.schedule(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in the workers' reports."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self._planner.update(metadata.reports, metadata.stored, metadata.gone)
        else:
            self._planner.update({}, [], [])

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The report goes into the response; blocks are freed at once."""
        report = self._planner.finish(request.request_id)
        return False, None if report is None else {PARAMETER: report}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0])

    # Metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ReuseStats:
        """Stats as they come out of another process."""
        return ReuseStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ReusePromMetrics:
        """The Prometheus side."""
        return ReusePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
