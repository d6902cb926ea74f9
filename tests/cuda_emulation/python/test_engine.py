"""A whole engine whose every op of ours runs on the emulated device answers as one on the CPU."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm")

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from emulated_engine import on_emulated_device, waits_of_layers
from tiny_models import VOCABULARY, make_model, random_tokens
from vllm.distributed.kv_transfer import get_kv_transfer_group

from phasekv import _core
from phasekv.reuse.stream import current_stream
from phasekv.vllm import active, worker

BUDGET, STRIDE, BLOCK, CHUNK = 64, 32, 32, 96
NOTES = [random_tokens(count, 50 + count) for count in (40, 27, 33)]
POLICIES = ["agentkv", "expected_attention", "function", "h2o"]
METHODS = [
    {"method": "agentkvshift", "ratio": 0.3},
    {"method": "agentkvshift", "ratio": 0.2, "frame": "unrotated", "weight": "one"},
    {"method": "cacheblend", "ratio": 0.3},
    {"method": "epic", "ratio": 0.2},
    {"method": "full_reuse"},
    {"method": "phaseshift", "ratio": 0.2},
]


@dataclass(frozen=True)
class Request:
    """A prompt, how many tokens answer it, and PhaseKV's parameters."""

    prompt: list[int]
    answer: int
    phasekv: dict[str, Any]


@dataclass
class Answer:
    """One request's outcome; ``logprobs`` is float32 [output tokens, vocabulary]."""

    tokens: list[int]
    logprobs: torch.Tensor
    report: dict[str, Any]


@dataclass
class Held:
    """What a request holds after an event: per layer, positions, keys and values."""

    positions: list[torch.Tensor]
    rows: list[torch.Tensor]


