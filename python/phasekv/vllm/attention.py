"""What PhaseKV's attention does alike on every device.

The rows are those of steps that reuse chunks, the windows those of engines that evict. Every other
step goes straight to vLLM's own implementation, which stands behind these classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phasekv.vllm import active

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder
else:
    AttentionImpl = AttentionMetadataBuilder = object


class WindowMetadata(AttentionMetadataBuilder):
    """Goes before a builder of vLLM's: shows its kernel the windows that requests hold."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Metadata of a step."""
        evictions = active.evictions()
        if evictions is not None:
            common_attn_metadata = evictions.window_metadata(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class ReuseAttention(AttentionImpl):
    """Goes before an implementation of vLLM's.

    Writes and reads the cache through the core while a reuse step is active.
    """

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
        if attn_metadata is None:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            return output
        current = active.layer(layer.layer_name)
        query_rows = None
        if current is None:
            super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        else:
            step, index, kv = current
            step.attend(index, query, kv, self.scale, output)
            query_rows = step.query_rows(index)
        evictions = active.evictions()
        if evictions is not None:
            evictions.layer(layer.layer_name, query, query_rows)
        return output
