"""Which model filled a cache: no other may go on with it."""

from __future__ import annotations

import weakref
from typing import Any

from phasekv.errors import InvalidArgumentError


def claim(cache: Any, model: Any) -> None:
    """The cache is this model's from now on.

    Raises
    ------
    InvalidArgumentError
        If it was another one's.
    """
    owner = getattr(cache, "phasekv_owner", None)
    if owner is None:
        cache.phasekv_owner = weakref.ref(model)
    elif owner() is not model:
        raise InvalidArgumentError(
            "past_key_values", "a cache of another model", "one that this model has filled"
        )
