"""Ops on torch's tensors of the first CUDA device equal the CPU's.

benchmarks/a100/run.sh runs them, on a machine that has one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_problems import (
    OPS,
    POLICIES,
    EvictedRequest,
    Problem,
    expect_same_evictions,
    expect_same_results,
    policy_of,
)

from phasekv import _core


class FirstDevice:
    """Tensors there for tensors here: whole storages are copied, so that views stay views."""

    def __init__(self) -> None:
        # By address; what is here is kept, so that no other comes to lie there.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """With what the tensor holds now."""
        here = tensor.untyped_storage()
        if here.data_ptr() not in self._storages:
            self._storages[here.data_ptr()] = (here, here.cuda())
        there = self._storages[here.data_ptr()][1]
        there.copy_(here, non_blocking=False)
        empty = torch.empty(0, dtype=tensor.dtype, device="cuda:0")
        return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    def bring_back(self) -> None:
        """Everything."""
        for here, there in self._storages.values():
            here.copy_(there, non_blocking=False)


def test_the_device_is_one_that_kernels_run_on() -> None:
    assert _core.cuda_is_built()
    _core.check_cuda_device(0)


@pytest.mark.parametrize("op", OPS)
def test_an_op_on_the_device_equals_the_cpus(op: Callable[[Problem], None]) -> None:
    device = FirstDevice()
    here, there = Problem(lambda tensor: tensor), Problem(device)
    before = [tensor.clone() for tensor in here.outputs()]
    op(here)
    op(there)
    device.bring_back()
    expect_same_results(here, there, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evictor_on_the_device_keeps_what_the_cpus_keeps(policy: str) -> None:
    device = FirstDevice()
    stream = torch.cuda.current_stream().cuda_stream
    there = EvictedRequest(device, policy_of(policy), device.bring_back, stream=stream)
    here = EvictedRequest(lambda tensor: tensor, policy_of(policy))
    expect_same_evictions(here, there)


def test_another_stream_and_a_graph_give_the_same() -> None:
    rows = torch.randn(300, 8, 128, device="cuda:0")
    out = torch.full_like(rows, torch.nan)
    blocks = torch.zeros(40, 8, 16, 128, device="cuda:0")
    slots = torch.randperm(40 * 16, device="cuda:0")[:300]
    view = _core.strided_paged_kv(key=blocks, value=blocks).key

    def there_and_back() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _core.scatter_blocks(rows=rows, slots=slots, blocks=view, stream=stream)
        _core.gather_blocks(blocks=view, slots=slots, out=out, stream=stream)

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        there_and_back()
    torch.cuda.synchronize()
    assert torch.equal(out, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there_and_back()
    rows.copy_(torch.randn_like(rows))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, rows)
