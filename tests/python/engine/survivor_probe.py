"""A worker extension for tests: remembers which keys survived each event of each request."""

from __future__ import annotations

from typing import Any

from phasekv.vllm import active


class SurvivorProbe:
    """Methods that vLLM adds to its worker; tests call them through ``collective_rpc``."""

    def watch_survivors(self) -> None:
        """Begin to remember."""
        worker = active.evictions()
        assert worker is not None
        self._survivors: dict[str, list[list[list[int]]]] = {}
        original = worker.end_step

        def end_step() -> Any:
            events = worker._evictor.has_events()
            rows = [row for row in worker.rows if self._has_event(row)] if events else []
            result = original()
            layers = len(worker._layers)
            for row in rows:
                number = row.request.number
                self._survivors.setdefault(row.request_id, []).append(
                    [list(worker._evictor.positions(number, layer)) for layer in range(layers)]
                )
            return result

        worker.end_step = end_step  # type: ignore[method-assign]

    @staticmethod
    def _has_event(row: Any) -> bool:
        return bool(row.request.window.start(row.end) > row.request.window.start(row.begin))

    def survivors(self) -> dict[str, list[list[list[int]]]]:
        """Request -> event -> layer -> positions, KV head by KV head; forgotten then."""
        survivors, self._survivors = self._survivors, {}
        return survivors
