"""Ops on tensors of a CUDA device, an emulated one: they equal the CPU's, or say what is wrong.

The emulated device shares the CPU's memory: its tensors are CPU tensors that name another device.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from device_problems import (
    GROUP,
    HEADS,
    OPS,
    POLICIES,
    SIZE,
    TOKENS,
    EvictedRequest,
    Problem,
    diverge,
    expect_same_evictions,
    expect_same_results,
    planned_moves,
    policy_of,
    rotate,
    select,
)

from phasekv import InvalidArgumentError, MissingCapabilityError, UnsupportedError, _core


class OnDevice:
    """What the core asks of a torch tensor, on another device."""

    def __init__(self, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        self.tensor = tensor
        self.device = device
        self.dtype = tensor.dtype
        self.shape = tensor.shape

    def data_ptr(self) -> int:
        """Address."""
        return self.tensor.data_ptr()

    def stride(self) -> tuple[int, ...]:
        """In elements."""
        return self.tensor.stride()

    def element_size(self) -> int:
        """In bytes."""
        return self.tensor.element_size()

    def new_empty(self, count: int) -> OnDevice:
        """Of the same device, full of NaN: nothing may be read before it is written."""
        return OnDevice(torch.full((count,), torch.nan, dtype=self.dtype), self.device)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor."""
    return tensor


@pytest.mark.parametrize("op", OPS)
def test_an_op_on_the_device_equals_the_cpus(op: Callable[[Problem], None]) -> None:
    here, there = Problem(on_cpu), Problem(OnDevice)
    before = [tensor.clone() for tensor in here.outputs()]
    op(here)
    op(there)
    expect_same_results(here, there, before)


@pytest.mark.parametrize("op", OPS)
def test_tensors_of_two_devices_are_refused_by_the_name_of_the_second(
    op: Callable[[Problem], None],
) -> None:
    def run(elsewhere: int) -> int:
        """With one argument on the other device; how many there are."""
        problem = Problem(OnDevice)
        placed = 0

        def place(tensor: torch.Tensor) -> OnDevice:
            nonlocal placed
            placed += 1
            return OnDevice(tensor, "cuda:1" if placed == elsewhere else "cuda:0")

        problem.place = place
        before = [tensor.clone() for tensor in problem.outputs()]
        if elsewhere == 0:
            op(problem)
            return placed
        with pytest.raises(InvalidArgumentError, match=r"\.device = .*where .* is") as caught:
            op(problem)
        assert {"cuda:0", "cuda:1"} <= set(re.findall(r"cuda:\d", str(caught.value)))
        for old, new in zip(before, problem.outputs(), strict=True):
            assert torch.equal(old, new)
        return placed

    for elsewhere in range(1, run(0) + 1):
        run(elsewhere)


def test_a_rotation_of_the_cpu_is_refused_on_the_device() -> None:
    problem = Problem(OnDevice)
    problem.rope = _core.Rope(problem.rope.frequencies, SIZE, "neox")
    with pytest.raises(InvalidArgumentError, match=r"rope\.device.*cpu.*cuda:0, where keys is"):
        rotate(problem)


def test_moves_of_the_cpu_are_refused_on_the_device() -> None:
    problem = Problem(OnDevice)
    with pytest.raises(InvalidArgumentError, match=r"moves\.device.*cpu.*cuda:0, where kv is"):
        _core.compact(
            kv=problem.kv,
            block_table=OnDevice(problem.table),
            first_token=0,
            moves=planned_moves(),
        )


