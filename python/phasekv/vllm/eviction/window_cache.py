"""vLLM's cache spec and block manager for requests that hold a window of their tokens.

The manager frees the blocks before ``Window.start(n)`` and admits requests by their budget; it
hears of nothing but the number of computed tokens, so scheduler and workers need no messages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from phasekv._core import Window
from phasekv.eviction.settings import EvictionChoice
from phasekv.vllm import setup
from phasekv.vllm.eviction import windows


@dataclass(frozen=True, kw_only=True)
class WindowSpec(FullAttentionSpec):
    """A layer's cache of which each request holds a window.

    Attributes
    ----------
    budget, stride : int
        Of the engine, in tokens.
    in_flight_tokens : int
        Most tokens that are scheduled and not yet settled.
    whole_prompts : bool
        Prompts are held until they are complete.
    """

    budget: int
    stride: int
    in_flight_tokens: int
    whole_prompts: bool

    @property
    def prefix_cacheable(self) -> bool:
        """Never: an event moves keys within blocks, which nobody else may then read."""
        return False

    def blocks_of(self, budget: int, max_model_len: int) -> int:
        """Most blocks that a request of this budget holds at once."""
        tokens = max_model_len
        if not self.whole_prompts:
            tokens = min(tokens, budget + self.stride - 1 + self.in_flight_tokens)
        blocks: int = cdiv(tokens, self.block_size) + 1
        return blocks

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes of this layer that the longest request needs."""
        longest = vllm_config.model_config.max_model_len
        blocks = min(self.blocks_of(self.budget, longest), cdiv(longest, self.block_size))
        size: int = blocks * self.page_size_bytes
        return size

    @classmethod
    def merge(cls, specs: list[WindowSpec]) -> WindowSpec:  # type: ignore[override]
        """The one spec of a group of layers, which all have the same."""
        assert all(spec == specs[0] for spec in specs), "layers with different windows"
        return specs[0]


def window_spec(spec: AttentionSpec, eviction: EvictionChoice, vllm_config: Any) -> AttentionSpec:
    """``spec`` with a window, if it is plain full attention."""
    if type(spec) is not FullAttentionSpec:
        return spec
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    return WindowSpec(
        **values,
        budget=eviction.budget,
        stride=eviction.stride,
        in_flight_tokens=vllm_config.max_in_flight_tokens,
        whole_prompts=eviction.compress_prompt == "end",
    )


def window_or_own(spec: Any) -> Any:
    """A window for each layer of full attention, where the engine evicts; else vLLM's own spec."""
    vllm_config = setup.loaded_config()
    eviction = setup.config_of(vllm_config).eviction if vllm_config is not None else None
    return spec if eviction is None else window_spec(spec, eviction, vllm_config)


class WindowManager(FullAttentionManager):
    """Frees what lies before a request's window."""

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._spec = kv_cache_spec
        self._engine_window = Window(budget=kv_cache_spec.budget, stride=kv_cache_spec.stride)
        self._window = self._engine_window

    def _select(self, request_id: str) -> None:
        """What follows is about this request."""
        self._window = windows.of(request_id) or self._engine_window
        if not self._spec.whole_prompts:
            # One block more than the window: the last one may be partly filled.
            tokens = self._window.budget + self._spec.stride - 1 + self._spec.in_flight_tokens
            self.max_admission_blocks_per_request = cdiv(tokens, self.block_size) + 1

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """First token of the window of the request at hand."""
        return self._window.start(num_computed_tokens)

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        """As its base, for the window of ``request_id``."""
        self._select(request_id)
        blocks: int = super().get_num_blocks_to_allocate(request_id, *args, **kwargs)
        return blocks

    def add_local_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """As its base, for the window of ``request_id``."""
        self._select(request_id)
        super().add_local_computed_blocks(request_id, *args, **kwargs)

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """As its base, for the window of ``request_id``."""
        self._select(request_id)
        super().allocate_external_computed_blocks(request_id, *args, **kwargs)

    def remove_skipped_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """As its base, for the window of ``request_id``."""
        self._select(request_id)
        super().remove_skipped_blocks(request_id, *args, **kwargs)


def register() -> None:
    """Make spec and manager known to vLLM in this process."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    # A list that already has an entry is taken for complete: vLLM's own have to come first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=WindowSpec)
