"""Reads fields of JSON objects; every error names the field and its value."""

from __future__ import annotations

import importlib
from typing import Any

from phasekv.errors import InvalidArgumentError


def refuse_unknown(where: str, settings: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise ``InvalidArgumentError`` for the first key that is not ``known``."""
    for key in settings:
        if key not in known:
            raise InvalidArgumentError(
                f"{where}.{key}", repr(settings[key]), "a known key: " + ", ".join(sorted(known))
            )


def boolean(settings: dict[str, Any], key: str, default: bool) -> bool:
    """``settings[key]``, true or false."""
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgumentError(key, repr(value), "true or false")
    return value


def integer(settings: dict[str, Any], key: str, default: int, least: int) -> int:
    """``settings[key]``, a whole number of at least ``least``."""
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(key, repr(value), f"a whole number of at least {least}")
    return value


def optional_integer(
    settings: dict[str, Any], key: str, least: int, default: int | None = None
) -> int | None:
    """``settings[key]`` as ``integer`` reads it; null and absent give ``default``."""
    if settings.get(key) is None:
        return default
    return integer(settings, key, 0, least)


def optional_number(
    settings: dict[str, Any], key: str, default: float | None = None
) -> float | None:
    """``settings[key]``, any number; null and absent give ``default``."""
    value = settings.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgumentError(key, repr(value), "a number")
    return float(value)


def optional_text(settings: dict[str, Any], key: str, default: str | None = None) -> str | None:
    """``settings[key]``, text; absent gives ``default``."""
    value = settings.get(key, default)
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(key, repr(value), "text")
    return value


def load_function(name: str | None) -> Any:
    """The function that "module:name" names."""
    module, separator, attribute = (name or "").partition(":")
    if not separator:
        raise InvalidArgumentError("function", repr(name), '"module:name" of a function')
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError("function", repr(name), f"importable ({error})") from None
    if not callable(function):
        raise InvalidArgumentError("function", repr(name), "a function")
    return function
