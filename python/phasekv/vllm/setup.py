"""Builds planner and workers out of vLLM's configuration, its model and its cache."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.models.utils import extract_layer_index

from phasekv import _core
from phasekv.calibration import Calibration, load_calibration
from phasekv.errors import UnsupportedError
from phasekv.memory.chunk_quantizer import ChunkQuantizer
from phasekv.memory.disk import DiskTier
from phasekv.memory.keys import ModelIdentity, chunk_key
from phasekv.memory.session_files import SessionFiles
from phasekv.memory.session_store import SessionStore
from phasekv.memory.store import ChunkStore
from phasekv.memory.weights import identity_of_weights, weights_fingerprint
from phasekv.reuse.rotation import rope_of, rope_on
from phasekv.vllm import active
from phasekv.vllm.attention import ReuseAttention
from phasekv.vllm.blocks import flash_attention_blocks
from phasekv.vllm.config import PhaseKVConfig
from phasekv.vllm.decoder_hooks import DecoderHooks
from phasekv.vllm.eviction.ledger import EvictionLedger
from phasekv.vllm.eviction.markers import markers_of
from phasekv.vllm.eviction.sessions import SessionLedger
from phasekv.vllm.eviction.worker import EvictionWorker
from phasekv.vllm.layout_check import check_device_layout, check_layout
from phasekv.vllm.plan import StoredContent
from phasekv.vllm.planner import ReusePlanner
from phasekv.vllm.ranks import Ranks
from phasekv.vllm.rope import check_rope, rope_parameters_of
from phasekv.vllm.worker import ReuseWorker

SETTINGS_KEY = "phasekv"

_runner: Any = None


def settings_of(additional_config: Any) -> object | None:
    """The ``phasekv`` object of vLLM's ``additional_config``; None if PhaseKV is not asked for."""
    return additional_config.get(SETTINGS_KEY) if isinstance(additional_config, dict) else None


def config_of(vllm_config: Any) -> PhaseKVConfig:
    """The validated settings of an engine; its defaults if PhaseKV is not asked for."""
    settings = settings_of(vllm_config.additional_config)
    return PhaseKVConfig() if settings is None else PhaseKVConfig.parse(settings)


def model_loaded(runner: Any) -> None:
    """Called by the model runner when its weights are there, before it makes the cache."""
    global _runner
    _runner = runner


def loaded_config() -> Any:
    """vLLM's configuration in a process whose model is loaded, else None."""
    return None if _runner is None else _runner.vllm_config


