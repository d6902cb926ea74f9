"""Time to first token in transformers: ``generate`` on its own divided by a prefill with reuse.

One process, one model, in turns: a round asks transformers once, with its own attention, and then
every setting, and a speedup is the ratio within a round. Prompts are random tokens: chunks of 200,
which were encoded alone, and a question of 32. Both sides end with ``generate`` for one new token.

Example: python benchmarks/transformers_prefill.py --tokens 1024 4096 --json out.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from phasekv.evaluation.machine import describe_machine
from phasekv.model_conversion import default_model_directory
from phasekv.transformers import ChunkMemory

CHUNK_TOKENS, QUESTION_TOKENS = 200, 32
METHODS = ("full_reuse", "cacheblend", "epic", "agentkvshift", "phaseshift")


def parts_of(memory: ChunkMemory, tokens: int, vocabulary: int) -> list[Any]:
    """Encoded chunks of random tokens, and a question."""
    draw = random.Random(tokens)
    left = tokens - QUESTION_TOKENS
    parts: list[Any] = []
    while left > 0:
        count = min(CHUNK_TOKENS, left)
        parts.append(memory.encode([draw.randrange(100, vocabulary) for _ in range(count)]))
        left -= count
    return [*parts, [draw.randrange(100, vocabulary) for _ in range(QUESTION_TOKENS)]]


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall clock."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def measure(memory: ChunkMemory, model: Any, tokens: int, arguments: Any) -> list[dict[str, Any]]:
    """Rows of one prompt length."""
    parts = parts_of(memory, tokens, model.config.vocab_size)
    ids: list[int] = []
    for part in parts:
        ids += part if isinstance(part, list) else list(part.tokens)
    prompt = torch.tensor([ids])
    settings = [
        (method, ratio)
        for method in METHODS
        for ratio in (arguments.ratios if method != "full_reuse" else [0.0])
    ]
    plain: list[float] = []
    times: dict[tuple[str, float], list[float]] = {setting: [] for setting in settings}
    reports: dict[tuple[str, float], dict[str, Any]] = {}

    def first_token(**inputs: Any) -> Any:
        return model.generate(**inputs, max_new_tokens=1, do_sample=False)

    for turn in range(arguments.rounds + 1):
        seconds, _ = seconds_of(
            lambda: first_token(input_ids=prompt, attention_mask=torch.ones_like(prompt))
        )
        plain.append(seconds)
        for setting in settings:
            method, ratio = setting

            def reuse(method: str = method, ratio: float = ratio) -> dict[str, Any]:
                prefill = memory.prefill(parts, method=method, recompute_ratio=ratio)
                first_token(**prefill.inputs)
                return prefill.report

            seconds, reports[setting] = seconds_of(reuse)
            times[setting].append(seconds)
        print(f"{tokens} tokens, round {turn}: transformers {plain[-1]:.2f} s", flush=True)
    rows = []
    for method, ratio in settings:
        # The first round warms up.
        pairs = list(zip(plain, times[method, ratio], strict=True))[1:]
        speedups = [before / after for before, after in pairs]
        rows.append(
            {
                "method": method,
                "tokens": tokens,
                "ratio": ratio,
                "charged_ratio": reports[method, ratio]["charged_ratio"],
                "speedup": statistics.median(speedups),
                "speedup_spread": [min(speedups), max(speedups)],
                "seconds": statistics.median(after for _, after in pairs),
                "transformers_seconds": statistics.median(before for before, _ in pairs),
            }
        )
        print(
            f"{method:14} {tokens:5} tokens  r = {ratio:<4g}"
            f"  charged {rows[-1]['charged_ratio']:.3f}  {rows[-1]['seconds']:.2f} s"
            f"  {rows[-1]['speedup']:.2f} times ({min(speedups):.2f} to {max(speedups):.2f})",
            flush=True,
        )
    return rows


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(default_model_directory()))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.1, 0.3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    memory = ChunkMemory(model, None)
    rows = [row for tokens in arguments.tokens for row in measure(memory, model, tokens, arguments)]
    if arguments.json is not None:
        result = {
            "machine": describe_machine(),
            "threads": torch.get_num_threads(),
            "model": Path(arguments.model).name,
            "attention": model.config._attn_implementation,
            "rounds": arguments.rounds,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
