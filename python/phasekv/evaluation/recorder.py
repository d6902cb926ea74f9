"""Records a prompt's next-token distributions inside the running engine.

vLLM's ``prompt_logprobs`` computes the logits of every prompt row and sorts the vocabulary for
each; only the few rows of an answer are wanted here. A hook on the model keeps the hidden states of
those rows, and the model's own output layer turns them into log-probabilities afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phasekv.errors import InvalidArgumentError


class AnswerRecorder:
    """Keeps the final hidden states of chosen rows of the next prompt.

    Parameters
    ----------
    model
        The model object of the worker that runs in this process. The whole prompt must go through
        it in one step: no chunked prefill, no prefix cache, one request at a time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._rows: tuple[int, int, int] | None = None
        self._hidden: torch.Tensor | None = None
        self._handle = model.register_forward_hook(self._keep)

    def close(self) -> None:
        """Takes the hook off the model."""
        self._handle.remove()

    @contextmanager
    def record(self, prompt_tokens: int, begin: int, end: int) -> Iterator[None]:
        """Inside this context the rows [begin, end) of a prompt of ``prompt_tokens`` are kept."""
        if not 0 <= begin < end <= prompt_tokens:
            raise InvalidArgumentError(
                "rows", f"[{begin}, {end})", f"a range inside the prompt of {prompt_tokens} tokens"
            )
        self._rows = (prompt_tokens, begin, end)
        self._hidden = None
        try:
            yield
        finally:
            self._rows = None

    def log_probs(self) -> torch.Tensor:
        """The recorded rows' log-probabilities: float32, [end - begin, vocabulary], in nats."""
        if self._hidden is None:
            raise RuntimeError("no prompt was recorded: run one inside record()")
        compute_logits: Any = self._model.compute_logits
        with torch.inference_mode():
            logits = compute_logits(self._hidden)
            return torch.log_softmax(logits.float(), dim=-1)

    def _keep(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        if self._rows is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        prompt_tokens, begin, end = self._rows
        self._rows = None  # later steps of the same request decode
        if hidden.shape[0] < prompt_tokens:
            raise RuntimeError(
                f"the step ran {hidden.shape[0]} rows, the prompt has {prompt_tokens}: "
                "raise max_num_batched_tokens and turn prefix caching off"
            )
        self._hidden = hidden[begin:end].clone()
