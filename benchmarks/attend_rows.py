"""``attend_rows`` beside vLLM's own CPU attention, in one process and in turns.

One layer's attention of a prompt: vLLM's kernel over all rows, ours over all rows and over rows
scattered at several ratios, which vLLM's kernel cannot take in one call. The default shape is
SmolLM2-135M's. Useful floating-point operations are 4 * head_size for each query head and attended
key; bytes are queries, outputs, keys and values moved once. The peak is a float32 matrix product of
torch's, measured between the rounds.

Example: python benchmarks/attend_rows.py --tokens 1024 4096 7168 --ratios 0.3 0.1 0.05
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

PEAK_SIZE = 1536


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention layer and its cache."""

    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    def operations(self, limits: torch.Tensor) -> float:
        """Useful floating-point operations for rows with these key limits."""
        return 4.0 * self.head_size * self.query_heads * float(limits.sum())

    def traffic(self, limits: torch.Tensor) -> int:
        """Bytes of queries, outputs, keys and values, each once."""
        elements = 2 * len(limits) * self.query_heads + 2 * int(limits.max()) * self.kv_heads
        return elements * self.head_size * self.dtype.itemsize


@dataclass
class Contender:
    """Something to time, and the seconds it took."""

    name: str
    run: Callable[[], None]
    tokens: int
    ratio: float
    rows: int
    operations: float
    traffic: int
    seconds: list[float] = field(default_factory=list)

    def time_once(self, clock: Callable[[], float]) -> None:
        """Run once and remember how long it took by ``clock``."""
        start = clock()
        self.run()
        self.seconds.append(clock() - start)

    @property
    def rate(self) -> float:
        """Operations per second at the median."""
        return self.operations / statistics.median(self.seconds)


class Prompt:
    """Queries of a prompt and its keys and values in a paged cache, the blocks in random order."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        generator = torch.Generator().manual_seed(tokens)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(shape.dtype)

        self.shape = shape
        self.tokens = tokens
        self.layout = _get_attn_isa(shape.dtype, shape.block_size, shape.head_size)
        self.query = random(tokens, shape.query_heads, shape.head_size)
        self.scale = shape.head_size**-0.5
        blocks = -(-tokens // shape.block_size)
        self.block_table = torch.randperm(blocks, generator=generator).to(torch.int32).view(1, -1)
        self.cache = torch.zeros(
            blocks, shape.kv_heads, shape.block_size, 2 * shape.head_size, dtype=shape.dtype
        )
        halves = self.cache.view(blocks, shape.kv_heads, 2 * shape.block_size, -1).chunk(2, dim=2)
        self.key_cache, self.value_cache = halves
        positions = torch.arange(tokens)
        slots = self.block_table[0].long()[positions // shape.block_size] * shape.block_size
        ops.cpu_attn_reshape_and_cache(
            random(tokens, shape.kv_heads, shape.head_size),
            random(tokens, shape.kv_heads, shape.head_size),
            self.key_cache,
            self.value_cache,
            slots + positions % shape.block_size,
            self.layout,
        )

    def vllm(self, out: torch.Tensor) -> Contender:
        """vLLM's kernel over all rows."""
        from vllm import _custom_ops as ops

        starts = torch.tensor([0, self.tokens], dtype=torch.int32)
        lengths = torch.tensor([self.tokens], dtype=torch.int32)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=self.shape.query_heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_size,
            seq_lens=lengths,
            dtype=self.shape.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.layout,
            enable_kv_split=True,
        )

        def run() -> None:
            ops.cpu_attention_with_kv_cache(
                query=self.query,
                key_cache=self.key_cache,
                value_cache=self.value_cache,
                output=out,
                query_start_loc=starts,
                seq_lens=lengths,
                scale=self.scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self.block_table,
                softcap=0.0,
                scheduler_metadata=metadata,
                s_aux=None,
            )

        return self._contender("vllm", run, 1.0, torch.arange(1, self.tokens + 1))

    def attend_rows(self, ratio: float, out: torch.Tensor) -> Contender:
        """Ours over a share of the rows, scattered, the last one among them."""
        from phasekv import _core

        generator = torch.Generator().manual_seed(1)
        chosen = torch.rand(self.tokens, generator=generator) < ratio
        chosen[-1] = True
        rows = torch.nonzero(chosen).flatten()
        limits = rows + 1
        requests = torch.zeros(len(rows), dtype=torch.int32)
        query = self.query[rows].contiguous()
        kv = _core.cpu_paged_kv(self.layout, self.cache)

        def run() -> None:
            _core.attend_rows(
                query=query,
                kv=kv,
                block_table=self.block_table,
                row_requests=requests,
                row_limits=limits,
                scale=self.scale,
                out=out[: len(rows)],
            )

        return self._contender("attend_rows", run, ratio, limits)

    def _contender(
        self, name: str, run: Callable[[], None], ratio: float, limits: torch.Tensor
    ) -> Contender:
        return Contender(
            name,
            run,
            self.tokens,
            ratio,
            len(limits),
            self.shape.operations(limits),
            self.shape.traffic(limits),
        )


