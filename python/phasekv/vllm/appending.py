"""Requests that bring only what is new: the session's tokens are put before theirs.

A chat template that renders the history anew may leave out what the model has seen (its thinking);
such a prompt does not begin with the session's tokens, and the session is of no use to it. A
request with ``append`` sends the new tokens only, so that nothing is lost.
"""

from __future__ import annotations

from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.vllm.eviction.sessions import appends, session_name
from phasekv.vllm.planner import domain_of
from phasekv.vllm.request import parameters_of


def put_session_before(request: Any, scheduler: Any, vllm_config: Any) -> None:
    """Extend a request's prompt by its session, if it asks for that.

    Parameters
    ----------
    request : vllm EngineCoreRequest
        As the front end sent it.
    scheduler : vllm Scheduler
        Of the engine core.
    vllm_config : VllmConfig
        Of the engine.

    Raises
    ------
    InvalidArgumentError
        If there is no such session, or the whole is longer than the model takes.
    """
    parameters = request.sampling_params
    extra = (parameters.extra_args if parameters is not None else None) or {}
    fields = parameters_of(extra.get("kv_transfer_params"))
    if not appends(fields):
        return
    name = session_name(fields)
    assert name is not None
    before = scheduler.connector.continued(name, domain_of(request))
    longest = vllm_config.model_config.max_model_len
    total = len(before) + len(request.prompt_token_ids)
    if total >= longest:
        raise InvalidArgumentError(
            "append", f"{total} tokens with the session", f"less than max_model_len, {longest}"
        )
    request.prompt_token_ids = [*before, *request.prompt_token_ids]
