"""vLLM's CUDA side as far as it goes without a GPU.

The backend is FlashAttention's with PhaseKV's rows before it; its blocks lie as FlashAttention has
them, and a reuse step runs through it on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from phasekv import MissingCapabilityError, UnsupportedError, _core
from phasekv.reuse.step import Batch, ReuseStep
from phasekv.vllm import active, setup
from phasekv.vllm.attention_cuda import PhaseKVAttentionBackend, PhaseKVAttentionImpl
from phasekv.vllm.blocks import flash_attention_blocks
from phasekv.vllm.compatibility import check_cuda_eviction, check_cuda_graphs
from phasekv.vllm.connector import PhaseKVConnector, StepMetadata
from phasekv.vllm.layout_check import check_device_layout
from phasekv.vllm.plan import StepReuse
from phasekv.vllm.plugin import choose_for_cuda
from phasekv.vllm.ranks import Ranks

BLOCKS, HEADS, GROUP, BLOCK, SIZE = 5, 2, 3, 16, 32
ROWS = 21


def cache_of(order: str) -> torch.Tensor:
    """vLLM's cache tensor [blocks, kv heads, block size, 2 * head size] in a memory order."""
    if order == "NHD":
        return torch.randn(BLOCKS, BLOCK, HEADS, 2 * SIZE).transpose(1, 2)
    return torch.randn(BLOCKS, HEADS, BLOCK, 2 * SIZE)


@pytest.fixture
def batch() -> Batch:
    """Two requests, of 12 and 9 tokens, whose blocks are 3, 1 and 4."""
    table = torch.tensor([[3], [1]], dtype=torch.int32)
    positions = torch.cat([torch.arange(12), torch.arange(9)])
    requests = torch.tensor([0] * 12 + [1] * 9, dtype=torch.int32)
    return Batch(
        slots=table[requests.long(), 0].long() * BLOCK + positions,
        positions=positions,
        requests=requests,
        block_table=table,
        first_held=torch.zeros(2, dtype=torch.int64),
    )


@pytest.fixture(autouse=True)
def no_step() -> Iterator[None]:
    """Whatever a test did, no step is active after it."""
    yield
    active.end()


class _Layer:
    layer_name = "model.layers.0.self_attn.attn"


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_step_writes_and_attends_in_flash_attentions_blocks(order: str, batch: Batch) -> None:
    torch.manual_seed(3)
    cache = cache_of(order)
    untouched = cache.clone()
    implementation = object.__new__(PhaseKVAttentionImpl)
    implementation.scale = SIZE**-0.5
    query = torch.randn(ROWS, HEADS * GROUP, SIZE)
    keys, values = torch.randn(2, ROWS, HEADS, SIZE)
    out = torch.full_like(query, torch.nan)
    step = ReuseStep(batch, [], lambda squared: squared)
    active.begin(step, {_Layer.layer_name: (0, flash_attention_blocks(cache))})
    implementation.do_kv_cache_update(_Layer(), keys, values, cache, batch.slots)
    implementation.forward(_Layer(), query, keys, values, cache, object(), out)

    # As FlashAttention takes its cache apart.
    key_cache, value_cache = cache.transpose(1, 2).split(SIZE, dim=-1)
    blocks, offsets = batch.slots // BLOCK, batch.slots % BLOCK
    assert torch.equal(key_cache[blocks, offsets], keys)
    assert torch.equal(value_cache[blocks, offsets], values)
    written = torch.zeros(BLOCKS, BLOCK, dtype=torch.bool)
    written[blocks, offsets] = True
    kept = ~written[:, None, :, None].expand_as(cache)
    assert torch.equal(cache[kept], untouched[kept])
    for begin, end in ((0, 12), (12, 21)):
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(rows[begin:end].double().transpose(0, 1) for rows in (query, keys, values)),
            is_causal=True,
            enable_gqa=True,
        )
        torch.testing.assert_close(
            out[begin:end].double().transpose(0, 1), expected, rtol=1e-5, atol=1e-5
        )


def test_without_a_step_flash_attention_does_it_all(
    monkeypatch: pytest.MonkeyPatch, batch: Batch
) -> None:
    calls: list[str] = []
    for name in ("forward", "do_kv_cache_update"):
        monkeypatch.setattr(
            FlashAttentionImpl, name, lambda self, *_, name=name, **__: calls.append(name)
        )
    implementation: Any = object.__new__(PhaseKVAttentionImpl)
    nothing = torch.zeros(0)
    implementation.do_kv_cache_update(_Layer(), nothing, nothing, nothing, batch.slots)
    implementation.forward(_Layer(), nothing, nothing, nothing, nothing, object(), nothing)
    implementation.forward(_Layer(), nothing, nothing, nothing, nothing, None, nothing)
    assert calls == ["do_kv_cache_update", "forward", "forward"]


def test_attention_is_in_no_cuda_graph() -> None:
    builder = PhaseKVAttentionBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.NEVER
    assert not builder.supports_update_block_table
    assert PhaseKVAttentionBackend.get_impl_cls() is PhaseKVAttentionImpl
    assert PhaseKVAttentionBackend.get_name() == "CUSTOM"


