"""Marker tables: what a chat template tells of the phase of each token.

A table is a JSON file with these fields; `docs/phases.md` explains them.

``name``, ``description``, ``families``
    For people: what the table is called, and which models it is for.
``detect``, ``priority``
    Strings that a tokenizer has as tokens or its chat template contains, all of them, if the table
    is for it. Tables with a higher priority are asked first. An empty list is never chosen.
``special_tokens``
    Strings that are matched by token id wherever the tokenizer has a token for them.
``states``, ``initial_state``
    Phase of each state, and the state before the first token.
``markers``
    Each has ``text`` (one string or several alternatives) or ``tokens`` (alternative lists of
    token ids), ``to`` (the state from its end on) and perhaps ``in`` (the states it counts in).
``completing_token``
    ``left`` (the default) or ``entered``: the phase of the token that completes a marker.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from phasekv import _core
from phasekv.errors import InvalidArgumentError

_TABLES = resources.files("phasekv.phases") / "tables"


@dataclass(frozen=True)
class Marker:
    """One marker of a table.

    Parameters
    ----------
    spellings : tuple[str | tuple[int, ...], ...]
        Alternatives, each as text or as token ids.
    to : str
        State from the marker's end on.
    in_states : tuple[str, ...]
        States in which it counts; empty means all.
    """

    spellings: tuple[str | tuple[int, ...], ...]
    to: str
    in_states: tuple[str, ...] = ()


@dataclass(frozen=True)
class MarkerTable:
    """A model family's markers; the module's docstring explains the fields."""

    name: str
    states: dict[str, str]
    initial_state: str
    markers: tuple[Marker, ...] = ()
    special_tokens: tuple[str, ...] = ()
    completing_token: str = "left"
    detect: tuple[str, ...] = ()
    priority: int = 0
    families: tuple[str, ...] = ()
    description: str = ""


def table_names() -> list[str]:
    """Names of the tables that come with PhaseKV, sorted."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _TABLES.iterdir()
        if entry.name.endswith(".json")
    )


@cache
def table_named(name: str) -> MarkerTable:
    """A table that comes with PhaseKV.

    Raises
    ------
    InvalidArgumentError
        If there is none of this name.
    """
    if name not in table_names():
        raise InvalidArgumentError(
            "marker table", repr(name), f"one of {', '.join(table_names())}, or a path to a file"
        )
    text = (_TABLES / f"{name}.json").read_text(encoding="utf-8")
    return parse_table(json.loads(text), f"{name}.json")


def load_table(path: Path) -> MarkerTable:
    """A table from a file of one's own.

    Raises
    ------
    InvalidArgumentError
        If the file cannot be read, is not JSON, or a field is wrong: the error names file, field
        and value.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("marker table", str(path), f"a JSON file ({error})") from error
    return parse_table(content, str(path))


def parse_table(content: Any, source: str) -> MarkerTable:
    """Check a table's content and read it.

    Parameters
    ----------
    content : Any
        The parsed JSON.
    source : str
        What error messages call it, such as the file's path.
    """
    root = _Field(source, content, is_root=True)
    root.check_object(
        required={"name", "states", "initial_state", "markers"},
        optional={
            "description",
            "families",
            "detect",
            "priority",
            "special_tokens",
            "completing_token",
        },
    )
    states = {
        state: root["states"][state].one_of(_core.phase_names())
        for state in root["states"].object_keys()
    }
    names = list(states)
    return MarkerTable(
        name=root["name"].text(),
        states=states,
        initial_state=root["initial_state"].one_of(names),
        markers=tuple(_parse_marker(marker, names) for marker in root["markers"].items()),
        special_tokens=root.texts("special_tokens"),
        completing_token=(
            root["completing_token"].one_of(["left", "entered"])
            if "completing_token" in content
            else "left"
        ),
        detect=root.texts("detect"),
        priority=root["priority"].integer() if "priority" in content else 0,
        families=root.texts("families"),
        description=root["description"].text() if "description" in content else "",
    )


def _parse_marker(marker: _Field, states: list[str]) -> Marker:
    marker.check_object(required={"to"}, optional={"in", "text", "tokens"})
    if ("text" in marker.value) == ("tokens" in marker.value):
        marker.refuse("either text or tokens")
    spellings: list[str | tuple[int, ...]]
    if "tokens" in marker.value:
        spellings = [
            tuple(token.integer(minimum=0) for token in spelling.items(at_least_one=True))
            for spelling in marker["tokens"].items(at_least_one=True)
        ]
    elif isinstance(marker["text"].value, list):
        spellings = [text.text() for text in marker["text"].items(at_least_one=True)]
    else:
        spellings = [marker["text"].text()]
    in_states: tuple[str, ...] = ()
    if "in" in marker.value:
        in_states = tuple(state.one_of(states) for state in marker["in"].items(at_least_one=True))
    return Marker(tuple(spellings), marker["to"].one_of(states), in_states)


@dataclass(frozen=True)
class _Field:
    """A value of the file, with the path to it for error messages."""

    path: str
    value: Any
    is_root: bool = False

    def refuse(self, expected: str) -> NoReturn:
        shown = json.dumps(self.value, ensure_ascii=False)
        raise InvalidArgumentError(self.path, shown[:200], expected)

    def _checked(self, check: Callable[[Any], bool], expected: str) -> Any:
        if not check(self.value):
            self.refuse(expected)
        return self.value

    def __getitem__(self, key: str) -> _Field:
        separator = ": " if self.is_root else "."
        return _Field(f"{self.path}{separator}{key}", self.value[key])

    def object_keys(self) -> list[str]:
        """Keys of a JSON object that is not empty."""
        return list(self._checked(lambda v: isinstance(v, dict) and bool(v), "a JSON object"))

    def check_object(self, required: set[str], optional: set[str]) -> None:
        self._checked(lambda value: isinstance(value, dict), "a JSON object")
        if missing := sorted(required - set(self.value)):
            self.refuse(f"a field {missing[0]!r}")
        if unknown := sorted(set(self.value) - required - optional):
            known = ", ".join(sorted(required | optional))
            raise InvalidArgumentError(self.path, repr(unknown[0]), f"only the fields {known}")

    def items(self, at_least_one: bool = False) -> list[_Field]:
        values = self._checked(lambda value: isinstance(value, list), "a list")
        if at_least_one and not values:
            self.refuse("a list with at least one entry")
        return [_Field(f"{self.path}[{i}]", value) for i, value in enumerate(values)]

    def text(self) -> str:
        value = self._checked(lambda v: isinstance(v, str) and bool(v), "text that is not empty")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings that may be missing."""
        return tuple(item.text() for item in self[key].items()) if key in self.value else ()

    def one_of(self, names: list[str]) -> str:
        return str(self._checked(lambda value: value in names, f"one of {', '.join(names)}"))

    def integer(self, minimum: int | None = None) -> int:
        def check(value: Any) -> bool:
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            return is_integer and (minimum is None or value >= minimum)

        return int(self._checked(check, "an integer" if minimum is None else f">= {minimum}"))
