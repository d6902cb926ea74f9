"""Questions spread over tasks."""

import pytest

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.memory_notes import MemoryNote, MemoryTask, Question
from phasekv.evaluation.question_choice import choose_questions


def task(name, questions):
    notes = tuple(
        MemoryNote(f"{name}{index}", "t", f"word{index}", "", (), ()) for index in range(9)
    )
    asked = tuple(
        Question(f"What about word{index % 9}?", name, (f"{name}{index % 9}",), 4)
        for index in range(questions)
    )
    return MemoryTask(name, notes, asked)


def test_even_over_tasks_and_over_their_lists():
    asked = choose_questions([task("a", 10), task("b", 20)], 6, 8)
    assert [row.question.answer for row in asked] == ["a"] * 3 + ["b"] * 3
    assert [row.question.question for row in asked[:3]] == [
        "What about word1?",
        "What about word5?",
        "What about word8?",
    ]


def test_a_small_task_leaves_its_share_to_others():
    asked = choose_questions([task("a", 1), task("b", 20)], 8, 8)
    assert [row.question.answer for row in asked].count("b") == 7
    assert len({row.question.question for row in asked}) > 1


def test_notes_are_the_best_ones_and_evidence_is_found():
    for row in choose_questions([task("a", 9)], 9, 8):
        assert len(row.notes) == 8
        assert row.notes[0].id == row.question.evidence[0]
        assert row.evidence_recall == 1.0


def test_all_questions_once():
    asked = choose_questions([task("a", 7)], 7, 1)
    assert len({row.question for row in asked}) == 7


@pytest.mark.parametrize("count", [0, 31])
def test_count_outside_the_data(count):
    with pytest.raises(InvalidArgumentError, match=f"questions = {count}"):
        choose_questions([task("a", 10), task("b", 20)], count, 8)
