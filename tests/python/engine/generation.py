"""Greedy generation by transformers, with the logits of each step."""

from __future__ import annotations

import torch


def generated(model, tokens, mask=None, **options):
    """Logits [rows, steps, vocabulary] and all else of ``generate``, by default of six tokens."""
    answer = model.generate(
        torch.tensor(tokens),
        attention_mask=None if mask is None else torch.as_tensor(mask),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **{"max_new_tokens": 6, **options},
    )
    return torch.stack(answer.logits, dim=1), answer
