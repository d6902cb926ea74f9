"""Which marker table fits a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.phases.table import MarkerTable, load_table, table_named, table_names
from phasekv.phases.vocabulary import TokenVocabulary, token_vocabulary

_logger = logging.getLogger(__name__)

FALLBACK_TABLE = "single_phase"
"""The table of a model without known markers."""


@dataclass(frozen=True)
class TableChoice:
    """A marker table and why it was chosen, in words for a log or a report."""

    table: MarkerTable
    reason: str


def choose_table(
    tokenizer: Any,
    chat_template: str | Mapping[str, str] | None = None,
    override: str | Path | MarkerTable | None = None,
) -> TableChoice:
    """Choose the marker table for a model.

    Parameters
    ----------
    tokenizer : Any
        The model's tokenizer, as `token_vocabulary` takes it, or its `TokenVocabulary`.
    chat_template : str | Mapping[str, str] | None
        The template as text, or several by name; by default the tokenizer's own.
    override : str | Path | MarkerTable | None
        The table to take instead: the name of one that comes with PhaseKV, the path of a JSON
        file, or a table.

    Returns
    -------
    TableChoice
        The table with the highest priority of those whose ``detect`` strings are all tokens of the
        tokenizer or in the chat template. Without one, a table under which every token is
        ``others``; a warning is logged.

    Raises
    ------
    InvalidArgumentError
        If ``override`` names no table, or its file is not one.
    UnsupportedError
        If the tokenizer's vocabulary cannot be read.
    """
    if override is not None:
        return TableChoice(_overriding_table(override), f"asked for: {_name_of(override)}")
    if chat_template is None:
        chat_template = getattr(tokenizer, "chat_template", None)
    template = _text_of(chat_template)
    vocabulary = (
        tokenizer if isinstance(tokenizer, TokenVocabulary) else token_vocabulary(tokenizer)
    )
    tables = sorted(map(table_named, table_names()), key=lambda table: -table.priority)
    for table in tables:
        if table.detect and all(
            text in vocabulary.added_tokens or text in template for text in table.detect
        ):
            found = ", ".join(
                f"{text} ({'token' if text in vocabulary.added_tokens else 'chat template'})"
                for text in table.detect
            )
            return TableChoice(table, f"found {found}")
    reason = (
        "no known markers in the tokenizer or the chat template: every token is in the phase "
        "others; a marker table of your own can change that"
    )
    _logger.warning("Phases: %s", reason)
    return TableChoice(table_named(FALLBACK_TABLE), reason)


def _overriding_table(override: str | Path | MarkerTable) -> MarkerTable:
    if isinstance(override, MarkerTable):
        return override
    if isinstance(override, Path) or override.endswith(".json"):
        return load_table(Path(override))
    return table_named(override)


def _name_of(override: str | Path | MarkerTable) -> str:
    return override.name if isinstance(override, MarkerTable) else str(override)


def _text_of(chat_template: str | Mapping[str, str] | None) -> str:
    if chat_template is None:
        return ""
    if isinstance(chat_template, str):
        return chat_template
    if isinstance(chat_template, Mapping):
        return "\n".join(chat_template.values())
    raise InvalidArgumentError(
        "chat_template", type(chat_template).__name__, "text, or texts by name"
    )
