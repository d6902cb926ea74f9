"""One call of each op, and a request under an evictor, whose tensors lie wherever a test has them.

Also used by the tests on a real device, in tests/cuda_device/python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from phasekv import _core

TOKENS, HEADS, GROUP, SIZE, BLOCK = 11, 2, 3, 64, 16

Place = Callable[[torch.Tensor], Any]


class Problem:
    """One of everything; the same numbers wherever it is placed."""

    def __init__(self, place: Place) -> None:
        generator = torch.Generator().manual_seed(5)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.place = place
        self.blocks = numbers(2, 3, HEADS, BLOCK, SIZE)
        self.kv = _core.strided_paged_kv(key=place(self.blocks[0]), value=place(self.blocks[1]))
        self.rows = numbers(TOKENS, HEADS, SIZE)
        self.more_rows = numbers(TOKENS, HEADS, SIZE)
        self.query = numbers(TOKENS, HEADS * GROUP, SIZE)
        self.floats = numbers(4, HEADS, SIZE)
        self.scores = torch.zeros(2, HEADS, TOKENS)
        self.codes = torch.arange(TOKENS * HEADS * SIZE // 16, dtype=torch.int32) * 7919
        self.codes = self.codes.view(TOKENS, HEADS, SIZE // 16)
        self.halves = numbers(2, TOKENS, HEADS, SIZE // 32).half()
        self.slots = torch.arange(TOKENS) * 4
        self.order = torch.arange(TOKENS)
        self.chosen = torch.zeros(TOKENS + 4, dtype=torch.int64)
        self.starts = torch.tensor([0, 3, TOKENS])
        self.table = torch.tensor([2, 0, 1], dtype=torch.int32)
        self.phases = torch.arange(TOKENS, dtype=torch.int32) % 2
        rope = _core.Rope([0.5 ** (i / 8) for i in range(SIZE // 2)], SIZE, "neox")
        self.rope = rope.on(place(torch.tensor(rope.frequencies, dtype=torch.float64)))

    def outputs(self) -> list[torch.Tensor]:
        """Everything that an op may have written."""
        written = [self.blocks, self.more_rows, self.query, self.floats, self.scores]
        return [*written, self.codes, self.halves, self.chosen]


def gather(p: Problem) -> None:
    """One op, as each function below."""
    _core.gather_blocks(blocks=p.kv.key, slots=p.place(p.slots), out=p.place(p.more_rows))


def scatter(p: Problem) -> None:
    _core.scatter_blocks(rows=p.place(p.rows), slots=p.place(p.slots), blocks=p.kv.value)


def rotate(p: Problem) -> None:
    _core.rotate_keys(
        keys=p.place(p.rows), deltas=p.place(p.order), rope=p.rope, out=p.place(p.more_rows)
    )


def diverge(p: Problem) -> None:
    _core.divergence(
        fresh=p.place(p.rows), cached=p.place(p.more_rows), out=p.place(p.scores[0, 0])
    )


def mean(p: Problem) -> None:
    _core.mean_residual(
        fresh=p.place(p.rows),
        cached=p.place(p.more_rows),
        fresh_rows=p.place(p.order),
        cached_rows=p.place(p.order),
        segment_starts=p.place(p.starts),
        cached_deltas=p.place(p.order),
        rope=p.rope,
        out=p.place(p.floats[:2]),
    )


def shift(p: Problem) -> None:
    _core.apply_shift(
        cached=p.place(p.rows),
        cached_rows=p.place(p.order),
        slots=p.place(p.slots),
        segment_starts=p.place(p.starts),
        deltas=p.place(p.order[:2]),
        rope=p.rope,
        mean=p.place(p.floats[:2]),
        weights=p.place(p.scores[0, 0] + 0.5),
        blocks=p.kv.key,
    )


def attend(p: Problem) -> None:
    _core.attend_rows(
        query=p.place(p.query),
        kv=p.kv,
        block_table=p.place(p.table[None]),
        row_requests=p.place(torch.zeros(TOKENS, dtype=torch.int32)),
        row_limits=p.place(p.order + 7),
        scale=0.2,
        out=p.place(p.query),
    )


def push(p: Problem) -> None:
    _core.push_queries(
        query=p.place(p.rows),
        rows=p.place(p.order),
        entries=p.place(p.order),
        buffer=p.place(p.more_rows),
    )


def score(p: Problem) -> None:
    _core.score_keys(
        query=p.place(p.query),
        key=p.kv.key,
        block_table=p.place(p.table),
        first_token=3,
        tokens=TOKENS,
        query_limits=p.place(p.order),
        group="mean",
        scale=0.2,
        scores=p.place(p.scores[0]),
    )


def accumulate(p: Problem) -> None:
    _core.accumulate_attention(
        query=p.place(p.query),
        query_limits=p.place(p.order),
        query_phases=p.place(p.phases),
        key=p.kv.key,
        block_table=p.place(p.table),
        first_token=3,
        tokens=TOKENS,
        scale=0.2,
        sums=p.place(p.scores),
    )


def score_by_frequency(p: Problem) -> None:
    _core.triattention_score(
        key=p.kv.key,
        block_table=p.place(p.table),
        first_token=3,
        tokens=TOKENS,
        synthetic_query=p.place(p.query[0]),
        norm_weights=p.place(p.query[1, :, : SIZE // 2].contiguous()),
        scores=p.place(p.scores[0]),
    )


def select(p: Problem) -> None:
    _core.select_top(
        scores=p.place(p.rows[:, 0, 0].contiguous()),
        segment_starts=p.place(p.starts),
        counts=p.place(torch.tensor([2, 4])),
        pinned=p.place(p.phases.bool()),
        chosen=p.place(p.chosen[:TOKENS]),
        chosen_starts=p.place(p.chosen[TOKENS:-1]),
        first_nan=p.place(p.chosen[-1:]),
    )


def planned_moves() -> Any:
    """On the CPU."""
    kept = torch.tensor([[0, 2, 3, 9], [1, 4, 5, 10]])
    return _core.plan_compaction(kept_indices=kept, tokens=TOKENS)


def move(p: Problem) -> None:
    moves = planned_moves()
    _core.compact(
        kv=p.kv,
        block_table=p.place(p.table),
        first_token=20,
        moves=moves.on(
            starts=p.place(torch.tensor(moves.starts)),
            from_indices=p.place(torch.tensor(moves.from_indices)),
            to_indices=p.place(torch.tensor(moves.to_indices)),
        ),
    )


def find_redundancy(p: Problem) -> None:
    _core.key_redundancy(
        key=p.kv.key,
        block_table=p.place(p.table),
        first_token=3,
        tokens=TOKENS,
        threshold=0.1,
        redundancy=p.place(p.scores[0]),
    )


def score_directions(p: Problem) -> None:
    _core.keydiff_score(
        key=p.kv.key,
        block_table=p.place(p.table),
        first_token=3,
        tokens=TOKENS,
        scores=p.place(p.scores[0]),
    )


def score_expectation(p: Problem) -> None:
    _core.expected_attention_score(
        query=p.place(p.query),
        query_positions=p.place(p.order),
        kv=p.kv,
        block_table=p.place(p.table),
        first_token=3,
        tokens=TOKENS,
        positions=p.place(torch.arange(HEADS * TOKENS, dtype=torch.int32).view(HEADS, TOKENS)),
        sinks=2,
        rope=p.rope,
        next_position=40,
        scale=0.2,
        scores=p.place(p.scores[0]),
    )


def quantized(p: Problem) -> dict[str, Any]:
    return {
        "codes": p.place(p.codes),
        "scales": p.place(p.halves[0]),
        "zero_points": p.place(p.halves[1]),
        "bits": 2,
        "group_size": 32,
        "axis": "channels",
    }


def quantize(p: Problem) -> None:
    _core.quantize(rows=p.place(p.rows), **quantized(p))


def dequantize(p: Problem) -> None:
    _core.dequantize(**quantized(p), tokens=TOKENS, out=p.place(p.more_rows))


OPS = [
    gather,
    scatter,
    rotate,
    diverge,
    mean,
    shift,
    attend,
    push,
    select,
    move,
    score,
    accumulate,
    score_by_frequency,
    find_redundancy,
    score_directions,
    score_expectation,
    quantize,
    dequantize,
]


class EvictedRequest:
    """A request whose tokens run through an evictor, in a cache that lies somewhere.

    ``bring_back`` makes ``blocks`` what the cache has become.
    """

    LAYERS, BLOCKS = 2, 12

    def __init__(
        self,
        place: Place,
        policy: Any,
        bring_back: Callable[[], None] = lambda: None,
        **layer: Any,
    ) -> None:
        self.place = place
        self.bring_back = bring_back
        self.layer = layer
        shape = (2, self.BLOCKS, HEADS, BLOCK, SIZE)
        self.generator = torch.Generator().manual_seed(9)
        self.blocks = [torch.full(shape, torch.nan) for _ in range(self.LAYERS)]
        self.table = torch.randperm(self.BLOCKS, generator=self.generator).to(torch.int32)
        self.computed = 0
        self.policy = policy
        rope = _core.Rope([0.5 ** (i / 8) for i in range(SIZE // 2)], SIZE, "neox")
        self.evictor = _core.Evictor(
            layers=self.LAYERS, query_heads=HEADS * GROUP, kv=self.kv(0), scale=0.2, rope=rope
        )
        self.add()

    def kv(self, layer: int) -> Any:
        """The paged cache of a layer."""
        key, value = self.blocks[layer]
        return _core.strided_paged_kv(key=self.place(key), value=self.place(value))

    def add(self) -> None:
        """To the evictor."""
        window = _core.Window(budget=64, stride=16)
        self.evictor.add(1, policy=self.policy, window=window)

    def step(self, count: int) -> None:
        """Compute so many more tokens."""
        end = self.computed + count
        self.evictor.begin_step()
        self.evictor.schedule(
            1,
            begin=self.computed,
            first_row=0,
            tokens=torch.arange(count, dtype=torch.int32),
            block_table=self.table,
        )
        positions = torch.arange(self.computed, end)
        blocks, offsets = self.table[positions // BLOCK].long(), positions % BLOCK
        for layer in range(self.LAYERS):
            rows = torch.randn(2, count, HEADS, SIZE, generator=self.generator)
            self.blocks[layer][:, blocks, :, offsets] = rows.transpose(0, 1)
            query = torch.randn(count, HEADS * GROUP, SIZE, generator=self.generator)
            # The queries lie in the other order.
            self.evictor.layer(
                layer,
                query=self.place(query.flip(0)),
                kv=self.kv(layer),
                query_rows=torch.arange(count).flip(0),
                **self.layer,
            )
        self.computed = end
        assert all(report.failure == "" for report in self.evictor.finish())
        self.bring_back()

    def held(self) -> list[list[int]]:
        """Positions of the held keys, per layer."""
        return [self.evictor.positions(1, layer) for layer in range(self.LAYERS)]


def norms_of_values(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A policy in Python, which is given tensors on the CPU."""
    assert {part.device.type for part in (keys, values, queries, positions)} == {"cpu"}
    assert queries.shape[1:] == (HEADS * GROUP, SIZE)
    return values.norm(dim=-1) + keys[..., 0]


POLICIES = ["agentkv", "h2o", "r_kv", "keydiff", "expected_attention", "function"]


def policy_of(name: str) -> Any:
    """A new one."""
    if name == "function":
        return _core.FunctionPolicy(norms_of_values)
    return _core.Policy(name, sinks=4)


def expect_same_evictions(here: EvictedRequest, there: EvictedRequest) -> None:
    """Also where the one goes on from what the other has saved."""
    for count in (70, 9, 1, 30):
        here.step(count)
        there.step(count)
        assert there.held() == here.held()
        for expected, got in zip(here.blocks, there.blocks, strict=True):
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    state = there.evictor.save(1)
    assert len(state) == len(here.evictor.save(1))
    here.add()
    here.evictor.restore(1, state)
    here.step(33)
    there.step(33)
    assert there.held() == here.held()


def expect_same_results(here: Problem, there: Problem, before: list[torch.Tensor]) -> None:
    """``before`` is what ``here`` had: an op has changed it."""
    assert any(not torch.equal(old, new) for old, new in zip(before, here.outputs(), strict=True))
    for expected, got in zip(here.outputs(), there.outputs(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
