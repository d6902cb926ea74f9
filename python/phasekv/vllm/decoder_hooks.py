"""Drops rows inside the model's decoder layers, for one step, without touching the model's code.

The hooks are installed for a reuse step only and removed after it, and that step bypasses the
compiled graph: hooks that a compiled graph had traced in their idle state would be ignored later.
"""

from __future__ import annotations

from typing import Any

import torch

from phasekv.errors import UnsupportedError
from phasekv.reuse.step import CHECK_LAYER, ReuseStep

LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class DecoderHooks:
    """Finds the decoder layers of a loaded model and installs the hooks of a step.

    Parameters
    ----------
    model : torch.nn.Module
        A vLLM causal language model.

    Raises
    ------
    UnsupportedError
        When its layers are not built as expected; a hook in the wrong place would be silent.
    """

    def __init__(self, model: Any) -> None:
        inner = getattr(model, "model", None)
        layers = list(getattr(inner, "layers", ()))
        name = type(model).__name__
        if len(layers) <= CHECK_LAYER:
            raise UnsupportedError("model", name, "a decoder with two layers or more")
        for layer in layers:
            missing = [part for part in LAYER_PARTS if not hasattr(layer, part)]
            if missing or not hasattr(layer.self_attn, "attn"):
                raise UnsupportedError("model", name, f"decoder layers with {LAYER_PARTS}")
        self.layers = layers
        self._handles: list[Any] = []

    @property
    def rotary_module(self) -> Any:
        """The rotary embedding of the first layer; all layers share one."""
        return self.layers[0].self_attn.rotary_emb

    def install(self, step: ReuseStep) -> None:
        """Make the next forward pass drop the step's rows."""
        self.remove()
        for index, layer in enumerate(self.layers):
            self._handles.append(layer.register_forward_pre_hook(_enter(step, index)))
        check = self.layers[CHECK_LAYER]
        self._handles.append(
            check.self_attn.attn.register_forward_hook(
                lambda module, args, output: output[: len(step.active)]
            )
        )
        self._handles.append(
            check.post_attention_layernorm.register_forward_pre_hook(
                lambda module, args: (args[0], args[1][step.kept_at_check])
            )
        )
        self._handles.append(self.layers[-1].register_forward_hook(_leave(step)))

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _enter(step: ReuseStep, index: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        positions, hidden, residual = args
        step.total_rows = positions.shape[0]
        rows = step.rows_entering(index)
        if index == 0 and len(rows) != hidden.shape[0]:
            hidden = hidden[rows]
        # The model's loop hands every layer the positions of all rows.
        return positions[rows], hidden, residual

    return hook


def _leave(step: ReuseStep) -> Any:
    def hook(
        module: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = output
        all_hidden = hidden.new_zeros(step.total_rows, hidden.shape[1])
        all_residual = residual.new_zeros(step.total_rows, residual.shape[1])
        all_hidden[step.active] = hidden
        all_residual[step.active] = residual
        return all_hidden, all_residual

    return hook
