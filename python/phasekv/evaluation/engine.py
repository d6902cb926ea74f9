"""A memory agent's view of the serving engine: store a note, ask a question, score an answer.

The engine is vLLM with the PhaseKV plugin, run inside this process so that hidden states can be
read (``recorder.py``) and the time of a step is not blurred by messages between processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phasekv.evaluation.environment import prepare_environment
from phasekv.evaluation.prompts import MemoryPrompt
from phasekv.evaluation.recorder import AnswerRecorder

FULL_RECOMPUTE = "full_recompute"
_GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class ReuseSetting:
    """A reuse method with its nominal recompute ratio and further switches.

    ``full_recompute`` is plain vLLM: such a request names no chunk at all.
    """

    method: str
    ratio: float = 0.0
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reuses(self) -> bool:
        """Whether anything cached is used."""
        return self.method != FULL_RECOMPUTE


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt.

    Attributes
    ----------
    text
        The generated text.
    first_token_seconds
        Wall-clock time from handing over the request to its first token.
    report
        PhaseKV's account of the request (chunks found, charged ratio, ...); None without reuse.
    """

    text: str
    first_token_seconds: float
    report: dict[str, Any] | None


class MemoryEngine:
    """vLLM with the PhaseKV plugin in this process, one request at a time.

    Parameters
    ----------
    model
        Folder of a Hugging Face model.
    max_tokens
        Longest prompt with its answer, in tokens; also the most one step computes, so that a
        prompt is never split.
    store_bytes
        Memory for stored chunks.
    store_bits
        Bits that stored chunks are quantised to; None: they are kept exactly.
    """

    def __init__(
        self,
        model: Path,
        *,
        max_tokens: int = 8192,
        store_bytes: int = 2 * _GIBIBYTE,
        store_bits: int | None = None,
    ) -> None:
        prepare_environment()
        from vllm import LLM

        self._llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_tokens,
            max_num_batched_tokens=max_tokens,
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            additional_config={
                "phasekv": {
                    "chunk_store_bytes": store_bytes,
                    "chunk_store_bits": store_bits,
                    "store_on_use": False,
                }
            },
        )
        core = self._llm.llm_engine.engine_core.engine_core
        model_object = core.model_executor.driver_worker.worker.model_runner.model
        self._recorder = AnswerRecorder(model_object)
        self._requests = 0

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._llm.get_tokenizer()

    def store(self, chunk: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """Computes ``chunk`` alone, or after ``prefix``, and stores the chunk's keys and values.

        A prefix gives the chunk the attention sink that it will have in a real prompt; it is not
        stored. A chunk that is stored already is replaced.
        """
        begin = len(prefix)
        prompt = MemoryPrompt([*prefix, *chunk], [(begin, begin + len(chunk))])
        self._run(prompt, {"chunks": _as_lists(prompt), "store": True}, max_tokens=1)

    def ask(self, prompt: MemoryPrompt, setting: ReuseSetting, max_tokens: int) -> Reply:
        """Greedy answer of at most ``max_tokens`` tokens."""
        return self._run(prompt, _parameters(prompt, setting), max_tokens)

    def score(
        self, prompt: MemoryPrompt, answer: Sequence[int], setting: ReuseSetting
    ) -> tuple[torch.Tensor, Reply]:
        """The distributions that predict each token of a given ``answer`` (teacher forcing).

        Returns
        -------
        log_probs
            float32 [len(answer), vocabulary], in nats. Row i predicts ``answer[i]``.
        reply
            The reply to the prompt with the answer at its end, one token long.
        """
        forced = prompt.followed_by(answer)
        end = len(forced.token_ids) - 1
        with self._recorder.record(len(forced.token_ids), end - len(answer), end):
            reply = self._run(forced, _parameters(forced, setting), max_tokens=1)
        return self._recorder.log_probs(), reply

    def _run(
        self, prompt: MemoryPrompt, parameters: dict[str, Any] | None, max_tokens: int
    ) -> Reply:
        from vllm import SamplingParams

        extra = None if parameters is None else {"kv_transfer_params": {"phasekv": parameters}}
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, extra_args=extra)
        engine = self._llm.llm_engine
        self._requests += 1
        begin = time.perf_counter()
        first_token: float | None = None
        engine.add_request(str(self._requests), {"prompt_token_ids": prompt.token_ids}, sampling)
        last = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first_token is None and output.outputs[0].token_ids:
                    first_token = time.perf_counter() - begin
                last = output
        if last is None or first_token is None:
            raise RuntimeError("the engine finished the request without a token")
        transfer = last.kv_transfer_params or {}
        return Reply(last.outputs[0].text, first_token, transfer.get("phasekv"))


def _as_lists(prompt: MemoryPrompt) -> list[list[int]]:
    return [list(chunk) for chunk in prompt.chunks]


def _parameters(prompt: MemoryPrompt, setting: ReuseSetting) -> dict[str, Any] | None:
    if not setting.reuses:
        return None
    return {
        "chunks": _as_lists(prompt),
        "method": setting.method,
        "ratio": setting.ratio,
        **setting.switches,
    }
