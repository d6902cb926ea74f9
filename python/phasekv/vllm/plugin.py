"""The ``vllm.general_plugins`` entry point: every place where PhaseKV enters vLLM is listed here.

vLLM calls ``register`` once in each of its processes, before it knows its configuration. Nothing
changes for an engine whose ``additional_config`` has no ``phasekv`` object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

CONNECTOR = "PhaseKVConnector"

_registered = False


def register() -> None:
    """Hook PhaseKV into this process's vLLM. Calling it again does nothing."""
    global _registered
    if _registered:
        return
    import vllm

    from phasekv.vllm.compatibility import check_engine_version

    check_engine_version(vllm.__version__)
    _register_connector()
    _register_attention_backend()
    _register_window_cache()
    _wrap_configuration()
    _wrap_requests()
    _wrap_appending()
    _wrap_block_hashes()
    _wrap_model_loading()
    _registered = True


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector(CONNECTOR, "phasekv.vllm.connector", CONNECTOR)


def _register_attention_backend() -> None:
    """On the CPU only replacing ``CPU_ATTN`` itself has an effect; a GPU takes ``CUSTOM``."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, module in (("CPU_ATTN", "attention_cpu"), ("CUSTOM", "attention_cuda")):
        register_backend(
            AttentionBackendEnum[name], f"phasekv.vllm.{module}.PhaseKVAttentionBackend"
        )


def _register_window_cache() -> None:
    from phasekv.vllm.eviction import window_cache

    window_cache.register()


def _wrap_configuration() -> None:
    """Validate the settings and add the connector while the engine's configuration is made."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from phasekv.vllm.compatibility import (
        check_cuda_eviction,
        check_cuda_graphs,
        check_engine_config,
        check_eviction,
    )
    from phasekv.vllm.config import PhaseKVConfig
    from phasekv.vllm.setup import calibration_of, settings_of

    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self.additional_config)
        if settings is None:
            return original(self, *args, **kwargs)
        phasekv = PhaseKVConfig.parse(settings)
        if self.kv_transfer_config is None:
            self.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both")
        if current_platform.is_cuda():
            choose_for_cuda(self, phasekv.eviction is not None)
        config = original(self, *args, **kwargs)
        check_engine_config(config)
        if current_platform.is_cuda():
            check_cuda_graphs(config)
        if phasekv.eviction is not None:
            phasekv.eviction.check(
                config.cache_config.block_size, config.model_config.max_model_len
            )
            check_eviction(phasekv.eviction)
            if current_platform.is_cuda():
                check_cuda_eviction(config)
            calibration_of(config)
        return config

    EngineArgs.create_engine_config = create_engine_config


def choose_for_cuda(arguments: Any, evicts: bool) -> None:
    """Choose what PhaseKV needs on a GPU, where the engine's arguments say nothing.

    Parameters
    ----------
    arguments : vllm EngineArgs
        Is changed.
    evicts : bool
        Whether the engine evicts.

    Raises
    ------
    MissingCapabilityError
        In a build without kernels.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from phasekv.vllm.compatibility import check_cuda_build

    check_cuda_build()
    if evicts and arguments.async_scheduling is None:
        arguments.async_scheduling = False
    if arguments.attention_backend is None and arguments.attention_config.backend is None:
        arguments.attention_backend = AttentionBackendEnum.CUSTOM


def _wrap_requests() -> None:
    """Refuse a request's bad parameters where they become an HTTP 400 or a ValueError."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from phasekv.errors import InvalidArgumentError, UnsupportedError
    from phasekv.eviction.settings import parse_request_choice
    from phasekv.vllm.compatibility import check_eviction
    from phasekv.vllm.config import PhaseKVConfig
    from phasekv.vllm.eviction.sessions import check_session
    from phasekv.vllm.request import PARAMETER, ReuseRequest, parameters_of
    from phasekv.vllm.setup import settings_of

    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        settings = settings_of(self.vllm_config.additional_config)
        if settings is None or request.sampling_params is None:
            return request
        extra = request.sampling_params.extra_args or {}
        parameters = extra.get("kv_transfer_params")
        tokens = len(request.prompt_token_ids or ())
        config = PhaseKVConfig.parse(settings)
        try:
            ReuseRequest.parse(parameters, tokens, config)
            fields = parameters_of(parameters)
            eviction = parse_request_choice(fields.get("eviction"), config.eviction)
            check_session(fields, config.eviction is not None)
            if eviction is not None:
                eviction.check(
                    self.vllm_config.cache_config.block_size,
                    self.vllm_config.model_config.max_model_len,
                )
                check_eviction(eviction)
        except (InvalidArgumentError, UnsupportedError) as error:
            raise VLLMValidationError(
                f"kv_transfer_params.{PARAMETER}: {error}",
                parameter=f"kv_transfer_params.{PARAMETER}.{error.argument}",
                value=error.value,
            ) from error
        return request

    InputProcessor.process_inputs = process_inputs


def _wrap_appending() -> None:
    """Put a session's tokens before those of a request that appends to it."""
    from vllm.v1.engine.core import EngineCore

    from phasekv.vllm.appending import put_session_before

    original = EngineCore.preprocess_add_request

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        put_session_before(request, self.scheduler, self.vllm_config)
        return original(self, request)

    EngineCore.preprocess_add_request = preprocess_add_request


def _wrap_block_hashes() -> None:
    from vllm.v1.core import block_pool, kv_cache_utils

    from phasekv.vllm.prefix_cache import wrap_extra_keys

    wrapped = wrap_extra_keys(kv_cache_utils.generate_block_hash_extra_keys)
    kv_cache_utils.generate_block_hash_extra_keys = wrapped
    block_pool.generate_block_hash_extra_keys = wrapped


def _wrap_model_loading() -> None:
    from vllm.platforms import current_platform

    from phasekv.vllm.setup import model_loaded

    for runner in _runners(current_platform.is_cuda()):
        runner.load_model = _then(runner.load_model, model_loaded)


def _runners(is_cuda: bool) -> list[Any]:
    """The platform's model runners; on a GPU vLLM has two, and chooses."""
    if not is_cuda:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        return [CPUModelRunner]
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstGPUModelRunner

    return [GPUModelRunner, FirstGPUModelRunner]


def _then(original: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(self)
        return result

    return both
