"""The layout of a note and the sample that comes with the demo."""

import json
from importlib.resources import as_file, files

import pytest

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.memory_notes import (
    MemoryNote,
    indexed_text,
    load_memory_notes,
    render_note,
)

NOTE = MemoryNote(
    id="n0",
    timestamp="2:10 pm on 4 March, 2024",
    content="Speaker Mariasays : I booked the class.",
    context="Maria enrolled.",
    keywords=("class", "evening"),
    tags=("hobby",),
)


def test_rendering_has_no_separators_and_one_line_break():
    assert render_note(NOTE) == (
        "talk start time:2:10 pm on 4 March, 2024memory content: Speaker Mariasays : I booked the "
        "class.memory context: Maria enrolled.memory keywords: ['class', 'evening']memory tags: "
        "['hobby']\n"
    )


def test_indexed_text():
    assert indexed_text(NOTE) == (
        "content:Speaker Mariasays : I booked the class. context:Maria enrolled. "
        "keywords: class, evening tags: hobby"
    )


@pytest.fixture(scope="module")
def sample():
    with as_file(files("phasekv.demo").joinpath("memory_notes.json")) as path:
        return load_memory_notes(path)


def test_sample_is_large_enough_for_the_demo(sample):
    assert len(sample.notes) >= 40
    assert len(sample.questions) >= 10
    assert len({render_note(note) for note in sample.notes}) == len(sample.notes)


def test_sample_answers_stand_in_their_evidence(sample):
    notes = {note.id: note for note in sample.notes}
    for question in sample.questions:
        text = " ".join(
            notes[name].timestamp + " " + notes[name].content for name in question.evidence
        ).lower()
        words = [word.strip(",.").lower() for word in question.answer.split()]
        telling = [word for word in words if word not in ("the", "and", "on", "was", "because")]
        assert question.evidence
        assert all(word in text for word in telling), question.question


def test_links_lead_to_notes(sample):
    known = {note.id for note in sample.notes}
    assert all(set(note.links) <= known - {note.id} for note in sample.notes)


def written(tmp_path, change):
    note = {
        "id": "a",
        "timestamp": "t",
        "content": "c",
        "context": "x",
        "keywords": ["k"],
        "tags": ["g"],
    }
    question = {"question": "q", "answer": 7, "evidence": ["a"], "category": 4}
    data = {"notes": [note], "questions": [question]}
    change(data)
    path = tmp_path / "notes.json"
    path.write_text(json.dumps(data))
    return path


def test_answers_become_text(tmp_path):
    task = load_memory_notes(written(tmp_path, lambda data: None))
    assert task.questions[0].answer == "7"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["notes"][0].pop("context"),
        lambda data: data["notes"].append(data["notes"][0]),
        lambda data: data["questions"][0].update(evidence=["b"]),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change):
    with pytest.raises(InvalidArgumentError):
        load_memory_notes(written(tmp_path, change))
