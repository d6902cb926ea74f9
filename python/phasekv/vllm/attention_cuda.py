"""vLLM's FlashAttention backend, with PhaseKV's rows, as ``--attention-backend CUSTOM``.

It has not run on a GPU yet: the tests run it on the emulated device. What it adds to vLLM's own is
what the CPU backend adds too.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from phasekv.vllm.attention import ReuseAttention, WindowMetadata
from phasekv.vllm.eviction.window_cache import window_or_own


class PhaseKVMetadataBuilder(WindowMetadata, FlashAttentionMetadataBuilder):
    """Metadata of every step, made anew.

    A captured graph would replay attention without asking which rows run: only the parts between
    attention layers may be captured.
    """

    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False


class PhaseKVAttentionImpl(ReuseAttention, FlashAttentionImpl):
    """Attention of rows."""


class PhaseKVAttentionBackend(FlashAttentionBackend):
    """Stands beside vLLM's own, which an engine without PhaseKV keeps."""

    @staticmethod
    def get_name() -> str:
        """Of vLLM's list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """The implementation above."""
        return PhaseKVAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        """The builder above."""
        return PhaseKVMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """See ``window_or_own``."""
        return window_or_own(spec)
