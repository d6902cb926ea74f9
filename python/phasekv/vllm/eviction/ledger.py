"""The scheduler side of eviction: registers windows, gathers what workers report."""

from __future__ import annotations

from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.eviction.report import EvictionReport
from phasekv.eviction.settings import EvictionChoice, parse_request_choice
from phasekv.vllm.eviction import windows
from phasekv.vllm.request import parameters_of


class EvictionLedger:
    """One per engine core.

    Parameters
    ----------
    engine_choice : EvictionChoice
        The engine's own settings.
    """

    def __init__(self, engine_choice: EvictionChoice) -> None:
        self._engine_choice = engine_choice
        self._choices: dict[str, EvictionChoice] = {}
        self._reports: dict[str, EvictionReport] = {}
        self._finished: dict[str, tuple[EvictionChoice, int, int, dict[str, object]]] = {}

    def register(self, request: Any) -> EvictionChoice:
        """A request arrives; its parameters were validated when the front end accepted it."""
        try:
            parameters = parameters_of(request.kv_transfer_params)
            choice = parse_request_choice(parameters.get("eviction"), self._engine_choice)
        except InvalidArgumentError:
            choice = self._engine_choice
        assert choice is not None
        self._choices[request.request_id] = choice
        self._reports[request.request_id] = EvictionReport()
        windows.register(request.request_id, choice.window(request.num_prompt_tokens))
        return choice

    def resume(self, request: Any, computed: int) -> None:
        """A request is about to go on with the first ``computed`` tokens of its prompt."""
        choice = self._choices[request.request_id]
        window = choice.window(request.num_prompt_tokens, computed)
        windows.register(request.request_id, window)

    def update(self, reports: dict[str, EvictionReport]) -> None:
        """Take in what the workers did in a step."""
        for request_id, report in reports.items():
            total = self._reports.get(request_id)
            if total is None:
                continue
            total.add(report)
            if request_id in self._finished:
                choice, computed, held, response = self._finished[request_id]
                response.update(total.as_response(choice, computed, held))
        for request_id in self._finished:
            self._reports.pop(request_id, None)
        self._finished.clear()

    def finish(self, request: Any) -> dict[str, object]:
        """The ``eviction`` object of a request's response.

        The workers' report of the request's last step arrives after this call but before the
        response is sent, so the returned dictionary is filled in by ``update``.
        """
        request_id = request.request_id
        choice = self._choices.pop(request_id, self._engine_choice)
        window = windows.of(request_id) or choice.window(request.num_prompt_tokens)
        windows.forget(request_id)
        computed = request.num_computed_tokens
        # Not what this request evicted: earlier turns of its session have done so too.
        held = computed - window.start(computed)
        report = self._reports.get(request_id, EvictionReport())
        response = report.as_response(choice, computed, held)
        self._finished[request_id] = (choice, computed, held, response)
        return response
