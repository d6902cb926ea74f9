"""vLLM with PhaseKV's CUDA side, in this process and on the emulated device.

vLLM's model runs on the CPU as always. What PhaseKV is handed lies on the device: cache, queries,
keys, metadata, and the hidden states that its hooks see. The attention backend is the one for GPUs,
FlashAttention's with PhaseKV before it, of which only the kernels are replaced.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_tensors import DeviceTensor, OnDevice, across, on_device, on_host, waits
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention import selector
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from phasekv import _core
from phasekv.vllm import attention_cuda
from phasekv.vllm.attention import ReuseAttention, WindowMetadata
from phasekv.vllm.connector import PhaseKVConnector
from phasekv.vllm.decoder_hooks import DecoderHooks
from phasekv.vllm.plugin import register

waits_of_layers: dict[str, Counter[str]] = {}
"""How often the host waited for the device in each layer's attention, per operation."""

_STREAM = 7
_ON_DEVICE = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "positions")


@contextmanager
def on_emulated_device() -> Iterator[None]:
    """Engines that are made while this is entered run on the device."""
    register()
    patch = pytest.MonkeyPatch()
    try:
        _replace_kernels(patch)
        _place_what_phasekv_sees(patch)
        _choose_backend(f"{attention_cuda.__name__}.PhaseKVAttentionBackend")
        yield
    finally:
        patch.undo()
        _choose_backend("phasekv.vllm.attention_cpu.PhaseKVAttentionBackend")


def _choose_backend(path: str) -> None:
    """On the CPU vLLM takes this one, whatever it is asked for."""
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    selector._cached_get_attn_backend.cache_clear()


def _replace_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    for kernel in (flash_attn_varlen_func, get_scheduler_metadata, reshape_and_cache_flash):
        patch.setattr(flash_attn, kernel.__name__, kernel, raising=False)
    stream = SimpleNamespace(cuda_stream=_STREAM)
    patch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for name, op in list(vars(_core).items()):
        if "stream:" in (getattr(op, "__doc__", None) or ""):
            patch.setattr(_core, name, _on_stream(op))
    patch.setattr(_core.Evictor, "layer", _on_stream(_core.Evictor.layer))


def _on_stream(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, which has to be given torch's stream where a tensor is on the device."""

    def call(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(value, DeviceTensor) for value in named.values()):
            assert named["stream"] == _STREAM
        return op(*arguments, **named)

    return call


def get_scheduler_metadata(**arguments: Any) -> torch.Tensor:
    """FlashAttention plans a step from the lengths that it is given."""
    lengths = arguments["cache_seqlens"]
    assert isinstance(lengths, DeviceTensor)
    return lengths.clone()


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    seqused_k: Any,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: Any,
    scheduler_metadata: Any,
    **_: Any,
) -> None:
    """Attention as the kernel has it: keys and values [blocks, block size, kv heads, head size]."""
    parts = _arguments(q, k, v, out, cu_seqlens_q, seqused_k, block_table, scheduler_metadata)
    query, keys, values, result, starts, lengths, tables, planned = parts
    assert causal
    assert torch.equal(planned, lengths)
    assert int(lengths.max()) <= max_seqlen_k
    assert int(starts.diff().max()) <= max_seqlen_q
    for request, (begin, end) in enumerate(pairwise(starts.tolist())):
        length = int(lengths[request])
        blocks = tables[request, : -(-length // keys.shape[1])].long()
        held_keys, held_values = (part[blocks].flatten(0, 1)[:length] for part in (keys, values))
        rows = query[begin:end]
        mask = torch.ones(len(rows), length, dtype=torch.bool).tril(length - len(rows))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(0, 1) for part in (rows, held_keys, held_values)),
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )
        result[begin:end] = attended.transpose(0, 1)


def reshape_and_cache_flash(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *_: Any
) -> None:
    """Writes the cache as the kernel does; -1 is padding."""
    parts = _arguments(key, value, key_cache, value_cache, slot_mapping)
    keys, values, cached_keys, cached_values, slots = parts
    rows = (slots >= 0).nonzero()[:, 0]
    blocks, offsets = slots[rows] // cached_keys.shape[1], slots[rows] % cached_keys.shape[1]
    cached_keys[blocks, offsets] = keys[rows]
    cached_values[blocks, offsets] = values[rows]


def _arguments(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """A kernel's, which must be on the device, where this file can compute with them."""
    assert all(isinstance(tensor, DeviceTensor) for tensor in tensors)
    return on_host(list(tensors))


def _place_what_phasekv_sees(patch: pytest.MonkeyPatch) -> None:
    """Tensors are on the device from where they enter PhaseKV to where they leave it."""

    def build(self: Any, prefix: int, metadata: Any, *more: Any, **named: Any) -> Any:
        placed = replace(
            metadata, **{name: on_device(getattr(metadata, name)) for name in _ON_DEVICE}
        )
        with OnDevice():
            return original_build(self, prefix, placed, *more, **named)

    def rotary_module(self: DecoderHooks) -> Any:
        module = copy.copy(original_rotary_module.fget(self))
        module._buffers = on_device(dict(module._buffers))
        return module

    def install(self: DecoderHooks, *arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as hooks:
            for name in ("register_forward_pre_hook", "register_forward_hook"):
                original = getattr(torch.nn.Module, name)
                hooks.setattr(
                    torch.nn.Module,
                    name,
                    lambda module, hook, original=original: original(module, across(hook)),
                )
            original_install(self, *arguments)

    def bind_connector_metadata(self: PhaseKVConnector, metadata: Any) -> None:
        if is_forward_context_available():
            context = get_forward_context()
            context.slot_mapping = on_device(context.slot_mapping)
        with OnDevice():
            original_bind(self, metadata)

    original_build = WindowMetadata.build
    original_rotary_module: Any = DecoderHooks.rotary_module
    original_install = DecoderHooks.install
    original_bind = PhaseKVConnector.bind_connector_metadata
    patch.setattr(WindowMetadata, "build", build)
    patch.setattr(DecoderHooks, "rotary_module", property(rotary_module))
    patch.setattr(DecoderHooks, "install", install)
    patch.setattr(PhaseKVConnector, "bind_connector_metadata", bind_connector_metadata)
    for name in ("register_kv_caches", "wait_for_save"):
        patch.setattr(PhaseKVConnector, name, across(getattr(PhaseKVConnector, name)))
    for name in ("do_kv_cache_update", "forward"):
        patch.setattr(ReuseAttention, name, _counted(across(getattr(ReuseAttention, name))))


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an attention implementation whose waits are counted for its layer.

    It asserts that the layer has rows: a GPU launches no kernel for none.
    """

    def call(self: Any, layer: Any, rows: Any, *arguments: Any, **named: Any) -> Any:
        assert len(rows) > 0
        before = Counter(waits)
        result = method(self, layer, rows, *arguments, **named)
        waits_of_layers.setdefault(layer.layer_name, Counter()).update(waits - before)
        return result

    return call
