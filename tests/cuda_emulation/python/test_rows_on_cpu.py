"""Rows of the cache that are copied to the CPU: exact, and with little memory on the device."""

from __future__ import annotations

import pytest
import torch
from device_tensors import OnDevice, on_device

pytest.importorskip("vllm")

from phasekv import _core
from phasekv.vllm.rows_on_cpu import rows_on_cpu

LAYERS, BLOCKS, HEADS, BLOCK, SIZE = 5, 4, 2, 16, 32


@pytest.mark.parametrize("is_on_device", [False, True])
def test_the_device_holds_one_layer_at_a_time(
    monkeypatch: pytest.MonkeyPatch, is_on_device: bool
) -> None:
    cache = torch.randn(LAYERS, 2, BLOCKS, HEADS, BLOCK, SIZE)
    slots = torch.randperm(BLOCKS * BLOCK)[:23]
    made: list[int] = []

    def empty_like(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        made.append(rows.numel())
        return on_device(torch.full(rows.shape, torch.nan))

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: type("_", (), {"cuda_stream": 0}))
    place = on_device if is_on_device else lambda tensor: tensor
    layers = {
        f"layer {index}": (
            index,
            _core.strided_paged_kv(key=place(part[0]), value=place(part[1])),
        )
        for index, part in enumerate(cache)
    }
    with OnDevice():
        keys, values = rows_on_cpu(layers, place(slots), torch.float32)
    expected = cache.transpose(3, 4).flatten(2, 3)[:, :, slots]
    assert type(keys) is type(values) is torch.Tensor
    assert torch.equal(keys, expected[:, 0])
    assert torch.equal(values, expected[:, 1])
    assert made == [23 * HEADS * SIZE] * (2 * LAYERS * is_on_device)
