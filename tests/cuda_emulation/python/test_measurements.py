"""What is measured in a running engine is measured on the device, and read on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from device_tensors import OnDevice, on_device

pytest.importorskip("vllm")

from phasekv import _core
from phasekv.evaluation.future_attention import AttentionRecorder
from phasekv.vllm.calibrate import QueryRecorder
from phasekv.vllm.eviction.worker import StepRow

BLOCKS, HEADS, GROUP, BLOCK, SIZE = 3, 2, 2, 16, 32
TOKENS = 21


@pytest.fixture(autouse=True)
def stream_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: type("_", (), {"cuda_stream": 0}))


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_attention_that_is_recorded() -> None:
    keys, values = torch.randn(2, BLOCKS, HEADS, BLOCK, SIZE)
    query = torch.randn(TOKENS, HEADS * GROUP, SIZE)
    table = torch.tensor([2, 0], dtype=torch.int32)
    row: Any = StepRow("one", None, 0, 0, 0, TOKENS, 0)  # type: ignore[arg-type]
    recorders = []
    for place in (on_cpu, on_device):
        kv = _core.strided_paged_kv(key=place(keys), value=place(values))
        recorder = AttentionRecorder(np.arange(TOKENS) % 2, SIZE**-0.5)
        with OnDevice():
            recorder.layer(0, row, place(query), kv, place(table))
        recorders.append(recorder)
    expected, got = (recorder.steps[0].mass[0] for recorder in recorders)
    assert type(got) is torch.Tensor
    assert float(expected.sum()) == pytest.approx(TOKENS * HEADS, rel=1e-4)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class Rotary(torch.nn.Module):
    rotary_dim = SIZE
    is_neox_style = True

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Nothing: what is measured comes in."""


class Layer(torch.nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm = self.post_attention_layernorm = self.mlp = torch.nn.Identity()
        self.self_attn = torch.nn.Module()
        self.self_attn.rotary_emb = rotary
        self.self_attn.attn = torch.nn.Identity()

    def forward(self, query: torch.Tensor) -> None:
        self.self_attn.rotary_emb(None, query, None)


def test_queries_that_are_calibrated() -> None:
    model = torch.nn.Module()
    rotary = Rotary()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList(Layer(rotary) for _ in range(2))
    queries = torch.randn(2, TOKENS, HEADS * SIZE)
    recorder = QueryRecorder(model, SIZE)
    for layer, query in zip(model.model.layers, queries, strict=True):
        for part in query.split(8):
            layer(on_device(part))
    recorder.close()
    assert recorder.tokens == [TOKENS, TOKENS]
    pairs = torch.stack(queries.view(2, TOKENS, HEADS, 2, -1).unbind(3), dim=-1)
    for got, expected in (
        (recorder.mean_query, pairs.mean(1)),
        (recorder.mean_norm, pairs.norm(dim=-1).mean(1)),
    ):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
