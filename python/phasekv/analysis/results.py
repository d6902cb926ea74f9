"""Results of analyses as JSON and back: dataclasses of arrays, names and numbers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Result = TypeVar("Result")


def to_json(result: Any) -> dict[str, Any]:
    """The fields of a result; arrays become nested lists, in which None is not a number."""
    return {field.name: _plain(getattr(result, field.name)) for field in fields(result)}


def from_json(kind: type[Result], values: dict[str, Any]) -> Result:
    """The result of class ``kind`` whose ``to_json`` these ``values`` are."""
    return kind(**{name: _array(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        # Six digits draw the same picture, in a third of the bytes.
        return None if np.isnan(value) else float(f"{value:.6g}")
    return value


def _array(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if all(isinstance(one, str) for one in value):
        return tuple(value)
    return np.array(value, dtype=np.float64)