def matrix_product() -> Contender:
    """A float32 product that runs near the machine's peak."""
    a = torch.randn(PEAK_SIZE, PEAK_SIZE)
    b = torch.randn(PEAK_SIZE, PEAK_SIZE)
    out = torch.empty(PEAK_SIZE, PEAK_SIZE)

    def run() -> None:
        torch.mm(a, b, out=out)

    return Contender(
        "torch.mm", run, PEAK_SIZE, 1.0, PEAK_SIZE, 2.0 * PEAK_SIZE**3, 3 * 4 * PEAK_SIZE**2
    )


def measure(
    shape: Shape, tokens: int, ratios: list[float], rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """Time all contenders of one prompt in turns.

    Returns
    -------
    list of dict
        A row for each; times in seconds, rates in FLOP/s, ``share`` of the matrix product's rate.
    """
    prompt = Prompt(shape, tokens)
    theirs, ours = torch.empty_like(prompt.query), torch.empty_like(prompt.query)
    vllm, exact = prompt.vllm(theirs), prompt.attend_rows(1.0, ours)
    vllm.run()
    exact.run()
    difference = float((theirs.float() - ours.float()).abs().max())
    scratch = torch.empty_like(ours)
    contenders = [matrix_product(), vllm, exact]
    contenders += [prompt.attend_rows(ratio, scratch) for ratio in ratios if ratio < 1.0]
    for contender in contenders:
        contender.run()
    for _ in range(rounds):
        for contender in contenders:
            contender.time_once(clock)

    peak = contenders[0].rate
    rows = []
    for contender in contenders:
        low, _, high = statistics.quantiles(contender.seconds, n=4)
        rows.append(
            {
                "name": contender.name,
                "tokens": contender.tokens,
                "ratio": contender.ratio,
                "rows": contender.rows,
                "operations": contender.operations,
                "bytes": contender.traffic,
                "seconds": statistics.median(contender.seconds),
                "seconds_quartiles": [low, high],
                "gflops": contender.rate / 1e9,
                "share": contender.rate / peak,
                "speedup_over_vllm": contender.rate / vllm.rate,
                "max_difference_from_vllm": difference if contender is exact else None,
            }
        )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    print(
        f"{'':12} {'tokens':>6} {'ratio':>5} {'rows':>5} {'GFLOP':>8} {'MB':>6} "
        f"{'ms':>8} {'quartiles':>17} {'GFLOP/s':>8} {'of peak':>7} {'x vllm':>6}"
    )
    for row in rows:
        low, high = row["seconds_quartiles"]
        print(
            f"{row['name']:12} {row['tokens']:6} {row['ratio']:5.2f} {row['rows']:5} "
            f"{row['operations'] / 1e9:8.3f} {row['bytes'] / 1e6:6.1f} {1e3 * row['seconds']:8.2f} "
            f"{1e3 * low:8.2f} {1e3 * high:8.2f} {row['gflops']:8.1f} {row['share']:7.2f} "
            f"{row['speedup_over_vllm']:6.2f}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 7168])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.3, 0.1, 0.05])
    parser.add_argument("--query-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, and its processor time: steady on a machine that others use too",
    )
    default = Path(__file__).parent / "results" / "attend_rows.json"
    parser.add_argument("--json", type=Path, default=default)
    arguments = parser.parse_args()

    from vllm.platforms import current_platform

    from phasekv.evaluation.machine import describe_machine

    current_platform.import_kernels()
    clock = time.perf_counter
    if arguments.cpu_time:
        torch.set_num_threads(1)
        clock = time.process_time
    shape = Shape(
        arguments.query_heads,
        arguments.kv_heads,
        arguments.head_size,
        arguments.block_size,
        getattr(torch, arguments.dtype),
    )
    rows = []
    for tokens in arguments.tokens:
        measured = measure(shape, tokens, arguments.ratios, arguments.rounds, clock)
        print_rows(measured)
        rows += measured
    result = {
        "machine": describe_machine(),
        "shape": {
            "query_heads": shape.query_heads,
            "kv_heads": shape.kv_heads,
            "head_size": shape.head_size,
            "block_size": shape.block_size,
            "dtype": arguments.dtype,
        },
        "threads": torch.get_num_threads(),
        "clock": "processor time" if arguments.cpu_time else "wall time",
        "rounds": arguments.rounds,
        "rows": rows,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
