"""Counters of reuse and eviction, exported as Prometheus metrics beside vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from phasekv.eviction.report import EvictionReport
from phasekv.reuse.report import RequestReport

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

EVICTION_COUNTERS = {
    "tokens_evicted": "Tokens evicted, per layer and KV head.",
    "blocks_freed": "Blocks freed by eviction.",
    "compactions": "Events in which a request's survivors were chosen and moved.",
    "scoring_seconds": "Wall time of scoring keys and choosing survivors.",
    "compaction_seconds": "Wall time of moving survivors.",
}
"""Each has the label ``policy``."""

SEPARATOR = "/"
"""Between a counter's name and its policy, in the sums that travel between processes."""


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


def eviction_counts_of(report: EvictionReport) -> dict[str, float]:
    """One report's share of each counter."""
    return {
        "tokens_evicted": report.evicted_tokens,
        "blocks_freed": report.freed_blocks,
        "compactions": report.compactions,
        "scoring_seconds": report.scoring_seconds,
        "compaction_seconds": report.compacting_seconds,
    }


class PhaseKVStats(KVConnectorStats):
    """Sums of the counters since the last step that reported."""

    def reset(self) -> None:
        """Start again from zero."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())

    def observe_reuse(self, report: RequestReport) -> None:
        """Add one request's report."""
        self._add(counts_of(report))

    def observe_eviction(self, policy: str, report: EvictionReport) -> None:
        """Add one request's report, to its policy's counters."""
        self._add(
            {
                f"{name}{SEPARATOR}{policy}": count
                for name, count in eviction_counts_of(report).items()
            }
        )

    def _add(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another object's counts to this one."""
        self._add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, for the log."""
        return dict(self.data)


class PhaseKVPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter ``vllm:phasekv_<name>`` for each entry of both tables."""

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
        self._engine_labels = per_engine_labelvalues
        self._eviction_counters = {
            name: counter(
                name=f"vllm:phasekv_{name}",
                documentation=documentation,
                labelnames=[*labelnames, "policy"],
            )
            for name, documentation in EVICTION_COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what one step reported."""
        for name, count in transfer_stats_data.items():
            counter, _, policy = name.partition(SEPARATOR)
            if policy:
                labels = (*self._engine_labels[engine_idx], policy)
                self._eviction_counters[counter].labels(*labels).inc(count)
            else:
                self._counters[counter][engine_idx].inc(count)
