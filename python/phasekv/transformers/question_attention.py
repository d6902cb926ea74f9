"""Attention that a prompt's question pays to the tokens before it, summed over layers."""

from __future__ import annotations

import torch

from phasekv import _core
from phasekv.reuse.step import ReuseStep
from phasekv.reuse.stream import current_stream


class QuestionAttention:
    """Watches the pass of a prompt whose last rows are its question.

    Parameters
    ----------
    step : ReuseStep
        Of the pass; its rows are the whole prompt.
    context : int
        Tokens before the question.
    kv_heads : int
        Of the model.
    """

    def __init__(self, step: ReuseStep, context: int, kv_heads: int) -> None:
        self._block_table = step.batch.block_table[0]
        self._question = step.batch.rows - context
        self._context = context
        device = step.batch.device
        self._limits = torch.full((self._question,), context, device=device)
        self._phases = torch.zeros(self._question, dtype=torch.int32, device=device)
        self._sums = torch.zeros(1, kv_heads, context, device=device)
        self._layers = 0

    def layer(self, query: torch.Tensor, kv: _core.PagedKV, scale: float) -> None:
        """Add a layer.

        Parameters
        ----------
        query : torch.Tensor
            [rows, query heads, head size] after RoPE, the question's last.
        kv : phasekv._core.PagedKV
            The layer's blocks, complete up to the question.
        scale : float
            Of the logits.
        """
        _core.accumulate_attention(
            query=query[-self._question :],
            query_limits=self._limits,
            query_phases=self._phases,
            key=kv.key,
            block_table=self._block_table,
            first_token=0,
            tokens=self._context,
            scale=scale,
            sums=self._sums,
            stream=current_stream(self._sums.device),
        )
        self._layers += 1

    @property
    def mean(self) -> torch.Tensor:
        """Over layers, query heads and the question's tokens, float32 [context].

        Of their softmax over the keys before the question.
        """
        return self._sums[0].mean(0) / (self._layers * self._question)
