"""Records a prompt's next-token distributions inside the running engine.

vLLM's ``prompt_logprobs`` computes the logits of every prompt row and sorts the vocabulary for
each; only a few rows are wanted here. A hook on the model keeps the hidden states of those rows,
and the model's own output layer turns them into log-probabilities afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        return log_probs_of(self._model, self._hidden)

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


class RowRecorder:
    """Keeps the final hidden states of chosen rows of a prompt that takes any number of steps.

    Parameters
    ----------
    model
        The model object of the worker that runs in this process, called with ``positions``. One
        request at a time, and no prefix cache.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._wanted: torch.Tensor | None = None
        self._next = 0
        self._kept: list[torch.Tensor] = []
        self._handle = model.register_forward_hook(self._keep, with_kwargs=True)

    def close(self) -> None:
        """Takes the hook off the model."""
        self._handle.remove()

    @contextmanager
    def record(self, positions: Sequence[int]) -> Iterator[None]:
        """Inside this context the rows at ``positions`` of the next prompt are kept.

        The positions are distinct and ascend.
        """
        wanted = torch.as_tensor(positions, dtype=torch.int64)
        if len(wanted) == 0 or wanted[0] < 0 or bool((wanted.diff() <= 0).any()):
            raise InvalidArgumentError("positions", str(positions), "ascending positions")
        self._wanted, self._next, self._kept = wanted, 0, []
        try:
            yield
        finally:
            self._wanted = None

    def hidden(self) -> torch.Tensor:
        """The recorded rows: ``[positions, hidden size]``, in the model's dtype."""
        if not self._kept:
            raise RuntimeError("no prompt was recorded: run one inside record()")
        return torch.cat(self._kept)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of recorded rows: float32, [rows, vocabulary], in nats."""
        return log_probs_of(self._model, hidden)

    def _keep(
        self, _module: torch.nn.Module, _arguments: Any, named: dict[str, Any], output: Any
    ) -> None:
        if self._wanted is None:
            return
        positions = named["positions"]
        begin, end = self._next, self._next + len(positions)
        if int(positions[0]) != begin or int(positions[-1]) != end - 1:
            raise RuntimeError(
                f"the step ran positions {int(positions[0])} to {int(positions[-1])} instead of "
                f"{begin} to {end - 1}: run one request at a time, without a prefix cache"
            )
        self._next = end
        hidden = output[0] if isinstance(output, tuple) else output
        here = self._wanted[(self._wanted >= begin) & (self._wanted < end)]
        self._kept.append(hidden[here - begin].clone())


def log_probs_of(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """What the model's output layer makes of final hidden states, as float32 log-probabilities."""
    compute_logits: Any = model.compute_logits
    with torch.inference_mode():
        return torch.log_softmax(compute_logits(hidden).float(), dim=-1)
