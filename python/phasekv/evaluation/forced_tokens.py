"""A logits processor that makes a request answer with given tokens.

So a recorded trajectory can be replayed through the decoding engine. vLLM reports log-probabilities
from before logits processors: those of a forced token are what the model thought of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from phasekv.evaluation.server_replay import FORCED_TOKENS


class ForcedTokens(AdapterLogitsProcessor):
    """Makes the n-th token of an answer the n-th forced one; after the last one it is free."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what is no list of token ids."""
        tokens = (sampling_params.extra_args or {}).get(FORCED_TOKENS)
        if tokens is not None and (
            not isinstance(tokens, list)
            or not all(type(token) is int and token >= 0 for token in tokens)
        ):
            raise VLLMValidationError(
                f"{FORCED_TOKENS}: expected a list of token ids",
                parameter=FORCED_TOKENS,
                value=tokens,
            )

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling has to see it."""
        return False

    def new_req_logits_processor(
        self, params: Any
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The processor of one request; None if it forces nothing."""
        tokens = (params.extra_args or {}).get(FORCED_TOKENS)
        return _forcing(tokens) if tokens else None


def _forcing(tokens: list[int]) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def process(answered: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(answered) < len(tokens):
            token = tokens[len(answered)]
            logits.fill_(float("-inf"))
            logits[token] = 0.0
        return logits

    return process
