"""A marker table made ready for one tokenizer."""

from __future__ import annotations

import re
from typing import Any

from phasekv import _core
from phasekv.errors import InvalidArgumentError
from phasekv.phases.table import MarkerTable
from phasekv.phases.vocabulary import TokenVocabulary, token_vocabulary


def compile_table(table: MarkerTable, tokenizer: Any) -> _core.MarkerAutomaton:
    """Make the automaton that trackers share.

    Text of the table's ``special_tokens`` becomes token ids wherever the tokenizer has them as
    tokens. Everything else is matched byte by byte.

    Parameters
    ----------
    table : MarkerTable
        From `choose_table`, `table_named` or `load_table`.
    tokenizer : Any
        The model's tokenizer, as `token_vocabulary` takes it, or its `TokenVocabulary`.

    Raises
    ------
    InvalidArgumentError
        If a marker could never match: it has a control token of the tokenizer that the table does
        not list, or an id beyond the vocabulary.
    UnsupportedError
        If the tokenizer's vocabulary cannot be read.
    """
    vocabulary = (
        tokenizer if isinstance(tokenizer, TokenVocabulary) else token_vocabulary(tokenizer)
    )
    states = list(table.states)
    return _core.MarkerAutomaton(
        states=list(table.states.items()),
        initial_state=states.index(table.initial_state),
        markers=[
            (
                [_pieces(spelling, table, vocabulary) for spelling in marker.spellings],
                [states.index(state) for state in marker.in_states],
                states.index(marker.to),
            )
            for marker in table.markers
        ],
        completing_token=table.completing_token,
        vocabulary_bytes=vocabulary.data,
        vocabulary_offsets=vocabulary.offsets.tolist(),
    )


def _pieces(
    spelling: str | tuple[int, ...], table: MarkerTable, vocabulary: TokenVocabulary
) -> list[bytes | int]:
    if isinstance(spelling, tuple):
        for token in spelling:
            if token >= len(vocabulary):
                raise InvalidArgumentError(
                    f"tokens of marker table {table.name}",
                    str(token),
                    f"ids below the vocabulary's size, {len(vocabulary)}",
                )
        return list(spelling)
    known = [name for name in table.special_tokens if name in vocabulary.added_tokens]
    if not known:
        return [_text_piece(spelling, table, vocabulary)]
    longest_first = sorted(known, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", spelling)
    return [
        vocabulary.added_tokens[part] if part in known else _text_piece(part, table, vocabulary)
        for part in parts
        if part
    ]


def _text_piece(text: str, table: MarkerTable, vocabulary: TokenVocabulary) -> bytes:
    for name in vocabulary.control_tokens:
        if name in text:
            raise InvalidArgumentError(
                f"special_tokens of marker table {table.name}",
                str(list(table.special_tokens)),
                f"also {name!r}, which marker {text!r} has and which is a control token of the "
                "tokenizer, not text",
            )
    return text.encode()
