"""Memory notes in the layout of A-Mem, and the questions asked about them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.json_file import read_json


@dataclass(frozen=True)
class MemoryNote:
    """One note: what was said, and what the agent wrote down about it.

    ``links`` holds the ids of notes this one is connected to.
    """

    id: str
    timestamp: str
    content: str
    context: str
    keywords: tuple[str, ...]
    tags: tuple[str, ...]
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """A question with its gold answer and the ids of the notes that hold the evidence.

    ``category`` is LoCoMo's: 1 multi-hop, 2 temporal, 3 open-domain, 4 single-hop.
    """

    question: str
    answer: str
    evidence: tuple[str, ...]
    category: int


@dataclass(frozen=True)
class MemoryTask:
    """The notes of one conversation and the questions about it."""

    name: str
    notes: tuple[MemoryNote, ...]
    questions: tuple[Question, ...]


def render_note(note: MemoryNote) -> str:
    """The text an A-Mem agent puts into its prompt for one note.

    There is nothing between the fields and one line break after the note, as in the paper's
    reproduction code.
    """
    return (
        f"talk start time:{note.timestamp}"
        f"memory content: {note.content}"
        f"memory context: {note.context}"
        f"memory keywords: {list(note.keywords)}"
        f"memory tags: {list(note.tags)}\n"
    )


def indexed_text(note: MemoryNote) -> str:
    """The text A-Mem indexes for retrieval."""
    return (
        f"content:{note.content} context:{note.context} "
        f"keywords: {', '.join(note.keywords)} tags: {', '.join(note.tags)}"
    )


def load_memory_notes(path: Path) -> MemoryTask:
    """Reads a JSON file with ``notes`` and ``questions`` (the demo's sample has this form).

    Raises
    ------
    InvalidArgumentError
        If a field is missing, an id appears twice, or evidence names an unknown note.
    """
    raw = read_json(path, "notes")
    try:
        notes = tuple(_read_note(entry) for entry in raw["notes"])
        questions = tuple(_read_question(entry) for entry in raw["questions"])
    except KeyError as error:
        raise InvalidArgumentError(str(path), f"no field {error}", "notes and questions") from error
    known = {note.id for note in notes}
    if len(known) != len(notes):
        raise InvalidArgumentError(str(path), "a note id used twice", "one id per note")
    for question in questions:
        unknown = set(question.evidence) - known
        if unknown:
            raise InvalidArgumentError("evidence", str(sorted(unknown)), "ids of notes in the file")
    return MemoryTask(path.stem, notes, questions)


def _read_note(entry: dict[str, Any]) -> MemoryNote:
    return MemoryNote(
        id=entry["id"],
        timestamp=entry["timestamp"],
        content=entry["content"],
        context=entry["context"],
        keywords=tuple(entry["keywords"]),
        tags=tuple(entry["tags"]),
        links=tuple(entry.get("links", ())),
    )


def _read_question(entry: dict[str, Any]) -> Question:
    return Question(
        question=entry["question"],
        answer=str(entry["answer"]),
        evidence=tuple(entry["evidence"]),
        category=int(entry["category"]),
    )
