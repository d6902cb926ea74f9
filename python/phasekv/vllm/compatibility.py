"""What PhaseKV cannot be combined with, refused by name when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasekv import _core
from phasekv.errors import MissingCapabilityError, UnsupportedError
from phasekv.eviction.settings import EvictionChoice

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

SUPPORTED_ENGINE = (0, 32)


def check_engine_version(version: str) -> None:
    """Refuse an engine whose hooks were not tested.

    Parameters
    ----------
    version : str
        As in ``vllm.__version__``.
    """
    parts = version.split("+")[0].split(".")
    if tuple(int(part) for part in parts[:2]) != SUPPORTED_ENGINE:
        wanted = ".".join(map(str, SUPPORTED_ENGINE))
        raise UnsupportedError("vllm", version, f"PhaseKV's hooks are tested with vLLM {wanted}.x")


def check_engine_config(vllm_config: Any) -> None:
    """Raise ``UnsupportedError`` for the first feature that cannot be combined with PhaseKV."""
    for feature, value, remedy in _conflicts(vllm_config):
        raise UnsupportedError(feature, str(value), remedy)


def check_cuda_build() -> None:
    """Raise ``MissingCapabilityError`` where PhaseKV was built without its kernels.

    The device is looked at by the workers. An engine may be forked from this process, and where the
    driver was asked for anything before, it cannot be in the child.
    """
    if not _core.cuda_is_built():
        raise MissingCapabilityError(
            "kernels", "cuda", "PhaseKV was built without CUDA; build it where there is an nvcc"
        )


def check_cuda_graphs(vllm_config: Any) -> None:
    """Raise ``UnsupportedError`` for graphs that replay decoder layers past their hooks."""
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled

    if is_breakable_cudagraph_enabled() and not vllm_config.model_config.enforce_eager:
        raise UnsupportedError(
            "VLLM_USE_BREAKABLE_CUDAGRAPH",
            "1",
            "a step of reuse cannot leave these graphs; set VLLM_USE_BREAKABLE_CUDAGRAPH=0",
        )


def check_cuda_eviction(vllm_config: Any) -> None:
    """Raise ``UnsupportedError`` where a step's tokens are not on the host when eviction looks."""
    if vllm_config.use_v2_model_runner:
        raise UnsupportedError(
            "model runner",
            "V2",
            "eviction reads the tokens of the first runner's batch; set VLLM_USE_V2_MODEL_RUNNER=0",
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise UnsupportedError(
            "async_scheduling",
            "True",
            "phases are told from tokens before the next step; pass --no-async-scheduling",
        )


def check_eviction(choice: EvictionChoice) -> None:
    """Raise ``UnsupportedError`` for a policy whose evicted keys vLLM's blocks cannot give back."""
    if choice.build().is_ragged:
        raise UnsupportedError(
            "policy",
            choice.policy,
            "it gives layers or KV heads budgets of their own, but a block of vLLM's holds all "
            "layers and heads of its tokens, so that nothing would be freed; "
            "phasekv.transformers.evict runs it",
        )


def _conflicts(config: Any) -> Iterator[tuple[str, object, str]]:
    parallel = config.parallel_config
    cache = config.cache_config
    model = config.model_config
    text = model.hf_text_config

    for architecture in model.architectures:
        if architecture not in SUPPORTED_ARCHITECTURES:
            yield (
                "model architecture",
                architecture,
                "supported are " + ", ".join(SUPPORTED_ARCHITECTURES),
            )
    if config.speculative_config is not None:
        yield (
            "speculative_config",
            config.speculative_config.method,
            "drafted tokens can be taken back; leave --speculative-config away",
        )
    own = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", own):
        # Of a model whose files ask for another, "auto" would be that one.
        wanted = "auto" if own == "float32" else own
        yield (
            "kv_cache_dtype",
            cache.cache_dtype,
            f"keys are moved and corrected in the model's own type; use --kv-cache-dtype {wanted}",
        )
    sizes: list[tuple[str, int, str]] = [
        ("data_parallel_size", parallel.data_parallel_size, "token counts of ranks would disagree"),
        (
            "pipeline_parallel_size",
            parallel.pipeline_parallel_size,
            "rows are dropped in one stage",
        ),
        (
            "decode_context_parallel_size",
            parallel.decode_context_parallel_size,
            "a chunk's tokens must lie on one rank",
        ),
        (
            "prefill_context_parallel_size",
            getattr(parallel, "prefill_context_parallel_size", 1),
            "a chunk's tokens must lie on one rank",
        ),
    ]
    for name, size, why in sizes:
        if size > 1:
            yield name, size, f"{why}; set --{name.replace('_', '-')} 1"
    if parallel.enable_expert_parallel:
        yield (
            "enable_expert_parallel",
            True,
            "token counts of ranks would disagree; leave --enable-expert-parallel away",
        )
    if config.lora_config is not None:
        yield (
            "enable_lora",
            True,
            "adapters belong to the rows of a whole batch, of which some are dropped; leave "
            "--enable-lora away",
        )
    if getattr(parallel, "enable_dbo", False):
        yield "enable_dbo", True, "a step must be one batch; leave --enable-dbo away"
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector not in (
        None,
        "PhaseKVConnector",
    ):
        yield (
            "kv_transfer_config",
            config.kv_transfer_config.kv_connector,
            "PhaseKV brings its own connector; leave --kv-transfer-config away",
        )
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        yield (
            "sliding_window",
            text.sliding_window,
            "all layers must attend to the whole prompt",
        )
    if any(kind == "sliding_attention" for kind in getattr(text, "layer_types", None) or ()):
        yield "layer_types", "sliding_attention", "all layers must attend to the whole prompt"
    if getattr(text, "num_kv_shared_layers", 0):
        yield "num_kv_shared_layers", text.num_kv_shared_layers, "every layer needs its own cache"
    if text.num_hidden_layers < 2:
        yield "num_hidden_layers", text.num_hidden_layers, "reuse needs two layers or more"
    if model.is_multimodal_model:
        yield "multimodal model", model.model, "only text positions can be moved"
