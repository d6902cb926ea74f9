"""Our eviction policies beside kvpress's: the same survivors from the same tensors, and the time.

Runs in the environment that ``make peers`` makes, with kvpress and the transformers it wants, and
torch from ours. Both compress one prompt of the demo model in one process and in turns.

* Survivors: each press scores the keys, values and hidden states of its own prefill; our evictor is
  given the same keys, values and queries. Compared are the keys of every layer and KV head that
  stay.
* Time: wall clock around the whole call, and around what each does besides the forward pass: the
  press's hook on the attention layers; the evictor's calls and the blocks it gives back. Tokens are
  counted as they enter the embedding.

Example: .venv-peers/bin/python benchmarks/peers.py times --json benchmarks/results/peers_times.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from phasekv import _core
from phasekv.evaluation.machine import describe_machine
from phasekv.eviction.settings import OPTIONS
from phasekv.model_conversion import ensure_demo_model
from phasekv.transformers import evict
from phasekv.transformers.models import shape_of
from phasekv.transformers.paged_blocks import PagedBlocks
from phasekv.transformers.rotation import rope_of_model

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE, STRIDE = 16, 128


@dataclass(frozen=True)
class Method:
    """A policy of ours, the press that corresponds to it, and whether all queries are buffered."""

    policy: str
    press: Callable[[float], Any]
    all_queries: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.policy}, queries = tokens" if self.all_queries else self.policy

    def options(self, tokens: int) -> dict[str, int]:
        """Of our policy, for a prompt of ``tokens``."""
        return {"queries": tokens} if self.all_queries else {}


UNIFORM = [
    Method("streaming_llm", lambda ratio: kvpress.StreamingLLMPress(ratio)),
    Method("snapkv", lambda ratio: kvpress.SnapKVPress(ratio)),
    Method("keydiff", lambda ratio: kvpress.KeyDiffPress(ratio)),
    Method("expected_attention", lambda ratio: kvpress.ExpectedAttentionPress(ratio)),
    Method("expected_attention", lambda ratio: kvpress.ExpectedAttentionPress(ratio), True),
]
RAGGED = [
    Method("adakv", lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio))),
    Method("pyramidkv", lambda ratio: kvpress.PyramidKVPress(ratio)),
]


@dataclass
class Timer:
    """Seconds of the calls that it was put around."""

    seconds: float = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``owner.name`` is ``make`` of itself in this context."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass
class Run:
    """One compressed prefill."""

    seconds: float
    compressing: float
    tokens: int
    cache_bytes: int


@dataclass
class Series:
    """All runs of one side."""

    runs: list[Run] = field(default_factory=list)

    def median(self, name: str) -> float:
        """Of a field over the runs."""
        return statistics.median(getattr(run, name) for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        """Medians, and how the time in compression spread."""
        compressing = sorted(run.compressing for run in self.runs)
        return {
            "seconds": self.median("seconds"),
            "compressing_seconds": self.median("compressing"),
            "compressing_range": [compressing[0], compressing[-1]],
            "tokens_forwarded": self.runs[0].tokens,
            "cache_bytes": self.runs[0].cache_bytes,
        }


class Bench:
    """The demo model and a prompt."""

    def __init__(self) -> None:
        folder = ensure_demo_model()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        self.shape = shape_of(self.model)
        self.rope = rope_of_model(self.model, self.shape)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
        self.tokens = tokenizer.encode("\n".join(pages), add_special_tokens=False)
        self._forwarded = 0
        self.model.model.embed_tokens.register_forward_pre_hook(self._count)

    def _count(self, _module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        self._forwarded += arguments[0].numel()

    def prompt(self, tokens: int) -> torch.Tensor:
        """int64 [1, tokens]."""
        return torch.tensor([self.tokens[:tokens]])

    @torch.no_grad()
    def theirs(self, press: Any, tokens: int) -> Run:
        """A prefill under a press."""
        timer, prompt, cache = Timer(), self.prompt(tokens), DynamicCache()
        self._forwarded = 0
        with replaced(type(press), "forward_hook", timer.around):
            begin = time.perf_counter()
            with press(self.model):
                self.model(prompt, past_key_values=cache, logits_to_keep=1)
            seconds = time.perf_counter() - begin
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return Run(seconds, timer.seconds, self._forwarded, held)

    @torch.no_grad()
    def ours(self, method: Method, budget: int, tokens: int) -> Run:
        """A prefill under our policy."""
        timer, prompt = Timer(), self.prompt(tokens)
        kind = _core.RaggedEvictor if method in RAGGED else _core.Evictor
        self._forwarded = 0
        with (
            replaced(kind, "layer", timer.around),
            replaced(kind, "finish", timer.around),
            replaced(PagedBlocks, "release", timer.around),
        ):
            begin = time.perf_counter()
            with evict(
                self.model,
                policy=method.policy,
                budget=budget,
                stride=STRIDE,
                **method.options(tokens),
            ) as eviction:
                self.model(prompt, logits_to_keep=1)
            seconds = time.perf_counter() - begin
        assert eviction.cache is not None
        assert eviction.cache.reports[0]["tokens_kept"] == budget
        return Run(seconds, timer.seconds, self._forwarded, eviction.cache.kv_nbytes)

    def formula_bytes(self, budget: int) -> int:
        """What ``budget`` keys and values of every layer and KV head take."""
        per_head = 2 * self.shape.head_size * self.shape.dtype.itemsize
        return self.shape.layers * self.shape.kv_heads * budget * per_head

    def time(self, method: Method, ratio: float, tokens: int, rounds: int) -> dict[str, Any]:
        """Both sides in turns."""
        budget = int(tokens * (1 - ratio))
        theirs, ours = Series(), Series()
        for _ in range(rounds):
            theirs.runs.append(self.theirs(method.press(ratio), tokens))
            ours.runs.append(self.ours(method, budget, tokens))
        shares = [
            mine.compressing / other.compressing
            for mine, other in zip(ours.runs, theirs.runs, strict=True)
        ]
        return {
            "method": method.name,
            "ratio": ratio,
            "tokens": tokens,
            "budget": budget,
            "ours": ours.as_json(),
            "kvpress": theirs.as_json(),
            "time_share": statistics.median(shares),
            "time_share_range": [min(shares), max(shares)],
            "formula_bytes": self.formula_bytes(budget),
        }

    @torch.no_grad()
    def survivors(self, method: Method, ratio: float, tokens: int) -> dict[str, Any]:
        """Which keys stay, of the tensors that the press saw."""
        press, seen = method.press(ratio), []

        def remember(score: Callable[..., Any]) -> Callable[..., Any]:
            def scored(module: Any, hidden: Any, keys: Any, values: Any, *rest: Any) -> Any:
                scores = score(module, hidden, keys, values, *rest)
                query = _rotated_queries(module, hidden, rest[-1]["position_embeddings"])
                seen.append((query, keys[0], values[0], scores[0]))
                return scores

            return scored

        with replaced(press, "score", remember), press(self.model):
            self.model(self.prompt(tokens), past_key_values=DynamicCache(), logits_to_keep=1)
        budget = int(tokens * (1 - ratio))
        kept = self._our_survivors(method, budget, tokens, seen)
        overlaps, gaps = [], []
        for (_, _, _, scores), mine in zip(seen, kept, strict=True):
            for row, positions in zip(scores, mine, strict=True):
                best = row.topk(budget)
                ours_only = positions[~torch.isin(positions, best.indices)]
                overlaps.append(1 - len(ours_only) / budget)
                if len(ours_only):
                    spread = best.values[budget // 2] - best.values[-1]
                    gaps.append(float((best.values[-1] - row[ours_only].min()) / spread))
        return {
            "method": method.name,
            "ratio": ratio,
            "tokens": tokens,
            "mean_overlap": statistics.mean(overlaps),
            "least_overlap": min(overlaps),
            "keys_that_differ": round(sum((1 - overlap) * budget for overlap in overlaps)),
            "keys": budget * len(overlaps),
            "largest_gap": max(gaps, default=0.0),
        }

    def _our_survivors(
        self, method: Method, budget: int, tokens: int, layers: list[tuple[torch.Tensor, ...]]
    ) -> list[torch.Tensor]:
        """Positions kept in each layer, [kv heads, budget]."""
        shape = self.shape
        blocks = PagedBlocks(
            1, shape.kv_heads, BLOCK_SIZE, shape.head_size, shape.dtype, shape.device
        )
        table = torch.tensor(blocks.allocate(tokens // BLOCK_SIZE), dtype=torch.int32)
        slots = torch.arange(tokens)
        slots = table[slots // BLOCK_SIZE].long() * BLOCK_SIZE + slots % BLOCK_SIZE
        kv = blocks.kv(0)
        evictor = _core.Evictor(
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv=kv,
            scale=shape.scale,
            rope=self.rope,
        )
        options = {name: method.options(tokens).get(name) for name in OPTIONS}
        evictor.add(
            0,
            policy=_core.Policy(method.policy, **options),
            window=_core.Window(budget=budget, stride=STRIDE),
        )
        evictor.begin_step()
        ids = torch.zeros(tokens, dtype=torch.int32)
        evictor.schedule(0, begin=0, first_row=0, tokens=ids, block_table=table)
        for layer, (query, keys, values, _) in enumerate(layers):
            for rows, half in ((keys, kv.key), (values, kv.value)):
                rows = rows.transpose(0, 1).contiguous()
                _core.scatter_blocks(rows=rows, slots=slots, blocks=half)
            evictor.layer(layer, query=query, kv=kv)
        evictor.finish()
        return [
            torch.tensor(evictor.positions(0, layer)).view(shape.kv_heads, -1)
            for layer in range(shape.layers)
        ]


def _rotated_queries(
    module: Any, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Queries of a llama attention layer after RoPE, [tokens, query heads, head size]."""
    query = module.q_proj(hidden)[0].unflatten(-1, (-1, module.head_dim))
    cosines, sines = (part[0][:, None] for part in embeddings)
    rotated: torch.Tensor = query * cosines + rotate_half(query) * sines
    return rotated


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["survivors", "times"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    bench = Bench()
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "kvpress": version("kvpress"),
        "model": "SmolLM2-135M-Instruct, float32",
        "rows": [],
    }
    if arguments.append:
        result["rows"] += json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
    is_timed = arguments.part == "times"
    methods = [*UNIFORM, *RAGGED] if is_timed else UNIFORM
    if arguments.methods is not None:
        methods = [method for method in methods if method.name in arguments.methods]
    for tokens in arguments.tokens:
        for method in methods:
            for ratio in arguments.ratios:
                if is_timed:
                    row = bench.time(method, ratio, tokens, arguments.rounds)
                else:
                    row = bench.survivors(method, ratio, tokens)
                print(json.dumps(row), flush=True)
                result["rows"].append(row)
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
