"""A model is inside one of our contexts at a time: each gives it a cache of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phasekv.errors import UnsupportedError

_INSIDE: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@contextmanager
def one_context(model: Any, name: str) -> Iterator[None]:
    """Marks the model as inside of ``name``; raises ``UnsupportedError`` if it is inside of one."""
    outer = _INSIDE.get(model)
    if outer is not None:
        raise UnsupportedError(name, f"inside of {outer}", "leave that context first")
    _INSIDE[model] = name
    try:
        yield
    finally:
        del _INSIDE[model]
