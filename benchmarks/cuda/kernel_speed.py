"""Speed of the CUDA kernels on a device, each against what bounds it and beside torch's own.

The shapes are one layer of Llama 3.1 8B: 8 KV heads, 32 query heads, head size 128, bfloat16,
blocks of 16 tokens. Before every call the L2 cache is overwritten. Moves are measured against a
copy of a gibibyte, products against a large matrix product, both in the same run; times are CUDA
events', without what the host needs for a call. FlashInfer stands beside where it is installed.
What fails is named in its row, and does not stop the others.

Example: python benchmarks/cuda/kernel_speed.py --json kernels.json

``--device cpu`` runs the same calls on the CPU backend, to try the script without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phasekv import _core
from phasekv.evaluation.machine import describe_machine

KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 8, 4, 128, 16
DTYPE = torch.bfloat16
CHUNK, TOKENS_PER_PROBE, BUFFERED_QUERIES = 200, 10, 32
CYCLES_BEFORE_A_CALL = 2_000_000


@dataclass(frozen=True)
class Work:
    """One op on one shape.

    Attributes
    ----------
    bytes, flop : float
        What must be moved, each once, and computed; the larger share of its bound is reported.
    peers : dict
        Other libraries' ways to the same result, by name.
    """

    op: str
    tokens: int
    run: Callable[[], None]
    bytes: float = 0.0
    flop: float = 0.0
    peers: dict[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass
class Timer:
    """Seconds of a call on the device, with a cold L2 cache."""

    device: torch.device
    repetitions: int
    _flushed: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = 256 << 20 if self.device.type == "cuda" else 1 << 20
        self._flushed = torch.empty(size, dtype=torch.uint8, device=self.device)

    def __call__(self, run: Callable[[], Any]) -> list[float]:
        """Times of all repetitions but the first three."""
        times = []
        for _ in range(self.repetitions + 3):
            self._flushed.fill_(1)
            times.append(self._once(run))
        return times[3:]

    def _once(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device waits a millisecond or so: by then the host has asked for all that is timed.
        torch.cuda._sleep(CYCLES_BEFORE_A_CALL)
        begin_event.record()
        run()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event) / 1e3


class Layer:
    """One layer's cache with one request in it, and everything that the ops take."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens, self.device = tokens, device
        blocks = 2 * (-(-tokens // BLOCK_SIZE))
        self.keys = self._random(blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
        self.values = self._random(blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
        self.kv = _core.strided_paged_kv(key=self.keys, value=self.values)
        table = torch.randperm(blocks)[: -(-tokens // BLOCK_SIZE)]
        self.table = table.to(torch.int32).to(device)
        at = torch.arange(tokens)
        self.slots = (table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE).to(device)
        self.order = at.to(device)
        self.rows = self._random(tokens, KV_HEADS, HEAD_SIZE)
        self.more_rows = self._random(tokens, KV_HEADS, HEAD_SIZE)
        self.starts = torch.tensor([*range(0, tokens, CHUNK), tokens]).to(device)
        self.chunks = len(self.starts) - 1
        self.deltas = (torch.arange(self.chunks) * 7 + 1000).to(device)
        self.row_deltas = self.deltas[self.order // CHUNK]
        self.probes = self.order[3::TOKENS_PER_PROBE].contiguous()
        counts = torch.bincount(self.probes // CHUNK, minlength=self.chunks)
        self.probe_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.probe_deltas = self.row_deltas[self.probes]
        self.mean = torch.zeros(self.chunks, KV_HEADS, HEAD_SIZE, device=device)
        self.weights = torch.full((tokens,), 0.5, device=device)
        self.floats = torch.zeros(4, KV_HEADS, tokens, device=device)
        frequencies = _core.rope_frequencies(_core.RopeConfig(theta=5e5, rotary_dim=HEAD_SIZE))
        rope = _core.Rope(frequencies, HEAD_SIZE, "neox")
        self.rope = rope.on(torch.tensor(frequencies, dtype=torch.float64, device=device))
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.current_stream(device).cuda_stream

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(DTYPE)

    def queries(self, count: int) -> torch.Tensor:
        """Random ones, [count, query heads, head size]."""
        return self._random(count, KV_HEADS * GROUP, HEAD_SIZE)

    @property
    def row_bytes(self) -> int:
        """Of one token's keys, or values."""
        return KV_HEADS * HEAD_SIZE * DTYPE.itemsize


def copies(layer: Layer) -> list[Work]:
    """The ops of reuse that move rows."""
    moved = 2.0 * layer.tokens * layer.row_bytes
    flat = layer.keys.transpose(1, 2).reshape(-1, KV_HEADS, HEAD_SIZE)
    stream = layer.stream
    return [
        Work(
            "gather_blocks",
            layer.tokens,
            lambda: _core.gather_blocks(
                blocks=layer.kv.key, slots=layer.slots, out=layer.rows, stream=stream
            ),
            bytes=moved,
            peers={
                "torch.index_select of rows": lambda: torch.index_select(
                    flat, 0, layer.slots, out=layer.more_rows
                )
            },
        ),
        Work(
            "scatter_blocks",
            layer.tokens,
            lambda: _core.scatter_blocks(
                rows=layer.rows, slots=layer.slots, blocks=layer.kv.key, stream=stream
            ),
            bytes=moved,
            peers={
                "torch.index_copy_ of rows": lambda: flat.index_copy_(0, layer.slots, layer.rows)
            },
        ),
        Work(
            "rotate_keys",
            layer.tokens,
            lambda: _core.rotate_keys(
                keys=layer.rows,
                deltas=layer.row_deltas,
                rope=layer.rope,
                out=layer.more_rows,
                stream=stream,
            ),
            bytes=moved,
        ),
        Work(
            "divergence",
            layer.tokens,
            lambda: _core.divergence(
                fresh=layer.rows, cached=layer.more_rows, out=layer.weights, stream=stream
            ),
            bytes=moved,
            peers={
                "torch: subtract, square, sum": lambda: (
                    (layer.rows.float() - layer.more_rows.float()).square().sum((1, 2))
                )
            },
        ),
        Work(
            "mean_residual",
            layer.tokens,
            lambda: _core.mean_residual(
                fresh=layer.rows,
                cached=layer.more_rows,
                fresh_rows=layer.probes,
                cached_rows=layer.probes,
                segment_starts=layer.probe_starts,
                cached_deltas=layer.probe_deltas,
                rope=layer.rope,
                out=layer.mean,
                stream=stream,
            ),
            bytes=2.0 * len(layer.probes) * layer.row_bytes + layer.mean.nbytes,
        ),
        Work(
            "apply_shift",
            layer.tokens,
            lambda: _core.apply_shift(
                cached=layer.rows,
                cached_rows=layer.order,
                slots=layer.slots,
                segment_starts=layer.starts,
                deltas=layer.deltas,
                rope=layer.rope,
                mean=layer.mean,
                weights=layer.weights,
                blocks=layer.kv.key,
                stream=stream,
            ),
            bytes=moved,
        ),
    ]


def attention(layer: Layer, ratio: float) -> Work:
    """attend_rows of a prompt of which only a share of the rows is computed."""
    rows = torch.arange(0, layer.tokens, max(1, round(1 / ratio)), device=layer.device)
    query, out = layer.queries(len(rows)), layer.queries(len(rows))
    requests = torch.zeros(len(rows), dtype=torch.int32, device=layer.device)
    limits, table = rows + 1, layer.table[None]

    def run() -> None:
        _core.attend_rows(
            query=query,
            kv=layer.kv,
            block_table=table,
            row_requests=requests,
            row_limits=limits,
            scale=HEAD_SIZE**-0.5,
            out=out,
            stream=layer.stream,
        )

    return Work(
        f"attend_rows ratio {ratio:g}",
        layer.tokens,
        run,
        bytes=2.0 * layer.tokens * layer.row_bytes + 2.0 * len(rows) * GROUP * layer.row_bytes,
        flop=4.0 * HEAD_SIZE * KV_HEADS * GROUP * float(limits.sum()),
        peers=dense_attention(layer) if ratio == 1.0 else {},
    )


def dense_attention(layer: Layer) -> dict[str, Callable[[], Any]]:
    """Causal attention of all rows, with keys and values that lie in a row."""
    query = layer.queries(layer.tokens)
    keys, values = layer.rows, layer.more_rows
    batch = [rows.transpose(0, 1)[None].contiguous() for rows in (query, keys, values)]
    peers: dict[str, Callable[[], Any]] = {
        "torch SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(
            *batch, is_causal=True, enable_gqa=True
        )
    }
    if layer.device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        import flashinfer

        peers["FlashInfer"] = lambda: flashinfer.single_prefill_with_kv_cache(
            query, keys, values, causal=True
        )
    return peers


def scores(layer: Layer) -> list[Work]:
    """The ops of eviction that read every key."""
    few, many = layer.queries(BUFFERED_QUERIES), layer.queries(128)
    limits = torch.arange(layer.tokens - 128, layer.tokens, device=layer.device) + 1
    phases = (torch.arange(128, device=layer.device) // 32).to(torch.int32)
    keys = layer.tokens * layer.row_bytes
    heads = KV_HEADS * GROUP
    synthetic = few[0].float()
    norms = torch.ones(heads, HEAD_SIZE // 2, device=layer.device)
    place = {
        "block_table": layer.table,
        "first_token": 0,
        "tokens": layer.tokens,
        "stream": layer.stream,
    }
    request = {"key": layer.kv.key, **place}
    return [
        Work(
            "score_keys",
            layer.tokens,
            lambda: _core.score_keys(
                query=few, scale=HEAD_SIZE**-0.5, scores=layer.floats[0], **request
            ),
            bytes=keys + layer.floats[0].nbytes,
            flop=2.0 * BUFFERED_QUERIES * heads * layer.tokens * HEAD_SIZE,
        ),
        Work(
            "accumulate_attention",
            layer.tokens,
            lambda: _core.accumulate_attention(
                query=many,
                query_limits=limits,
                query_phases=phases,
                scale=HEAD_SIZE**-0.5,
                sums=layer.floats,
                **request,
            ),
            bytes=keys + 2 * layer.floats.nbytes,
            flop=2.0 * 128 * heads * layer.tokens * HEAD_SIZE,
        ),
        Work(
            "triattention_score",
            layer.tokens,
            lambda: _core.triattention_score(
                synthetic_query=synthetic,
                norm_weights=norms,
                scores=layer.floats[0],
                **request,
            ),
            bytes=keys + layer.floats[0].nbytes,
        ),
        Work(
            "key_redundancy",
            layer.tokens,
            lambda: _core.key_redundancy(redundancy=layer.floats[0], **request),
            bytes=keys + layer.floats[0].nbytes,
            flop=2.0 * KV_HEADS * layer.tokens**2 * HEAD_SIZE,
        ),
        Work(
            "keydiff_score",
            layer.tokens,
            lambda: _core.keydiff_score(scores=layer.floats[0], **request),
            bytes=keys + layer.floats[0].nbytes,
            flop=4.0 * KV_HEADS * layer.tokens * HEAD_SIZE,
        ),
        Work(
            "expected_attention_score",
            layer.tokens,
            lambda: _core.expected_attention_score(
                query=many,
                query_positions=layer.order[-128:],
                kv=layer.kv,
                rope=layer.rope,
                next_position=layer.tokens,
                scale=HEAD_SIZE**-0.5,
                scores=layer.floats[0],
                **place,
            ),
            bytes=2 * keys + layer.floats[0].nbytes,
            # Of the covariances, half of each, with every key.
            flop=1.0 * heads * layer.tokens * HEAD_SIZE**2,
        ),
    ]


def bounds(device: torch.device, timer: Timer) -> tuple[float, float]:
    """Bytes a second of a copy, both ways counted, and FLOP/s of a matrix product."""
    size = 1 << 30 if device.type == "cuda" else 1 << 24
    # No zeros: they are moved faster.
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / statistics.median(timer(lambda: target.copy_(source)))
    edge = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(edge, edge, device=device).to(DTYPE) for _ in range(2))
    product = 2.0 * edge**3 / statistics.median(timer(lambda: left @ right))
    return copied, product


def measure(work: Work, timer: Timer, copied: float, product: float) -> dict[str, Any]:
    """One row of the result."""
    seconds = timer(work.run)
    median = statistics.median(seconds)
    ordered = sorted(seconds)
    least = max(work.bytes / copied, work.flop / product)
    row: dict[str, Any] = {
        "op": work.op,
        "tokens": work.tokens,
        "microseconds": 1e6 * median,
        "microseconds_spread": [
            1e6 * ordered[len(ordered) // 10],
            1e6 * ordered[-1 - len(ordered) // 10],
        ],
        "bytes": work.bytes,
        "flop": work.flop,
        "gigabytes_per_s": work.bytes / median / 1e9,
        "teraflop_per_s": work.flop / median / 1e12,
        "bound": "copy" if work.bytes / copied >= work.flop / product else "matrix product",
        "share": least / median,
    }
    row["peer_microseconds"], row["peer_errors"] = {}, {}
    for name, run in work.peers.items():
        try:
            row["peer_microseconds"][name] = 1e6 * statistics.median(timer(run))
        except Exception as error:  # another library's, which may need what is not there
            row["peer_errors"][name] = str(error)
    return row


def describe(row: dict[str, Any]) -> str:
    """One line of the table."""
    line = f"{row['op']:24} {row['tokens']:6} tokens"
    if "error" in row:
        return f"{line}  failed: {row['error']}"
    peers = "".join(f"  {name} {us:.1f} us" for name, us in row["peer_microseconds"].items())
    failed = "".join(f"  {name} failed: {error}" for name, error in row["peer_errors"].items())
    return (
        f"{line}  {row['microseconds']:9.1f} us"
        f"  {row['share']:5.0%} of a {row['bound']}{peers}{failed}"
    )


def measure_all(
    tokens: int, device: torch.device, timer: Timer, copied: float, product: float
) -> Iterator[dict[str, Any]]:
    """A row for each op, also for one that fails."""
    layer = Layer(tokens, device)
    for work in [*copies(layer), *(attention(layer, r) for r in (1.0, 0.1)), *scores(layer)]:
        try:
            yield measure(work, timer, copied, product)
        except Exception as error:
            yield {"op": work.op, "tokens": tokens, "error": str(error)}


def main() -> int:
    """Runs everything; 0 if no op has failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    timer = Timer(device, arguments.repetitions)
    copied, product = bounds(device, timer)
    machine = describe_machine()
    if device.type == "cuda":
        machine["device"] = torch.cuda.get_device_name(device)
    print(f"copy {copied / 1e9:.0f} GB/s, matrix product {product / 1e12:.2f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    result = {
        "machine": machine,
        "copy_bytes_per_s": copied,
        "matrix_product_flop_per_s": product,
        "rows": rows,
    }
    for tokens in arguments.tokens:
        for row in measure_all(tokens, device, timer, copied, product):
            rows.append(row)
            print(describe(row), flush=True)
            # Anew for each row: nobody knows how long the device is there.
            if arguments.json is not None:
                text = json.dumps(result, indent=2)
                arguments.json.write_text(text + "\n", encoding="utf-8")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
