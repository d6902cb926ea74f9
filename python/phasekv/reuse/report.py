"""What became of a request's chunks, as workers tell it and as responses show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phasekv.reuse.choice import MethodChoice


@dataclass
class RequestReport:
    """What happened to a request's chunks, summed over the steps of its prefill.

    ``charged`` counts (layer, cached token) pairs that were recomputed: layers before and at the
    check layer count in full for every cached token, whatever the method made of them. A pass of
    the question that goes before counts with its rows, as if they were cached tokens.
    """

    found: dict[tuple[int, int], str] = field(default_factory=dict)
    missed: dict[tuple[int, int], str] = field(default_factory=dict)
    stored: int = 0
    cached_tokens: int = 0
    probes: int = 0
    charged: int = 0
    layers: int = 0
    failure: str = ""

    def add(self, other: RequestReport) -> None:
        """Sum in what a later step of the same request reports."""
        self.found.update(other.found)
        self.missed.update(other.missed)
        self.stored += other.stored
        self.cached_tokens += other.cached_tokens
        self.probes += other.probes
        self.charged += other.charged
        self.layers = max(self.layers, other.layers)
        self.failure = self.failure or other.failure

    @property
    def charged_ratio(self) -> float | None:
        """Recomputed (layer, token) pairs over all pairs of the cached tokens; None without any."""
        total = self.layers * self.cached_tokens
        return self.charged / total if total else None

    def as_response(self, choice: MethodChoice) -> dict[str, object]:
        """The ``phasekv`` object of the response's ``kv_transfer_params``."""
        failure = {"failure": self.failure} if self.failure else {}
        return {
            "method": choice.method,
            "ratio": choice.ratio,
            "charged_ratio": self.charged_ratio,
            "chunks_found": len(self.found),
            "chunks_missed": len(self.missed),
            "chunks_stored": self.stored,
            "missed": [
                {"range": list(edges), "reason": reason}
                for edges, reason in sorted(self.missed.items())
            ],
            "tokens_found": self.cached_tokens,
            "tokens_reused": self.cached_tokens - self.probes,
            "probes": self.probes,
            **failure,
        }
