"""Replays given tokens through the serving engine under an eviction policy.

A replay is one prompt, prefilled in chunks as long as the stride: an event follows each chunk, so
that the window is compressed on the way as in decoding. Only the queries of a chunk come together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phasekv._core import Window
from phasekv.evaluation.environment import prepare_environment
from phasekv.evaluation.recorder import RowRecorder
from phasekv.vllm import active
from phasekv.vllm.eviction.worker import EvictionWorker, StepObserver

FULL = "full"
"""The policy that evicts nothing."""


@dataclass(frozen=True)
class PolicySetting:
    """An eviction policy with its options, those of a request's ``eviction`` object."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Replay:
    """What came of one replay.

    Attributes
    ----------
    hidden : torch.Tensor
        ``[rows, hidden size]``: the final hidden states of the rows asked for.
    seconds : float
        Wall time of the whole prompt.
    report : dict
        The ``eviction`` object of the response.
    """

    hidden: torch.Tensor
    seconds: float
    report: dict[str, Any]


class ReplayEngine:
    """vLLM with eviction in this process, one request at a time.

    Parameters
    ----------
    model : Path
        Folder of a Hugging Face model.
    max_tokens : int
        Longest prompt, in tokens.
    stride : int
        Tokens between two events, and of a prefill chunk.
    block_size : int
        Tokens per block; budgets and ``stride`` are multiples of it.
    calibration : Path or None
        File of ``phasekv calibrate``, for the policy triattention.
    """

    def __init__(
        self,
        model: Path,
        *,
        max_tokens: int,
        stride: int = 128,
        block_size: int = 32,
        calibration: Path | None = None,
    ) -> None:
        prepare_environment()
        from vllm import LLM

        length = max_tokens + 1
        # A budget that holds the longest prompt: without one of its own a request evicts nothing.
        self._full_budget = -(-length // stride) * stride
        self._stride = stride
        eviction: dict[str, Any] = {
            "policy": FULL,
            "budget": self._full_budget,
            "stride": stride,
        }
        if calibration is not None:
            eviction["calibration"] = str(calibration)
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=length,
            max_num_batched_tokens=stride,
            max_num_seqs=1,
            block_size=block_size,
            enable_prefix_caching=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            additional_config={"phasekv": {"eviction": eviction, "store_on_use": False}},
        )
        core = self._llm.llm_engine.engine_core.engine_core
        model_object = core.model_executor.driver_worker.worker.model_runner.model
        self._recorder = RowRecorder(model_object)
        self._requests = 0

    @property
    def _evictions(self) -> EvictionWorker:
        worker = active.evictions()
        assert worker is not None
        return worker

    @property
    def scale(self) -> float:
        """What multiplies q.k before the softmax."""
        return self._evictions.scale

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._llm.get_tokenizer()

    @property
    def stride(self) -> int:
        """Tokens between two events."""
        return self._stride

    def replay(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        setting: PolicySetting,
        budget: int | None = None,
        observer: StepObserver | None = None,
    ) -> Replay:
        """Run ``tokens`` as a prompt and keep the rows at the ascending positions ``rows``.

        ``budget`` is in tokens; None is one that evicts nothing. ``observer`` looks on.
        """
        from vllm import SamplingParams

        eviction = {
            "policy": setting.policy,
            "budget": self._full_budget if budget is None else budget,
            **setting.options,
        }
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": {"phasekv": {"eviction": eviction}}},
        )
        engine = self._llm.llm_engine
        self._requests += 1
        last = None
        self._evictions.observer = observer
        begin = time.perf_counter()
        with self._recorder.record(rows):
            engine.add_request(
                str(self._requests), {"prompt_token_ids": [int(t) for t in tokens]}, sampling
            )
            while engine.has_unfinished_requests():
                for output in engine.step():
                    last = output
        seconds = time.perf_counter() - begin
        self._evictions.observer = None
        if last is None:
            raise RuntimeError("the engine finished the request without a token")
        report = last.kv_transfer_params["phasekv"]["eviction"]
        if "failure" in report:
            raise RuntimeError(f"{setting.policy}: {report['failure']}")
        return Replay(self._recorder.hidden(), seconds, report)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of replayed rows: float32, [rows, vocabulary], in nats."""
        return self._recorder.log_probs(hidden)


def first_evicted_row(budget: int, stride: int) -> int:
    """First position whose attention misses a token, when prompts run in chunks of ``stride``."""
    window = Window(budget=budget, stride=stride)
    position = 0
    while window.start(position) == 0:
        position += stride
    return position
