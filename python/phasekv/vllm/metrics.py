"""Counters of reuse, exported as Prometheus metrics beside vLLM's own."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from phasekv.vllm.plan import RequestReport

COUNTERS = {
    "chunks_found": "Chunks of prompts that were found in the chunk store.",
    "chunks_missed": "Chunks of prompts that were named and not found.",
    "chunks_stored": "Chunks put into the chunk store.",
    "tokens_found": "Prompt tokens that stood in found chunks.",
    "tokens_reused": "Prompt tokens whose cached keys and values were reused.",
    "probe_tokens": "Prompt tokens of found chunks that were recomputed.",
    "layer_tokens_charged": "Recomputed (layer, token) pairs of found chunks.",
    "layer_tokens_found": "All (layer, token) pairs of found chunks.",
}


def counts_of(report: RequestReport) -> dict[str, int]:
    """One report's share of each counter."""
    return {
        "chunks_found": len(report.found),
        "chunks_missed": len(report.missed),
        "chunks_stored": report.stored,
        "tokens_found": report.cached_tokens,
        "tokens_reused": report.cached_tokens - report.probes,
        "probe_tokens": report.probes,
        "layer_tokens_charged": report.charged,
        "layer_tokens_found": report.layers * report.cached_tokens,
    }


class ReuseStats(KVConnectorStats):
    """Sums of the counters since the last step that reported."""

    def reset(self) -> None:
        """Start again from zero."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def observe(self, report: RequestReport) -> None:
        """Add one report."""
        for name, count in counts_of(report).items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another object's counts to this one."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, for the log."""
        return dict(self.data)


class ReusePromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter ``vllm:phasekv_<name>`` for each entry of ``COUNTERS``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {}
        for name, documentation in COUNTERS.items():
            metric = counter(
                name=f"vllm:phasekv_{name}", documentation=documentation, labelnames=labelnames
            )
            self._counters[name] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what one step reported."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(count)