def identity_of(vllm_config: Any) -> ModelIdentity:
    """The model, as everything that is kept of it is tagged."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return identity_of_weights(
        weights_fingerprint(model.model, model.revision, model.quantization),
        model.hf_text_config,
        dtype=model.dtype,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        tensor_parallel_size=parallel.tensor_parallel_size,
    )


def build_planner(vllm_config: Any) -> ReusePlanner:
    """The scheduler side. Chunks that are on disk already can be found by content at once."""
    config = config_of(vllm_config)
    identity = identity_of(vllm_config).quantized(config.quantization)
    planner = ReusePlanner(config, identity, vllm_config.cache_config.block_size)
    disk = _disk_tier(config, identity, rank=0)
    if disk is not None and config.auto:
        for key, tokens, _ in disk.scan():
            content = tuple(int(token) for token in tokens)
            # A chunk of a tenant or an adapter has another key. It stays reachable by name only:
            # whose it is does not stand on disk.
            if chunk_key(identity, content) == key:
                planner.add(StoredContent(key, content, ("", "")))
    return planner


def build_worker(vllm_config: Any, kv_caches: dict[str, torch.Tensor]) -> ReuseWorker:
    """The worker side, after all self-tests.

    Raises
    ------
    UnsupportedError
        For a model, rotary embedding or block layout that is not exactly as expected.
    """
    if _runner is None:
        raise UnsupportedError("model runner", "unknown", "a runner whose load_model is hooked")
    config = config_of(vllm_config)
    model_config = vllm_config.model_config
    hooks = DecoderHooks(_runner.model)
    cache = next(iter(kv_caches.values()))
    dtype = cache.dtype
    rope = _rope(vllm_config, hooks)
    cache_rope = rope_on(rope, cache.device)
    check_rope(cache_rope, hooks.rotary_module, model_config.get_head_size(), dtype)
    layers, block_size = _layers(vllm_config, kv_caches)
    if len(layers) != len(hooks.layers):
        raise UnsupportedError(
            "attention layers", str(len(layers)), f"one for each of {len(hooks.layers)} layers"
        )
    group = get_tp_group()
    local_heads = next(iter(layers.values()))[1].num_heads
    copies = max(1, local_heads * group.world_size // model_config.get_total_num_kv_heads())
    quantization = config.quantization
    identity = identity_of(vllm_config).quantized(quantization)
    store = ChunkStore(
        config.chunk_store_bytes,
        _disk_tier(config, identity, rank=group.rank_in_group),
        # Chunks are kept on the CPU.
        quantizer=None if quantization is None else ChunkQuantizer(quantization, rope),
    )
    return ReuseWorker(hooks, cache_rope, store, layers, block_size, dtype, Ranks(group, copies))


def build_ledger(vllm_config: Any) -> EvictionLedger | None:
    """The scheduler side of eviction; None where nothing is evicted."""
    eviction = config_of(vllm_config).eviction
    return None if eviction is None else EvictionLedger(eviction)


def build_session_ledger(vllm_config: Any) -> SessionLedger | None:
    """The scheduler side of sessions; None where nothing is evicted."""
    config = config_of(vllm_config)
    if config.eviction is None:
        return None
    ranks = range(vllm_config.parallel_config.tensor_parallel_size)
    files = [_session_files(config, rank) for rank in ranks]
    return SessionLedger(identity_of(vllm_config), [file for file in files if file is not None])


def _session_files(config: PhaseKVConfig, rank: int) -> SessionFiles | None:
    if config.session_directory is None:
        return None
    return SessionFiles(config.session_directory, rank)


def build_eviction_worker(
    vllm_config: Any, kv_caches: dict[str, torch.Tensor]
) -> EvictionWorker | None:
    """The worker side of eviction; None where nothing is evicted."""
    config = config_of(vllm_config)
    if config.eviction is None:
        active.set_evictions(None)
        return None
    layers, _ = _layers(vllm_config, kv_caches)
    attention = next(iter(vllm_config.compilation_config.static_forward_context.values()))
    kv = next(iter(layers.values()))[1]
    evictor = _core.Evictor(
        layers=len(layers),
        query_heads=attention.impl.num_heads,
        kv=kv,
        scale=attention.impl.scale,
        rope=_rope(vllm_config, DecoderHooks(_runner.model)),
    )
    markers = markers_of(vllm_config.model_config, config.phases)
    files = _session_files(config, get_tp_group().rank_in_group)
    sessions = SessionStore(config.session_bytes, files)
    dtype = next(iter(kv_caches.values())).dtype
    calibration = calibration_of(vllm_config)
    statistics = None
    if calibration is not None:
        heads = attention.impl.num_heads
        begin = get_tp_group().rank_in_group * heads
        statistics = calibration.of_heads(begin, begin + heads).statistics
    worker = EvictionWorker(
        _runner, evictor, config.eviction, layers, sessions, dtype, markers, statistics
    )
    active.set_evictions(worker)
    return worker


def calibration_of(vllm_config: Any) -> Calibration | None:
    """The engine's calibration, which must be of its model; None where none is named.

    Raises
    ------
    InvalidArgumentError
        If the file cannot be read or was measured on another model.
    """
    eviction = config_of(vllm_config).eviction
    if eviction is None or eviction.calibration is None:
        return None
    calibration = load_calibration(eviction.calibration)
    text = vllm_config.model_config.hf_text_config
    calibration.check_model(identity_of(vllm_config), text.num_attention_heads)
    return calibration


def _rope(vllm_config: Any, hooks: DecoderHooks) -> _core.Rope:
    """The rotation of keys on the CPU; ``build_worker`` compares it with the model's own."""
    text = vllm_config.model_config.hf_text_config
    return rope_of(rope_parameters_of(text, hooks.rotary_module))


def _layers(
    vllm_config: Any, kv_caches: dict[str, torch.Tensor]
) -> tuple[dict[str, tuple[int, _core.PagedKV]], int]:
    attention = vllm_config.compilation_config.static_forward_context
    layers: dict[str, tuple[int, _core.PagedKV]] = {}
    checked: set[tuple[Any, ...]] = set()
    block_size = 0
    for name, cache in sorted(kv_caches.items(), key=lambda item: extract_layer_index(item[0])):
        block_size, head_size = cache.shape[2], cache.shape[3] // 2
        _check_layer(attention[name], block_size, vllm_config.cache_config.block_size)
        if cache.device.type != "cpu":
            if (cache.shape, cache.stride()) not in checked:
                check_device_layout(attention[name], cache)
                checked.add((cache.shape, cache.stride()))
            layers[name] = (extract_layer_index(name), flash_attention_blocks(cache))
            continue
        layout = attention[name].isa
        form = (layout, cache.dtype, block_size, head_size)
        if form not in checked:
            check_layout(*form)
            checked.add(form)
        layers[name] = (extract_layer_index(name), _core.cpu_paged_kv(layout, cache))
    return layers, block_size


def _check_layer(layer: Any, kernel_block_size: int, block_size: int) -> None:
    """Refuse a layer whose attention would not ask which rows run, or that splits blocks."""
    if not isinstance(layer.impl, ReuseAttention):
        raise UnsupportedError(
            "attention backend",
            type(layer.impl).__name__,
            "rows and windows are PhaseKV's own; leave --attention-backend away",
        )
    if kernel_block_size != block_size:
        raise UnsupportedError(
            "block_size",
            str(block_size),
            f"attention has blocks of {kernel_block_size}; pass --block-size {kernel_block_size}",
        )


def _disk_tier(config: PhaseKVConfig, identity: ModelIdentity, rank: int) -> DiskTier | None:
    if config.store_directory is None:
        return None
    return DiskTier(
        config.store_directory,
        identity,
        rank=rank,
        capacity_bytes=config.store_directory_bytes,
    )
