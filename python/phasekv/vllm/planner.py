"""The scheduler side of reuse: plans a request's chunks when it arrives, reports when it ends."""

from __future__ import annotations

import threading
from typing import Any

from phasekv import _core
from phasekv.errors import InvalidArgumentError
from phasekv.memory.keys import ChunkKey, ModelIdentity, chunk_key
from phasekv.reuse.report import RequestReport
from phasekv.vllm.config import PhaseKVConfig
from phasekv.vllm.plan import (
    PlannedChunk,
    ReusePlan,
    ScheduledRequest,
    StepReuse,
    StoredContent,
)
from phasekv.vllm.request import ReuseRequest


class ReusePlanner:
    """One per engine core.

    ``plan`` may be called from the thread that receives requests while the engine steps.

    Parameters
    ----------
    config : PhaseKVConfig
        Engine-wide settings.
    identity : ModelIdentity
        What the keys of chunks are tagged with.
    block_size : int
        Tokens in a block.
    """

    def __init__(self, config: PhaseKVConfig, identity: ModelIdentity, block_size: int) -> None:
        self._config = config
        self._identity = identity
        self._block_size = block_size
        self._lock = threading.Lock()
        # Chunks may be found only by requests of the same tenant (salt) and adapter.
        self._indexes: dict[tuple[str, str], _core.ChunkIndex] = {}
        self._domain_of: dict[str, tuple[str, str]] = {}
        self._blocks: dict[str, list[int]] = {}
        self._plans: dict[str, ReusePlan] = {}
        self._started: set[str] = set()
        self._reports: dict[str, RequestReport] = {}
        self._responses: dict[str, tuple[ReusePlan, dict[str, Any]]] = {}

    def plan(self, request: Any) -> ReusePlan | None:
        """What to do about a request's chunks; None if there is nothing to do.

        Parameters
        ----------
        request : vllm Request
            Just created; its parameters were validated when the front end accepted it.
        """
        tokens = request.prompt_token_ids
        if not tokens or request.sampling_params is None:
            return None
        try:
            wish = ReuseRequest.parse(request.kv_transfer_params, len(tokens), self._config)
        except InvalidArgumentError:
            # The front end refuses these; a request that comes past it is served exactly.
            return None
        domain = domain_of(request)
        chunks = [
            PlannedChunk(
                begin,
                end,
                self._key(tokens[begin:end], domain),
                tokens=tuple(tokens[begin:end]) if wish.store or self._config.store_on_use else (),
            )
            for begin, end in wish.chunks
        ]
        if wish.auto:
            chunks.extend(self._find(tokens, wish.chunks, domain))
            chunks.sort(key=lambda chunk: chunk.begin)
        if not chunks:
            return None
        return ReusePlan(
            choice=wish.choice,
            chunks=tuple(chunks),
            prompt_tokens=len(tokens),
            reuse=not wish.store,
            replace=wish.store,
            domain=domain,
        )

    def _key(self, tokens: list[int], domain: tuple[str, str]) -> ChunkKey:
        salt, adapter = domain
        return chunk_key(self._identity, tokens, salt=salt, adapter=adapter)

    def _find(
        self, tokens: list[int], named: tuple[tuple[int, int], ...], domain: tuple[str, str]
    ) -> list[PlannedChunk]:
        index = self._indexes.get(domain)
        if index is None:
            return []
        return [
            PlannedChunk(begin, end, ChunkKey(key), chunk_begin)
            for key, begin, end, chunk_begin in index.find(tokens)
            if all(end <= low or begin >= high for low, high in named)
        ]

    def register(self, request_id: str, plan: ReusePlan) -> None:
        """Remember the plan of a request that the scheduler accepted."""
        self._plans[request_id] = plan
        self._reports[request_id] = RequestReport()

    def schedule(self, scheduler_output: Any) -> StepReuse:
        """The planned requests of a step, with what the workers need to find their rows."""
        preempted = list(scheduler_output.preempted_req_ids or ())
        for request_id in preempted:
            self._started.discard(request_id)
            self._blocks.pop(request_id, None)
        scheduled = []
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._plans:
                self._blocks[new.req_id] = list(new.block_ids[0])
                scheduled.append((new.req_id, new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            if request_id not in self._plans:
                continue
            blocks = cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                self._blocks[request_id] = []
            if blocks is not None:
                self._blocks.setdefault(request_id, []).extend(blocks[0])
            scheduled.append((request_id, cached.num_computed_tokens[row]))
        requests = []
        for request_id, computed in scheduled:
            plan = self._plans[request_id]
            if computed < plan.end or request_id not in self._started:
                self._started.add(request_id)
                block = self._blocks[request_id][computed // self._block_size]
                slot = block * self._block_size + computed % self._block_size
                requests.append(ScheduledRequest(request_id, plan, slot))
        released = [*preempted, *scheduler_output.finished_req_ids]
        return StepReuse(tuple(requests), tuple(released))

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """The report for a request's response, None if it had no plan.

        The workers' report of the request's last step arrives after this call but before the
        response is sent, so the returned dictionary is filled in by ``update``.
        """
        plan = self._plans.pop(request_id, None)
        if plan is None:
            return None
        self._started.discard(request_id)
        self._blocks.pop(request_id, None)
        response = self._reports[request_id].as_response(plan.choice)
        self._responses[request_id] = (plan, response)
        return response

    def update(
        self,
        reports: dict[str, RequestReport],
        stored: list[StoredContent],
        gone: list[str],
    ) -> None:
        """Take in what the workers did in a step."""
        for request_id, report in reports.items():
            total = self._reports.get(request_id)
            if total is None:
                continue
            total.add(report)
            if request_id in self._responses:
                plan, response = self._responses[request_id]
                response.update(total.as_response(plan.choice))
        for request_id in self._responses:
            self._reports.pop(request_id, None)
        self._responses.clear()
        for key in gone:
            self.forget(key)
        for content in stored:
            self.add(content)

    def add(self, content: StoredContent) -> None:
        """Make a stored chunk findable by content."""
        with self._lock:
            self._domain_of[content.key] = content.domain
            index = self._indexes.get(content.domain)
            if index is None:
                index = _core.ChunkIndex(self._config.auto_min_tokens)
                self._indexes[content.domain] = index
        index.add(content.key, content.tokens)

    def forget(self, key: str) -> None:
        """A chunk is in no store any more."""
        with self._lock:
            domain = self._domain_of.pop(key, None)
            index = self._indexes.get(domain) if domain is not None else None
        if index is not None:
            index.remove(key)


def domain_of(request: Any) -> tuple[str, str]:
    """Salt and adapter of a request: chunks are never shared across them."""
    lora = request.lora_request
    adapter = "" if lora is None else f"{lora.lora_name}#{lora.lora_int_id}"
    return (request.cache_salt or "", adapter)
