"""One prompt through a transformers model, of which only some rows run in the upper layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from phasekv.errors import UnsupportedError
from phasekv.reuse.step import CHECK_LAYER, ReuseStep
from phasekv.transformers.attention import ATTENTION
from phasekv.transformers.paged_blocks import PagedBlocks
from phasekv.transformers.question_attention import QuestionAttention

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose decoder layers are norm, attention, norm, feed-forward with two residuals."""


def check_family(model: Any) -> None:
    """Raise ``UnsupportedError`` for a model whose layers are built otherwise."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise UnsupportedError("model", kind, "reuse runs in " + ", ".join(FAMILIES))
    if model.config.num_hidden_layers <= CHECK_LAYER:
        raise UnsupportedError("model", kind, "a decoder with two layers or more")


@torch.no_grad()
def run_prompt(
    model: Any,
    tokens: torch.Tensor,
    step: ReuseStep,
    blocks: PagedBlocks,
    question: QuestionAttention | None = None,
) -> None:
    """Fill the blocks with the keys and values of a prompt, or of what follows its beginning.

    Parameters
    ----------
    model : transformers model
        Of one of ``FAMILIES``.
    tokens : torch.Tensor
        int64 [tokens], all rows of the step.
    step : ReuseStep
        Which rows run in which layer.
    blocks : PagedBlocks
        With room for every slot of the step.
    question : QuestionAttention or None
        Is shown every layer.
    """
    decoder = model.model
    hidden = decoder.embed_tokens(tokens)
    cosines, sines = decoder.rotary_emb(hidden[None], step.batch.positions[None])
    hidden = hidden[step.rows_entering(0)]
    cache = _StepCache(step, blocks, question)
    previous = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        for index, layer in enumerate(decoder.layers):
            rows = step.rows_entering(index)
            if len(rows) == 0:  # the whole prompt is reused, and layers take no empty batch
                kv = blocks.kv(index)
                none = hidden.new_empty((0, kv.num_heads, kv.head_size))
                step.write_kv(index, none, none, kv)
                continue
            attended, _ = layer.self_attn(
                hidden_states=layer.input_layernorm(hidden)[None],
                position_embeddings=(cosines[:, rows], sines[:, rows]),
                attention_mask=None,
                past_key_values=cache,
            )
            hidden = hidden + attended[0]
            if index == CHECK_LAYER:
                hidden = hidden[step.kept_at_check]
            # A mixture of experts wants [batch, tokens, hidden size], and may return logits too.
            out = layer.mlp(layer.post_attention_layernorm(hidden)[None])
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)[0]
    finally:
        model.set_attn_implementation(previous)


def dynamic_cache(blocks: PagedBlocks, slots: torch.Tensor) -> DynamicCache:
    """Keys and values at ``slots`` as transformers' own cache, for ``generate`` to go on with."""
    cache = DynamicCache()
    for layer in range(blocks.num_layers):
        keys, values = (
            rows.transpose(0, 1)[None].contiguous() for rows in blocks.rows(layer, slots)
        )
        cache.update(keys, values, layer)
    return cache


class _StepCache:
    """Stands where a layer looks for its cache; keys and values go into blocks."""

    def __init__(
        self, step: ReuseStep, blocks: PagedBlocks, question: QuestionAttention | None
    ) -> None:
        self._step = step
        self._blocks = blocks
        self._question = question

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [1, kv heads, rows, head size]."""
        key_rows, value_rows = (states[0].transpose(0, 1).contiguous() for states in (keys, values))
        self._step.write_kv(layer, key_rows, value_rows, self._blocks.kv(layer))
        keys.phasekv_cache = self  # type: ignore[attr-defined]
        return keys, values

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of ``query`` [1, query heads, rows, head size]; zero for rows that stop here.

        Returns ``[1, rows, query heads, head size]``.
        """
        rows = query[0].transpose(0, 1).contiguous()
        if self._question is not None:
            self._question.layer(rows, self._blocks.kv(layer), scale)
        out = torch.zeros_like(rows)
        self._step.attend(layer, rows, self._blocks.kv(layer), scale, out)
        if layer == CHECK_LAYER:
            assert self._step.kept_at_check is not None
            attended, out = out[: len(self._step.active)], torch.zeros_like(rows)
            out[self._step.kept_at_check] = attended
        return out[None]