class HeldKeys:
    """Looks at the cache after each event."""

    def __init__(self) -> None:
        self.seen: list[Held] = []

    def layer(self, *_: Any) -> None:
        """Nothing: keys have not been moved yet."""

    def step_ended(self, row: Any, positions: list[torch.Tensor]) -> None:
        first = row.request.window.start(row.end)
        if first == row.first_held:
            return
        worker = active.evictions()
        slots = worker._held_slots(worker._block_table[row.index].cpu(), first, row.end)
        parts = [part for _, kv in worker._layers.values() for part in (kv.key, kv.value)]
        rows = []
        for part in parts:
            out = torch.empty(len(slots), part.num_heads, part.head_size, device=slots.device)
            stream = current_stream(slots.device)
            _core.gather_blocks(blocks=part, slots=slots, out=out, stream=stream)
            rows.append(out.cpu())
        self.seen.append(Held(positions, rows))


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "eviction": {
                "budget": 384,
                "stride": STRIDE,
                "function": "python_policies:as_queries_say",
            }
        }
        self.llm: Any = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            block_size=BLOCK,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            enable_prefix_caching=False,
            disable_log_stats=True,
            max_logprobs=VOCABULARY,
            num_gpu_blocks_override=64,
            additional_config={"phasekv": settings},
        )
        self._held = HeldKeys()
        self._watch()

    def _watch(self) -> None:
        worker: Any = active.evictions()
        worker.observer = self._held
        self.device = next(iter(worker._layers.values()))[1].device

    def quantise_store(self, bits: int) -> None:
        """Go on with another store: the worker is made anew, as it is when the cache is made."""
        config = self.llm.llm_engine.vllm_config
        config.additional_config["phasekv"]["chunk_store_bits"] = bits
        layers = config.compilation_config.static_forward_context
        get_kv_transfer_group().register_kv_caches(
            {name: layer.kv_cache for name, layer in layers.items()}
        )
        self._watch()

    def ask(self, requests: list[Request]) -> list[Answer]:
        """Send requests together."""
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": request.prompt} for request in requests],
            [
                SamplingParams(
                    temperature=0,
                    max_tokens=request.answer,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=VOCABULARY,
                    extra_args={"kv_transfer_params": {"phasekv": request.phasekv}},
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [_answer(output) for output in outputs]

    def take_held(self) -> list[Held]:
        """What was held after the events since the last call."""
        seen, self._held.seen = self._held.seen, []
        return seen

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    logprobs = torch.full((len(completion.token_ids), VOCABULARY), -torch.inf)
    for row, entries in enumerate(completion.logprobs):
        for token, entry in entries.items():
            logprobs[row, token] = entry.logprob
    return Answer(list(completion.token_ids), logprobs, output.kv_transfer_params["phasekv"])


def eviction(policy: str) -> dict[str, Any]:
    return {"eviction": {"policy": policy, "budget": BUDGET}}


def storing() -> dict[str, list[Request]]:
    """Each note, after a beginning of a length of its own."""
    sent = {}
    for index, note in enumerate(NOTES):
        before = random_tokens(7 * index, 3)
        ranges = [[len(before), len(before) + len(note)]]
        sent[f"store {index}"] = [Request(before + note, 1, {"chunks": ranges, "store": True})]
    return sent


def reusing(methods: list[dict[str, Any]]) -> dict[str, list[Request]]:
    """The notes in another order than they were stored in, in two steps."""
    tokens, ranges = random_tokens(9, 1), []
    for index in (2, 0, 1):
        ranges.append([len(tokens), len(tokens) + len(NOTES[index])])
        tokens = tokens + NOTES[index]
    tokens = tokens + random_tokens(11, 2)
    return {
        " ".join(map(str, ("reuse", *method.values()))): [
            Request(tokens, 3, {"chunks": ranges, **method})
        ]
        for method in methods
    }


def reusing_whole_steps() -> dict[str, list[Request]]:
    """A prompt whose second step has nothing but cached tokens."""
    tokens, ranges = random_tokens(9, 1), []
    for note in (*NOTES, *NOTES):
        ranges.append([len(tokens), len(tokens) + len(note)])
        tokens = tokens + note
    tokens = tokens + random_tokens(11, 2)
    return {
        f"whole step {method}": [
            Request(tokens, 3, {"chunks": ranges, "method": method, "ratio": 0.0})
        ]
        for method in ("agentkvshift", "full_reuse")
    }


def evicting() -> dict[str, list[Request]]:
    """Alone and together with others, in one turn and in two."""
    session = {"session": "mine", **eviction("agentkv")}
    one_note = [[5, 5 + len(NOTES[0])]]
    with_note = random_tokens(5, 5) + NOTES[0] + random_tokens(60, 6)
    return {
        **{
            f"evict {policy}": [Request(random_tokens(120, 4), 12, eviction(policy))]
            for policy in POLICIES
        },
        "reuse and evict": [Request(with_note, 30, {"chunks": one_note, **eviction("agentkv")})],
        "together": [
            Request(random_tokens(60, 7), 40, eviction("h2o")),
            Request(with_note, 8, {"chunks": one_note, "method": "phaseshift"}),
            Request(random_tokens(70, 8), 40, eviction("agentkv")),
        ],
        "first turn": [Request(random_tokens(100, 9), 8, session)],
        "second turn": [Request(random_tokens(50, 10), 8, {"append": True, **session})],
    }


EXACT = {**storing(), **reusing(METHODS), **reusing_whole_steps(), **evicting()}
QUANTISED = {
    f"quantised {name}": requests
    for name, requests in {**storing(), **reusing(METHODS[:1])}.items()
}


class Outcome(NamedTuple):
    """Of one scenario: the answers, and what was held after each event."""

    answers: list[Answer]
    held: list[Held]


class Comparison(NamedTuple):
    """The same scenarios on the CPU and on the device."""

    cpu: dict[str, Outcome]
    device: dict[str, Outcome]


def compare(model: Path) -> Comparison:
    """Send the same to an engine on the CPU and to one whose cache is on the device."""
    found = []
    for place, device in ((nullcontext(), "cpu"), (on_emulated_device(), "cuda:0")):
        with place, pytest.MonkeyPatch.context() as patch:
            if device == "cpu":  # as on the device, where this is what is tested
                patch.setattr(worker, "layers_take_no_rows", lambda _: False)
            engine = Engine(model)
            assert engine.device == device
            outcomes = {}
            try:
                for name, requests in EXACT.items():
                    outcomes[name] = Outcome(engine.ask(requests), engine.take_held())
                engine.quantise_store(bits=4)
                for name, requests in QUANTISED.items():
                    outcomes[name] = Outcome(engine.ask(requests), engine.take_held())
            finally:
                engine.close()
            found.append(outcomes)
    return Comparison(*found)


def assert_same(comparison: Comparison, name: str) -> None:
    expected, got = comparison.cpu[name], comparison.device[name]
    for one, other in zip(expected.answers, got.answers, strict=True):
        assert other.tokens == one.tokens
        torch.testing.assert_close(other.logprobs, one.logprobs, rtol=0, atol=2e-4)
        assert other.report == one.report
    for one, other in zip(expected.held, got.held, strict=True):
        assert all(map(torch.equal, other.positions, one.positions))
        for held_rows, rows in zip(other.rows, one.rows, strict=True):
            torch.testing.assert_close(held_rows, rows, rtol=0, atol=2e-4)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(make_model(tmp_path_factory.mktemp("model") / "tiny", "llama"))


@pytest.mark.parametrize("name", [*EXACT, *QUANTISED])
def test_an_engine_on_the_device_answers_as_one_on_the_cpu(
    comparison: Comparison, name: str
) -> None:
    assert_same(comparison, name)


def test_the_scenarios_store_and_reuse_and_evict(comparison: Comparison) -> None:
    """What was compared above is what it is meant to be."""
    for name, outcome in comparison.cpu.items():
        report = outcome.answers[0].report
        if "store" in name:
            assert report["chunks_stored"] == 1
        if "whole step" in name:
            assert report["probes"] == 1
        elif "reuse" in name:
            assert report["tokens_found"] > 0
            assert (report["probes"] > 0) == ("full_reuse" not in name)
        if "evict" in name or name in ("together", "second turn"):
            assert report["eviction"]["compactions"] > 0
            assert outcome.held
    assert comparison.cpu["second turn"].answers[0].report["session"]["resumed_tokens"] == 107
    exact, quantised = (
        comparison.cpu[f"{prefix}reuse agentkvshift 0.3"].answers[0].logprobs
        for prefix in ("", "quantised ")
    )
    assert not torch.allclose(exact, quantised, atol=1e-2)


def test_no_layer_above_the_check_layer_asks_the_device(comparison: Comparison) -> None:
    """Reuse asks at the check layer what was computed, and once after it which rows are left."""
    *lower, last = (waits_of_layers[name] for name in sorted(waits_of_layers))
    assert len(lower) == 3
    assert lower[1]["tolist"] > 0
    assert not last
