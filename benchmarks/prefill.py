"""Time to first token of prompts made of reused chunks: plain vLLM divided by PhaseKV, in one run.

Two engines with the same settings run side by side, each in its own EngineCore process: plain vLLM
without PhaseKV, and vLLM with it. Each round asks plain vLLM once and then every setting, and a
speedup is the ratio within a round: a slow moment of the machine hits both. Chunks are encoded
alone, stored, and reused in a prompt of ``tokens`` tokens that ends in a question of 32 tokens.

The bound is what counting floating-point operations allows: plain prefill over the rows that a
method recomputes, linear layers and attention together. It assumes probes are spread evenly over
the prompt. A share above 1 means that our attention is faster than vLLM's own.

Example: python benchmarks/prefill.py --tokens 1024 4096 --ratios 0.05 0.1 0.3 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
# Both engines may use all cores, since they never run at the same time; bound to cores they would
# share them out unequally.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

CHUNK_TOKENS = 200
QUESTION_TOKENS = 32
SLACK_TOKENS = 64


@dataclass
class Shape:
    """Sizes of the model that floating-point operations depend on."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """From a Hugging Face folder."""
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            query_heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
        )

    @property
    def projections(self) -> float:
        """Operations of one row's query, key and value projections."""
        return 2.0 * self.hidden * (self.query_heads + 2 * self.kv_heads) * self.head_size

    @property
    def rest(self) -> float:
        """Operations of one row's output projection and feed-forward network."""
        return 2.0 * self.hidden * (self.query_heads * self.head_size + 3 * self.intermediate)

    def attention(self, keys: float) -> float:
        """Operations of attention over ``keys`` keys, summed over rows."""
        return 4.0 * self.query_heads * self.head_size * keys

    def plain(self, tokens: int) -> float:
        """Operations of a full prefill."""
        keys = tokens * (tokens + 1) / 2
        layer = tokens * (self.projections + self.rest) + self.attention(keys)
        return self.layers * layer + 2.0 * self.hidden * self.vocabulary

    def reuse(self, tokens: int, cached: int, probes: int, early: bool) -> float:
        """Operations of a prefill in which ``cached`` tokens are reused but for ``probes``."""
        fresh = tokens - cached
        active = fresh + probes
        # Fresh rows are the question at the end and the separators; probes lie anywhere.
        keys = fresh * tokens + probes * tokens / 2
        layer = active * (self.projections + self.rest) + self.attention(keys)
        total = self.layers * layer + 2.0 * self.hidden * self.vocabulary
        if not early:
            all_keys = tokens * (tokens + 1) / 2
            full = tokens * (self.projections + self.rest) + self.attention(all_keys)
            total += full - layer + (tokens - active) * self.projections
        return total


def prompt_of(tokens: int, vocabulary: int, seed: int) -> tuple[list[int], list[list[int]]]:
    """Random token ids and the ranges of their chunks; the last 32 tokens are the question."""
    draw = random.Random(seed)
    ids = [draw.randrange(100, vocabulary) for _ in range(tokens)]
    edges = list(range(0, tokens - QUESTION_TOKENS, CHUNK_TOKENS))
    ranges = [
        [begin, min(begin + CHUNK_TOKENS, tokens - QUESTION_TOKENS)]
        for begin in edges
        if tokens - QUESTION_TOKENS - begin >= 2
    ]
    return ids, ranges


def parameters_of(phasekv: dict[str, Any] | None) -> Any:
    """Sampling parameters of a request for one token, with PhaseKV's own if any."""
    from vllm import SamplingParams

    extra = None if phasekv is None else {"kv_transfer_params": {"phasekv": phasekv}}
    return SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra
    )


def time_to_first_token(llm: Any, ids: list[int], phasekv: dict[str, Any] | None) -> Any:
    """Seconds until the only token asked for is there, and the response's report."""
    parameters = parameters_of(phasekv)
    start = time.perf_counter()
    output = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)[0]
    seconds = time.perf_counter() - start
    return seconds, (output.kv_transfer_params or {}).get("phasekv")


def store_alone(llm: Any, ids: list[int], ranges: list[list[int]]) -> None:
    """Encode each chunk alone and store it."""
    prompts = [{"prompt_token_ids": ids[begin:end]} for begin, end in ranges]
    parameters = [
        parameters_of({"chunks": [[0, end - begin]], "store": True}) for begin, end in ranges
    ]
    llm.generate(prompts, parameters, use_tqdm=False)


