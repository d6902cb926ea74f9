"""vLLM's CPU attention backend, with PhaseKV's rows in the steps that reuse chunks.

In every other step the calls go straight to vLLM's own implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from phasekv.vllm import active


class PhaseKVAttentionImpl(CPUAttentionBackendImpl):
    """Writes and reads the cache through the core while a reuse step is active."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this layer's keys and values, [tokens, kv heads, head size] each."""
        current = active.layer(layer.layer_name)
        if current is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            step, index, kv = current
            step.write_kv(index, key, value, kv)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend; in a reuse step only the step's rows, packed at the head of ``output``."""
        current = None if attn_metadata is None else active.layer(layer.layer_name)
        if current is None:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return output
        step, index, kv = current
        step.attend(index, query, kv, self.scale, output)
        return output


class PhaseKVAttentionBackend(CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN``: vLLM's CPU platform has no other way in."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation above."""
        return PhaseKVAttentionImpl
