"""What eviction did to a request, as workers tell it and as responses show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phasekv import _core
from phasekv.eviction.settings import EvictionChoice


@dataclass
class EvictionReport:
    """One request's events, summed.

    Attributes
    ----------
    compactions : int
        Events: times that survivors were chosen and moved.
    evicted_tokens : int
        Per layer and KV head.
    freed_blocks : int
        Blocks the scheduler takes back, of all layers together one each.
    scoring_seconds, compacting_seconds : float
        Wall time of this worker.
    kept_by_phase : dict
        Mean number of tokens kept of each phase, over layers and KV heads, after the last event.
    failure : str
        What the policy did wrong, if anything; the newest tokens were then kept instead.
    """

    compactions: int = 0
    evicted_tokens: int = 0
    freed_blocks: int = 0
    scoring_seconds: float = 0.0
    compacting_seconds: float = 0.0
    kept_by_phase: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def of_event(cls, event: _core.EvictionReport, kept: Sequence[float]) -> EvictionReport:
        """One event, with the tokens ``kept`` of each phase after it."""
        return cls(
            compactions=1,
            evicted_tokens=event.evicted_tokens,
            freed_blocks=event.freed_blocks,
            scoring_seconds=event.scoring_seconds,
            compacting_seconds=event.compacting_seconds,
            kept_by_phase=dict(zip(_core.phase_names(), kept, strict=True)),
            failure=event.failure,
        )

    def add(self, later: EvictionReport) -> None:
        """Sum in a later event."""
        self.compactions += later.compactions
        self.evicted_tokens += later.evicted_tokens
        self.freed_blocks += later.freed_blocks
        self.scoring_seconds += later.scoring_seconds
        self.compacting_seconds += later.compacting_seconds
        self.kept_by_phase = later.kept_by_phase or self.kept_by_phase
        self.failure = self.failure or later.failure

    def as_response(self, choice: EvictionChoice, computed: int, held: int) -> dict[str, object]:
        """The ``eviction`` object of the response, with its logical and physical length."""
        response: dict[str, object] = {
            "policy": choice.policy,
            "budget": choice.budget,
            "stride": choice.stride,
            "compactions": self.compactions,
            "tokens_seen": computed,
            "tokens_kept": held,
            "tokens_evicted": self.evicted_tokens,
            "blocks_freed": self.freed_blocks,
            "kept_by_phase": dict(self.kept_by_phase),
        }
        if self.failure:
            response["failure"] = self.failure
        return response
