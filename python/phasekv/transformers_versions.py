"""Where transformers 4.57 and 5 differ, as far as PhaseKV meets it."""

from __future__ import annotations

from typing import Any

import torch


def declared_rotation(config: Any) -> dict[str, Any]:
    """The rotation that a configuration declares, as transformers 5 writes it; empty for none.

    Before version 5 it is spread over ``rope_theta``, ``rope_scaling`` and
    ``partial_rotary_factor``; a ``rope_parameters`` that such a version found in a file means
    nothing to its models.

    Parameters
    ----------
    config : transformers config
        Of the language model.
    """
    if hasattr(config, "standardize_rope_params"):
        return dict(getattr(config, "rope_parameters", None) or {})
    theta = getattr(config, "rope_theta", None)
    if theta is None:
        return {}
    declared = {"rope_type": "default", **(getattr(config, "rope_scaling", None) or {})}
    declared["rope_theta"] = theta
    factor = getattr(config, "partial_rotary_factor", None)
    if factor is not None:
        declared["partial_rotary_factor"] = factor
    return declared


def new_tokens_of(query: int | torch.Tensor) -> int:
    """Tokens of a pass, from what ``get_mask_sizes`` receives: before version 5 their positions."""
    return query if isinstance(query, int) else query.shape[0]
