"""Finds the notes that belong to a question: BM25 from the ``bm25s`` library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import Stemmer

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.memory_notes import MemoryNote, indexed_text


class NoteRetriever:
    """A BM25 index over notes."""

    def __init__(self, notes: Sequence[MemoryNote]) -> None:
        if not notes:
            raise InvalidArgumentError("notes", "[]", "at least one note")
        self._library = _bm25s()
        self._notes = list(notes)
        self._stemmer = Stemmer.Stemmer("english")
        self._index = self._library.BM25(backend="numpy")
        words = [self._words(indexed_text(note)) for note in notes]
        self._index.index(words, show_progress=False)

    def retrieve(self, question: str, count: int) -> list[MemoryNote]:
        """The ``count`` best notes, best first; notes of equal score keep their stored order."""
        if not 1 <= count <= len(self._notes):
            raise InvalidArgumentError("count", str(count), f"between 1 and {len(self._notes)}")
        words = self._index.get_tokens_ids(self._words(question))
        scores = self._index.get_scores_from_ids(words) if words else [0.0] * len(self._notes)
        ranked = sorted(range(len(self._notes)), key=lambda index: (-float(scores[index]), index))
        return [self._notes[index] for index in ranked[:count]]

    def _words(self, text: str) -> list[str]:
        words: list[list[str]] = self._library.tokenize(
            text, stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False
        )
        return words[0]


def _bm25s() -> Any:
    """The library, imported without its optional use of numba.

    vLLM 0.32 scans every loaded module when its CPU worker starts and fails on the objects of
    numba's LLVM binding, so numba must not be loaded before vLLM. An index of a few hundred notes
    does not need it.
    """
    if "bm25s" in sys.modules or "numba" in sys.modules:
        import bm25s

        return bm25s
    sys.modules["numba"] = None  # type: ignore[assignment]
    try:
        import bm25s
    finally:
        del sys.modules["numba"]
    return bm25s
