"""The windows of running requests, on the scheduler's side.

vLLM's block managers know requests by their id only, and are made before there is a connector: the
two meet here, in the engine core's process.
"""

from __future__ import annotations

from phasekv._core import Window

_windows: dict[str, Window] = {}


def register(request_id: str, window: Window) -> None:
    """The window of a request, before its first block is allocated."""
    _windows[request_id] = window


def forget(request_id: str) -> None:
    """The request is finished."""
    _windows.pop(request_id, None)


def of(request_id: str) -> Window | None:
    """The window of a request; None if it has none."""
    return _windows.get(request_id)
