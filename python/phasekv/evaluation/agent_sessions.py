"""Agent sessions of several turns, sent to an engine together, for measuring throughput.

Their texts are random tokens between the real markers of a chat template, so that all phases occur.
A turn's prompt is the whole history: the previous prompt, what was generated, and a tool's result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SessionSizes:
    """Lengths in tokens; each pair is the least and the most, drawn evenly between them."""

    turns: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    result: tuple[int, int]


@dataclass(frozen=True)
class SessionPlan:
    """One session: its first prompt, and of each turn the answer's length and what follows it."""

    prompt: list[int]
    answers: list[int]
    results: list[list[int]]

    @property
    def full_tokens(self) -> int:
        """Length of the history at the end of the last turn, answer included."""
        return len(self.prompt) + sum(self.answers) + sum(map(len, self.results))


@dataclass(frozen=True)
class SessionRun:
    """What all sessions took together.

    Attributes
    ----------
    seconds : float
        Wall time.
    output_tokens, prompt_tokens : int
        Generated, and in all turns' prompts.
    resumed_tokens : int
        Of the prompts, those that PhaseKV's sessions held already.
    """

    seconds: float
    output_tokens: int
    prompt_tokens: int
    resumed_tokens: int


def plan_sessions(
    encode: Callable[[str], list[int]],
    vocabulary: int,
    count: int,
    sizes: SessionSizes,
    seed: int = 0,
) -> list[SessionPlan]:
    """Sessions of random content; equal seeds give equal sessions.

    Parameters
    ----------
    encode : callable
        Text to token ids, without special tokens of its own.
    vocabulary : int
        Ids are below it; those of the markers have to be by themselves.
    count : int
        Number of sessions.
    sizes : SessionSizes
        Their lengths.
    """
    draw = random.Random(seed)
    markers = {name: encode(text) for name, text in _MARKERS.items()}
    largest = max(max(tokens) for tokens in markers.values())
    if largest >= vocabulary:
        raise ValueError(f"a marker has token {largest}, the vocabulary is {vocabulary}")

    def words(tokens: int) -> list[int]:
        return [draw.randrange(vocabulary // 2, vocabulary) for _ in range(tokens)]

    def result(tokens: int) -> list[int]:
        inner = tokens - len(markers["tool_begin"]) - len(markers["tool_end"])
        return [*markers["tool_begin"], *words(inner), *markers["tool_end"]]

    def history(length: int) -> list[int]:
        rounds: list[int] = []
        room = length - len(markers["system"]) - len(markers["think"])
        while True:
            one = [*markers["think"], *words(80), *markers["act"], *words(40), *result(300)]
            if len(rounds) + len(one) > room:
                break
            rounds += one
        return [*markers["system"], *words(room - len(rounds)), *rounds, *markers["think"]]

    return [
        SessionPlan(
            history(draw.randint(*sizes.prompt)),
            [draw.randint(*sizes.answer) for _ in range(sizes.turns)],
            [result(draw.randint(*sizes.result)) for _ in range(sizes.turns - 1)],
        )
        for _ in range(count)
    ]


_MARKERS = {
    "system": "<|im_start|>system\n",
    "think": "<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "act": "\n</think>\n<tool_call>\n",
    "tool_begin": "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n",
    "tool_end": "\n</tool_response>",
}


def run_sessions(engine: Any, plans: list[SessionPlan], resume: bool = False) -> SessionRun:
    """All sessions at once; each sends its next turn when the previous one is answered.

    Parameters
    ----------
    engine : vllm LLMEngine
        Nothing else is running in it.
    plans : list of SessionPlan
        The sessions.
    resume : bool
        Each turn goes on from what PhaseKV kept of the one before.
    """
    begin = time.perf_counter()
    histories = [list(plan.prompt) for plan in plans]
    output_tokens = prompt_tokens = resumed_tokens = 0

    def send(session: int, turn: int) -> None:
        nonlocal prompt_tokens
        prompt_tokens += len(histories[session])
        engine.add_request(
            f"{begin}-{session}-{turn}",
            {"prompt_token_ids": list(histories[session])},
            greedy(
                plans[session].answers[turn],
                {"session": f"{begin}-{session}"} if resume else None,
            ),
        )

    for session in range(len(plans)):
        send(session, 0)
    for output in _finished(engine):
        session, turn = (int(part) for part in output.request_id.rsplit("-", 2)[1:])
        tokens = output.outputs[0].token_ids
        output_tokens += len(tokens)
        if resume:
            resumed_tokens += output.kv_transfer_params["phasekv"]["session"]["resumed_tokens"]
        if turn < len(plans[session].results):
            histories[session] += [*tokens, *plans[session].results[turn]]
            send(session, turn + 1)
    return SessionRun(time.perf_counter() - begin, output_tokens, prompt_tokens, resumed_tokens)


def _finished(engine: Any) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield from (output for output in engine.step() if output.finished)


def greedy(max_tokens: int, phasekv: dict[str, Any] | None) -> Any:
    """Sampling parameters of a request for exactly ``max_tokens`` tokens."""
    from vllm import SamplingParams

    extra = None if phasekv is None else {"kv_transfer_params": {"phasekv": phasekv}}
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
    )
