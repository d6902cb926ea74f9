"""LoCoMo's format, with a conversation written for this test."""

import json

import pytest

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.locomo import load_locomo

CONVERSATION = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ana",
        "speaker_b": "Ben",
        "session_2_date_time": "9 am on 2 May, 2024",
        "session_2": [{"speaker": "Ben", "dia_id": "D2:1", "text": "My bicycle is repaired."}],
        "session_1_date_time": "8 am on 1 May, 2024",
        "session_1": [
            {"speaker": "Ana", "dia_id": "D1:1", "text": "Look at my yard, my yard!"},
            {
                "speaker": "Ben",
                "dia_id": "D1:2",
                "text": "Nice",
                "blip_caption": "a photo of roses",
            },
        ],
        "session_3_date_time": "never",
        "session_3": [],
    },
    "observation": {
        "session_1_observation": {"Ana": [["Ana has a garden.", "D1:1"], ["It is new.", "D1:1"]]},
        "session_2_observation": {"Ben": [["Ben owns a bicycle.", ["D2:1", "D1:2"]]]},
    },
    "qa": [
        {"question": "What has Ana?", "answer": "a garden", "evidence": ["D1:1"], "category": 4},
        {"question": "Which year?", "answer": 2024, "evidence": ["D1:1; D2:1"], "category": 2},
        {"question": "Who?", "answer": "Ben", "evidence": ["D9:9"], "category": 1},
        {"question": "No?", "adversarial_answer": "x", "evidence": ["D1:1"], "category": 5},
    ],
}


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([CONVERSATION]))
    (task,) = load_locomo(path)
    return task


def test_one_note_per_turn_in_order_of_the_sessions(task):
    assert [note.id for note in task.notes] == ["D1:1", "D1:2", "D2:1"]
    assert task.notes[0].content == "Speaker Anasays : Look at my yard, my yard!"
    assert task.notes[0].timestamp == "8 am on 1 May, 2024"
    assert task.notes[1].content == "Speaker Bensays : Nice and shared a photo of roses."
    assert task.notes[2].tags == ("conversation", "ben", "session 2")


def test_context_is_the_observation_or_plain(task):
    assert task.notes[0].context == "Ana has a garden. It is new."
    assert task.notes[1].context == "Ben owns a bicycle."


def test_plain_context_without_an_observation(tmp_path):
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([{**CONVERSATION, "observation": {}}]))
    (task,) = load_locomo(path)
    assert task.notes[0].context == "Ana talks with Ben."


def test_keywords_are_the_most_specific_words(task):
    # "yard" twice in one of three turns: 2 ln 3; "look" once: ln 3.
    assert task.notes[0].keywords == ("yard", "look")
    assert task.notes[2].keywords == ("bicycle", "repaired")


def test_questions_of_four_categories(task):
    assert [question.category for question in task.questions] == [4, 2, 1]
    assert task.questions[1].answer == "2024"
    assert task.questions[1].evidence == ("D1:1", "D2:1")
    assert task.questions[2].evidence == ()


@pytest.mark.parametrize("content", [{}, [{"qa": []}], [1]])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgumentError, match="locomo = "):
        load_locomo(path)
