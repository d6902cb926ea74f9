"""Chooses which questions of a data set are asked, and retrieves their notes."""

from __future__ import annotations

from collections.abc import Sequence

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.comparison import AskedQuestion
from phasekv.evaluation.memory_notes import MemoryTask
from phasekv.evaluation.retrieval import NoteRetriever


def choose_questions(tasks: Sequence[MemoryTask], count: int, notes: int) -> list[AskedQuestion]:
    """``count`` questions, spread evenly over the tasks and over each task's list.

    Each comes with its ``notes`` best notes. The choice depends on the data and the numbers only.

    Raises
    ------
    InvalidArgumentError
        If there are fewer questions than ``count``, or a task has fewer notes than ``notes``.
    """
    available = sum(len(task.questions) for task in tasks)
    if not 1 <= count <= available:
        raise InvalidArgumentError("questions", str(count), f"between 1 and {available}")
    shares = [(count + offset) // len(tasks) for offset in reversed(range(len(tasks)))]
    asked = []
    for task, share in zip(tasks, _fit(shares, tasks), strict=True):
        retriever = NoteRetriever(task.notes)
        for rank in range(share):
            # The middle of each of `share` equal stretches of the list.
            question = task.questions[(2 * rank + 1) * len(task.questions) // (2 * share)]
            found = tuple(retriever.retrieve(question.question, notes))
            asked.append(AskedQuestion(question, found))
    return asked


def _fit(shares: list[int], tasks: Sequence[MemoryTask]) -> list[int]:
    """Moves what a task with few questions cannot take to the next ones that can."""
    fitted = [min(share, len(task.questions)) for share, task in zip(shares, tasks, strict=True)]
    missing = sum(shares) - sum(fitted)
    for index, task in enumerate(tasks):
        room = min(missing, len(task.questions) - fitted[index])
        fitted[index] += room
        missing -= room
    return fitted