def test_what_is_chosen_is_what_the_list_says_and_nan_is_named() -> None:
    for place in (on_cpu, OnDevice):
        problem = Problem(place)
        select(problem)
        expected = _core.select_top(
            scores=problem.rows[:, 0, 0].contiguous(),
            segment_starts=problem.starts,
            counts=torch.tensor([2, 4]),
            pinned=problem.phases.bool(),
        )
        first, last = problem.chosen[TOKENS + 1 : -1].tolist()
        assert problem.chosen[:last].tolist() == expected
        assert [i for i in expected if i < 3] == expected[:first]
        assert problem.chosen[TOKENS] == 0
        assert problem.chosen[-1] == -1
    problem = Problem(OnDevice)
    problem.rows[5, 0, 0] = torch.nan
    select(problem)
    assert problem.chosen[-1] == 5
    with pytest.raises(InvalidArgumentError, match=r"scores\.device = cuda:0: expected cpu"):
        _core.select_top(
            scores=OnDevice(problem.floats[0, 0]),
            segment_starts=problem.starts,
            counts=torch.tensor([1, 1]),
        )


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cuda:7", MissingCapabilityError, r"cuda:7.*one of the 2 devices"),
        ("meta", InvalidArgumentError, r"device = meta: expected cpu or a CUDA device"),
        ("cuda:x", InvalidArgumentError, r"device = cuda:x: expected cpu or a CUDA device"),
    ],
)
def test_a_device_that_is_not_there(device: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        diverge(Problem(lambda tensor: OnDevice(tensor, device)))


def test_a_stream_is_an_integer_and_only_for_devices() -> None:
    here, there = Problem(on_cpu), Problem(OnDevice)
    rows = {"fresh": here.rows, "cached": here.more_rows, "out": torch.zeros(TOKENS)}
    with pytest.raises(InvalidArgumentError, match=r"stream.*None for tensors on the CPU"):
        _core.divergence(**rows, stream=0)
    on_device = {name: OnDevice(tensor) for name, tensor in rows.items()}
    _core.divergence(**on_device, stream=0)
    diverge(there)
    assert torch.equal(rows["out"], there.scores[0, 0])


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evictor_on_the_device_keeps_what_the_cpus_keeps(policy: str) -> None:
    there = EvictedRequest(OnDevice, policy_of(policy), stream=0)
    expect_same_evictions(EvictedRequest(on_cpu, policy_of(policy)), there)


def test_an_evictor_refuses_tensors_of_another_device_by_name() -> None:
    request = EvictedRequest(OnDevice, _core.Policy("keydiff"))
    elsewhere = EvictedRequest(on_cpu, _core.Policy("keydiff"))
    query = torch.zeros(0, HEADS * GROUP, SIZE)
    with pytest.raises(InvalidArgumentError, match=r"query\.device.*cpu.*cuda:0, where evictor is"):
        request.evictor.layer(0, query=query, kv=request.kv(0))
    with pytest.raises(InvalidArgumentError, match=r"kv\.device.*cpu.*cuda:0, where evictor is"):
        request.evictor.layer(0, query=OnDevice(query), kv=elsewhere.kv(0))
    with pytest.raises(InvalidArgumentError, match=r"query\.device.*cuda:0.*cpu, where evictor is"):
        elsewhere.evictor.layer(0, query=OnDevice(query), kv=elsewhere.kv(0))
    with pytest.raises(InvalidArgumentError, match=r"stream.*None for tensors on the CPU"):
        elsewhere.evictor.layer(0, query=query, kv=elsewhere.kv(0), stream=0)


def test_what_runs_on_the_cpu_only_says_so() -> None:
    problem = Problem(OnDevice)
    with pytest.raises(InvalidArgumentError, match=r"kv\.device.*cuda:0"):
        _core.RaggedEvictor(
            layers=1, query_heads=HEADS * GROUP, kv_heads=HEADS, kv=problem.kv, scale=0.2
        )
    pairs = SIZE // 2
    with pytest.raises(UnsupportedError, match=r"synthetic_query\.device.*made on the CPU"):
        _core.triattention_query(
            rope=problem.rope,
            mean_query=torch.zeros(HEADS, pairs, 2),
            mean_norm=torch.zeros(HEADS, pairs),
            time=3,
            synthetic_query=OnDevice(torch.zeros(HEADS, SIZE)),
            norm_weights=torch.zeros(HEADS, pairs),
        )
