"""What is running in this worker process: the reuse step, if any, and eviction, if asked for.

vLLM constructs attention layers long before there is a worker connector, so the two meet here. A
worker process runs one forward pass at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasekv import _core
from phasekv.reuse.step import ReuseStep

if TYPE_CHECKING:
    from phasekv.vllm.eviction.worker import EvictionWorker

_step: ReuseStep | None = None
_layers: dict[str, tuple[int, _core.PagedKV]] = {}
_evictions: EvictionWorker | None = None


def begin(step: ReuseStep, layers: dict[str, tuple[int, _core.PagedKV]]) -> None:
    """Make ``step`` current; ``layers`` maps attention layer names to their index and blocks."""
    global _step, _layers
    _step, _layers = step, layers


def end() -> None:
    """No step is current any more."""
    global _step, _layers
    _step, _layers = None, {}


def layer(name: str) -> tuple[ReuseStep, int, _core.PagedKV] | None:
    """The current step with the index and blocks of the named attention layer."""
    if _step is None:
        return None
    index, kv = _layers[name]
    return _step, index, kv


def set_evictions(worker: EvictionWorker | None) -> None:
    """The engine has made its cache, and evicts from it."""
    global _evictions
    _evictions = worker


def evictions() -> EvictionWorker | None:
    """The worker that evicts; None where nothing is evicted."""
    return _evictions
