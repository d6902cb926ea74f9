"""Keeps corrected keys and values out of vLLM's prefix cache.

vLLM gives each full block a hash of its tokens and of all blocks before it, plus "extra keys".
From the first block that may hold reused tokens on, a request's hashes get its own id as an extra
key: no other request can match them, while the blocks before stay shared as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ATTRIBUTE = "phasekv_plan"

_plan_request: Callable[[Any], Any] | None = None


def set_planner(plan_request: Callable[[Any], Any] | None) -> None:
    """Tell who plans requests in this process."""
    global _plan_request
    _plan_request = plan_request


def plan_of(request: Any) -> Any:
    """The plan of a vLLM request, made once, before its first block is hashed."""
    if not hasattr(request, ATTRIBUTE):
        setattr(request, ATTRIBUTE, None if _plan_request is None else _plan_request(request))
    return getattr(request, ATTRIBUTE)


def wrap_extra_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``generate_block_hash_extra_keys``, with a request's own id where needed."""

    def generate(
        request: Any, start_token_idx: int, end_token_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_index = original(request, start_token_idx, end_token_idx, *args, **kwargs)
        plan = plan_of(request)
        first = None if plan is None else plan.first_reusable_token
        if first is not None and end_token_idx > first:
            keys = (*(keys or ()), ("phasekv", request.request_id))
        return keys, next_index

    generate.phasekv_original = original  # type: ignore[attr-defined]
    return generate
