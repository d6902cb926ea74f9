"""The reuse step that is running in this worker process, if any.

vLLM constructs attention layers long before there is a worker connector, so the two meet here. A
worker process runs one forward pass at a time.
"""

from __future__ import annotations

from phasekv import _core
from phasekv.vllm.step import ReuseStep

_step: ReuseStep | None = None
_layers: dict[str, tuple[int, _core.PagedKV]] = {}


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