def spread(values: list[float]) -> dict[str, float]:
    """Median and range of a list."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 7168])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.1, 0.3])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["phaseshift", "agentkvshift", "cacheblend", "epic", "full_reuse"],
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--model", type=Path, default=default_model())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="both engines without torch.compile")
    parser.add_argument(
        "--engines", type=json.loads, default={}, help="JSON: further settings of both engines"
    )
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    result = run(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def default_model() -> Path:
    """Where ``phasekv convert`` puts the demo model."""
    from phasekv.model_conversion import default_model_directory

    return default_model_directory()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All prompt lengths, methods and ratios."""
    from vllm import LLM

    from phasekv.evaluation.machine import describe_machine

    shape = Shape.read(arguments.model)
    longest = max(arguments.tokens)
    settings: dict[str, Any] = {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "max_model_len": longest + SLACK_TOKENS,
        "max_num_batched_tokens": longest + SLACK_TOKENS,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "enforce_eager": arguments.eager,
        **arguments.engines,
    }
    plain = LLM(**settings)
    ours = LLM(**settings, additional_config={"phasekv": {"chunk_store_bytes": 4 << 30}})
    rows = []
    for tokens in arguments.tokens:
        ids, ranges = prompt_of(tokens, shape.vocabulary, seed=tokens)
        store_alone(ours, ids, ranges)
        for engine in (plain, ours):
            time_to_first_token(engine, ids, None)
        wishes = [
            {"chunks": ranges, "method": method, "ratio": ratio}
            for method in arguments.methods
            for ratio in (arguments.ratios if method != "full_reuse" else [0.0])
        ]
        reports = [time_to_first_token(ours, ids, wish)[1] for wish in wishes]
        seconds: list[list[float]] = [[] for _ in wishes]
        exact = []
        for _ in range(arguments.repeat):
            # One round: plain vLLM, then every setting, so that all are paired with it.
            exact.append(time_to_first_token(plain, ids, None)[0])
            for wish, taken in zip(wishes, seconds, strict=True):
                taken.append(time_to_first_token(ours, ids, wish)[0])
        for wish, report, taken in zip(wishes, reports, seconds, strict=True):
            pairs = list(zip(exact, taken, strict=True))
            rows.append(row_of(shape, tokens, wish["method"], wish["ratio"], report, pairs))
            print(describe(rows[-1]), flush=True)
    return {
        "machine": describe_machine(),
        "settings": {k: str(v) for k, v in settings.items()},
        "chunk_tokens": CHUNK_TOKENS,
        "question_tokens": QUESTION_TOKENS,
        "rows": rows,
    }


def row_of(
    shape: Shape,
    tokens: int,
    method: str,
    ratio: float,
    report: dict[str, Any],
    pairs: list[tuple[float, float]],
) -> dict[str, Any]:
    """One setting's line of the JSON; ``pairs`` are (plain, ours) seconds of each round."""
    speedups = [exact / reused for exact, reused in pairs]
    early = method in ("epic", "full_reuse")
    operations = shape.reuse(tokens, report["tokens_found"], report["probes"], early)
    bound = shape.plain(tokens) / operations
    return {
        "method": method,
        "tokens": tokens,
        "ratio": ratio,
        "charged_ratio": report["charged_ratio"],
        "probes": report["probes"],
        "speedup": statistics.median(speedups),
        "speedup_spread": spread(speedups),
        "plain_seconds": spread([exact for exact, _ in pairs]),
        "seconds": spread([reused for _, reused in pairs]),
        "operations_plain": shape.plain(tokens),
        "operations": operations,
        "bound": bound,
        "share": statistics.median(speedups) / bound,
    }


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{row['method']:>14} tokens {row['tokens']:>5} r {row['ratio']:.2f} "
        f"charged {row['charged_ratio']:.3f}  {row['plain_seconds']['median']:6.2f} s -> "
        f"{row['seconds']['median']:5.2f} s  speedup {row['speedup']:5.2f} "
        f"[{row['speedup_spread']['min']:.2f}, {row['speedup_spread']['max']:.2f}]  "
        f"bound {row['bound']:5.2f}  share {row['share']:.2f}"
    )


if __name__ == "__main__":
    main()
