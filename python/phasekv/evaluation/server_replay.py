"""Replays an agent's trajectory turn by turn through the server, its own words forced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.server import Server

FORCED_TOKENS = "phasekv_forced_tokens"
"""Extra argument of a request: the token ids of its answer (``forced_tokens.py``)."""

PROCESSOR = "phasekv.evaluation.forced_tokens:ForcedTokens"
"""What the server's ``--logits-processors`` takes, for requests with `FORCED_TOKENS`."""

_TURN = "<|im_start|>assistant\n"
_TURN_END = "<|im_end|>"


@dataclass(frozen=True)
class Turn:
    """What the assistant says at once: the trajectory's tokens [begin, end)."""

    begin: int
    end: int


@dataclass(frozen=True)
class TurnOutcome:
    """One turn as the server ran it.

    Attributes
    ----------
    seconds : float
        From sending the request to its response.
    logprobs : numpy.ndarray
        float64 [tokens]: log-probability of each recorded token, in nats.
    likeliest : numpy.ndarray
        int64 [tokens]: the token that was most likely in its place.
    eviction : dict
        The ``eviction`` object of the response.
    session : dict
        Its ``session`` object; empty if it has none.
    """

    seconds: float
    logprobs: npt.NDArray[np.float64]
    likeliest: npt.NDArray[np.int64]
    eviction: dict[str, Any]
    session: dict[str, Any]


def assistant_turns(tokens: Sequence[int], tokenizer: Any) -> list[Turn]:
    """The assistant's turns of a trajectory in ChatML, each with the marker that ends it.

    Raises
    ------
    InvalidArgumentError
        If there is none.
    """
    header = tokenizer.encode(_TURN, add_special_tokens=False)
    end_token = tokenizer.convert_tokens_to_ids(_TURN_END)
    turns = []
    begin = 0
    listed = list(tokens)
    while begin < len(listed):
        begin += 1
        if listed[max(0, begin - len(header)) : begin] != header:
            continue
        end = listed.index(end_token, begin) + 1 if end_token in listed[begin:] else len(listed)
        if end > begin:
            turns.append(Turn(begin, end))
        begin = end
    if not turns:
        raise InvalidArgumentError("trajectory", f"{len(listed)} tokens", "a turn of the assistant")
    return turns


def replay_turn(
    server: Server,
    tokens: Sequence[int],
    turn: Turn,
    eviction: dict[str, Any],
    session: str,
) -> TurnOutcome:
    """Let the server say a turn after everything before it.

    Parameters
    ----------
    server : Server
        Started with `PROCESSOR`.
    tokens : sequence of int
        Of the whole trajectory.
    turn : Turn
        One of `assistant_turns`.
    eviction : dict
        The request's ``eviction`` object.
    session : str
        The turns of one replay share one session.
    """
    begin = time.perf_counter()
    response = server.complete(
        tokens[: turn.begin],
        max_tokens=turn.end - turn.begin,
        ignore_eos=True,
        logprobs=1,
        return_tokens_as_token_ids=True,
        vllm_xargs={FORCED_TOKENS: list(tokens[turn.begin : turn.end])},
        kv_transfer_params={"phasekv": {"eviction": eviction, "session": session}},
    )
    seconds = time.perf_counter() - begin
    logprobs = response["choices"][0]["logprobs"]
    likeliest = [max(entry, key=entry.__getitem__) for entry in logprobs["top_logprobs"]]
    report = response["kv_transfer_params"]["phasekv"]
    return TurnOutcome(
        seconds=seconds,
        logprobs=np.array(logprobs["token_logprobs"], dtype=np.float64),
        likeliest=np.array([int(name.removeprefix("token_id:")) for name in likeliest]),
        eviction=report["eviction"],
        session=report.get("session", {}),
    )
