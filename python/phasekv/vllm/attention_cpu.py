"""vLLM's CPU attention backend, with PhaseKV's rows and PhaseKV's windows."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from phasekv.vllm.attention import ReuseAttention, WindowMetadata
from phasekv.vllm.eviction.window_cache import window_or_own


class PhaseKVMetadataBuilder(WindowMetadata, CPUAttentionMetadataBuilder):
    """Metadata of windows."""


class PhaseKVAttentionImpl(ReuseAttention, CPUAttentionBackendImpl):
    """Attention of rows."""


class PhaseKVAttentionBackend(CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN``: vLLM's CPU platform has no other way in."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation above."""
        return PhaseKVAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The builder above."""
        return PhaseKVMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """See ``window_or_own``."""
        return window_or_own(spec)