def test_vllm_finds_the_backend_by_its_name() -> None:
    from phasekv.vllm.plugin import register

    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is PhaseKVAttentionBackend


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"kv_cache.*\[2, 5, 3, 16, 64\]"):
        flash_attention_blocks(torch.zeros(2, BLOCKS, 3, BLOCK, 64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_without_device_or_kernels_is_refused() -> None:
    with pytest.raises(MissingCapabilityError, match=r"cuda:0"):
        _core.check_cuda_device(0)


def test_what_a_gpu_needs_is_chosen_without_asking_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM forks its engine from this process, where a driver that was asked is of no use."""

    def ask(index: int) -> None:
        raise AssertionError("the driver was asked")

    def chosen(evicts: bool, **given: Any) -> tuple[Any, Any]:
        arguments = EngineArgs(model=str(tmp_path), **given)
        choose_for_cuda(arguments, evicts)
        return arguments.attention_backend, arguments.async_scheduling

    monkeypatch.setattr(_core, "check_cuda_device", ask)
    monkeypatch.setattr(_core, "cuda_is_built", lambda: True)
    assert chosen(False) == (AttentionBackendEnum.CUSTOM, None)
    assert chosen(True) == (AttentionBackendEnum.CUSTOM, False)
    other = AttentionBackendEnum.FLASHINFER
    assert chosen(True, attention_backend=other, async_scheduling=True) == (other, True)
    assert chosen(False, attention_config=AttentionConfig(backend=other)) == (None, None)
    monkeypatch.setattr(_core, "cuda_is_built", lambda: False)
    with pytest.raises(MissingCapabilityError, match=r"kernels = cuda.*without CUDA"):
        chosen(False)


@pytest.mark.parametrize(("enabled", "eager"), [("1", False), ("1", True), ("0", False)])
def test_graphs_of_whole_layers_are_refused(
    monkeypatch: pytest.MonkeyPatch, enabled: str, eager: bool
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", enabled)
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))
    if enabled == "0" or eager:
        check_cuda_graphs(config)
        return
    with pytest.raises(UnsupportedError, match=r"VLLM_USE_BREAKABLE_CUDAGRAPH = 1"):
        check_cuda_graphs(config)


@pytest.mark.parametrize(
    ("implementation", "block_size", "refused"),
    [
        (FlashAttentionImpl, BLOCK, r"attention backend = FlashAttentionImpl.*--attention-backend"),
        (PhaseKVAttentionImpl, 2 * BLOCK, r"block_size = 32.*--block-size 16"),
    ],
)
def test_layers_that_others_attend_are_refused(
    implementation: Any, block_size: int, refused: str
) -> None:
    layer = SimpleNamespace(impl=object.__new__(implementation))
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={_Layer.layer_name: layer}),
        cache_config=SimpleNamespace(block_size=block_size),
    )
    with pytest.raises(UnsupportedError, match=refused):
        setup._layers(config, {_Layer.layer_name: cache_of("NHD")})


class _Writer:
    """FlashAttention's cache writer in torch; it may have values before keys."""

    def __init__(self, values_first: bool) -> None:
        self.values_first = values_first

    def do_kv_cache_update(
        self,
        layer: Any,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        parts = cache.transpose(1, 2).split(SIZE, dim=-1)
        rows = (values, keys) if self.values_first else (keys, values)
        for part, written in zip(parts, rows, strict=True):
            part[slots // BLOCK, slots % BLOCK] = written


@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_layout_that_is_misread_is_refused(order: str, values_first: bool) -> None:
    layer, cache = SimpleNamespace(impl=_Writer(values_first)), cache_of(order)
    before = cache.clone()
    if values_first:
        with pytest.raises(UnsupportedError, match=r"block layout = _Writer.*keys written by vLLM"):
            check_device_layout(layer, cache)
    else:
        check_device_layout(layer, cache)
    assert torch.equal(cache, before)


def test_ranks_agree_on_hits_where_their_group_communicates() -> None:
    class Group:
        world_size, rank_in_group, device = 2, 0, torch.device("meta")

        def all_reduce(self, flags: torch.Tensor) -> torch.Tensor:
            assert flags.device == self.device
            return torch.tensor([2.0, 1.0])

    assert Ranks(Group()).all_have([True, True]) == [True, False]


def test_what_a_request_holds_is_let_go_in_a_step_without_tokens() -> None:
    """vLLM's second runner makes no forward context for the step after the last request's end."""
    released: list[str] = []
    connector: Any = object.__new__(PhaseKVConnector)
    connector._evictions = None
    connector._worker = SimpleNamespace(release=released.extend)
    connector.bind_connector_metadata(StepMetadata(StepReuse(released=("over",))))
    assert released == ["over"]


@pytest.mark.parametrize(
    ("second_runner", "is_asynchronous", "refused"),
    [
        (False, False, None),
        (True, False, r"model runner = V2.*VLLM_USE_V2_MODEL_RUNNER=0"),
        (False, True, r"async_scheduling.*--no-async-scheduling"),
    ],
)
def test_eviction_on_a_gpu_needs_the_tokens_of_a_step_on_the_host(
    second_runner: bool, is_asynchronous: bool, refused: str | None
) -> None:
    config = SimpleNamespace(
        use_v2_model_runner=second_runner,
        scheduler_config=SimpleNamespace(async_scheduling=is_asynchronous),
    )
    if refused is None:
        check_cuda_eviction(config)
        return
    with pytest.raises(UnsupportedError, match=refused):
        check_cuda_eviction(config)
