"""Real vLLM engines over tiny random models, each in its own EngineCore process as by default."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

# Engines import the tests' worker extension and policies in processes of their own.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tiny_models import VOCABULARY, make_model


@dataclass
class Answer:
    """One request's outcome.

    ``logprobs`` is float32 [output tokens, vocabulary]; ``report`` the ``phasekv`` object of the
    response, None without one.
    """

    tokens: list[int]
    logprobs: torch.Tensor
    report: dict[str, Any] | None


class Engine:
    """A vLLM engine with PhaseKV, and the requests that tests send it."""

    def __init__(self, folder: Path, phasekv: dict[str, Any] | None, **settings: Any) -> None:
        if transformers.__version__.startswith("4."):
            pytest.skip("vLLM wants transformers 5")
        from vllm import LLM

        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": 32,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "max_logprobs": VOCABULARY,
            "num_gpu_blocks_override": 256,
        }
        if phasekv is not None:
            settings["additional_config"] = {"phasekv": phasekv}
        self.folder = folder
        self.llm: Any = LLM(model=str(folder), **{**defaults, **settings})

    def ask(self, prompts: list[dict[str, Any]], max_tokens: int = 1) -> list[Answer]:
        """Send requests together.

        Each prompt has ``tokens`` and, optionally, ``phasekv`` (its request parameters) and
        ``salt``.
        """
        from vllm import SamplingParams

        inputs, parameters = [], []
        for prompt in prompts:
            item: dict[str, Any] = {"prompt_token_ids": prompt["tokens"]}
            if "salt" in prompt:
                item["cache_salt"] = prompt["salt"]
            inputs.append(item)
            extra = (
                {"kv_transfer_params": {"phasekv": prompt["phasekv"]}}
                if "phasekv" in prompt
                else None
            )
            parameters.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=VOCABULARY,
                    extra_args=extra,
                )
            )
        outputs = self.llm.generate(inputs, parameters, use_tqdm=False)
        return [_answer(output) for output in outputs]

    def one(
        self, tokens: list[int], max_tokens: int = 1, salt: str | None = None, **phasekv: Any
    ) -> Answer:
        """Send one request alone."""
        prompt: dict[str, Any] = {"tokens": tokens}
        if phasekv:
            prompt["phasekv"] = phasekv
        if salt is not None:
            prompt["salt"] = salt
        return self.ask([prompt], max_tokens)[0]

    def store(self, chunk: list[int], before: list[int] = [], **more: Any) -> None:  # noqa: B006
        """Store a chunk, encoded after the tokens ``before``."""
        begin = len(before)
        answer = self.one(
            [*before, *chunk], chunks=[[begin, begin + len(chunk)]], store=True, **more
        )
        assert answer.report is not None
        assert answer.report["chunks_stored"] == 1

    def close(self) -> None:
        """End the engine's processes; a second call does nothing."""
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()

    def metric(self, name: str) -> float:
        """Value of one of the engine's counters; it must keep statistics."""
        (value,) = [metric.value for metric in self.llm.get_metrics() if metric.name == name]
        return value


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    logprobs = torch.full((len(completion.token_ids), VOCABULARY), -torch.inf)
    for row, entries in enumerate(completion.logprobs):
        for token, entry in entries.items():
            logprobs[row, token] = entry.logprob
    report = (output.kv_transfer_params or {}).get("phasekv")
    return Answer(list(completion.token_ids), logprobs, report)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once) and returns the folder of a tiny model: ``model_folder(family, rope)``."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str = "llama", rope: str = "default", **changes: Any) -> Path:
        name = "-".join([family, rope, *(f"{k}={v}" for k, v in sorted(changes.items()))])
        if not (root / name).exists():
            make_model(root / name, family, rope, **changes)
        return root / name

    return folder


@pytest.fixture(scope="module")
def start_engine(model_folder: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    """Starts an engine; the module's engines end with it."""
    engines: list[Engine] = []

    def start(
        family: str = "llama",
        rope: str = "default",
        phasekv: dict[str, Any] | None = {},  # noqa: B006 - never changed; None is plain vLLM
        changes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Engine:
        engine = Engine(model_folder(family, rope, **(changes or {})), phasekv, **settings)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
