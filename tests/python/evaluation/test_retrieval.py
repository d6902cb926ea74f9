"""BM25 over notes, against the formula written out."""

import math
import subprocess
import sys

import pytest

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.memory_notes import MemoryNote
from phasekv.evaluation.retrieval import NoteRetriever


def note(name, content):
    return MemoryNote(name, "t", content, "", (), ())


NOTES = [
    note("cat", "grey cat sleeping sofa"),
    note("dog", "brown dog sleeping garden garden"),
    note("boat", "white boat harbour"),
    note("bird", "bird garden"),
]


def scores_by_hand(query):
    """Lucene's BM25 (k1 = 1.5, b = 0.75) over the words of the notes and their field names."""
    frame = ["content", "context", "keyword", "tag"]
    stems = {"sleeping": "sleep"}
    documents = [
        frame + [stems.get(word, word) for word in entry.content.split()] for entry in NOTES
    ]
    average = sum(map(len, documents)) / len(documents)
    result = []
    for words in documents:
        score = 0.0
        for term in query:
            holding = sum(term in other for other in documents)
            if holding == 0:
                continue
            weight = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            count = words.count(term)
            score += weight * count / (count + 1.5 * (0.25 + 0.75 * len(words) / average))
        result.append(score)
    return result


def test_order_is_that_of_the_formula():
    scores = scores_by_hand(["sleep", "garden"])
    expected = sorted(range(4), key=lambda index: (-scores[index], index))
    found = NoteRetriever(NOTES).retrieve("Who sleeps in the garden?", 4)
    assert [entry.id for entry in found] == [NOTES[index].id for index in expected]
    assert len(set(scores)) == 4


def test_equal_scores_keep_the_stored_order():
    found = NoteRetriever(NOTES).retrieve("zeppelin", 3)
    assert [entry.id for entry in found] == ["cat", "dog", "boat"]


@pytest.mark.parametrize("count", [0, 5])
def test_count_outside_the_notes(count):
    with pytest.raises(InvalidArgumentError, match=f"count = {count}"):
        NoteRetriever(NOTES).retrieve("cat", count)


def test_no_notes():
    with pytest.raises(InvalidArgumentError, match="notes"):
        NoteRetriever([])


def test_numba_is_not_loaded():
    # vLLM 0.32 cannot start its CPU worker in a process that has loaded numba.
    script = (
        "import sys\n"
        "from phasekv.evaluation.memory_notes import MemoryNote\n"
        "from phasekv.evaluation.retrieval import NoteRetriever\n"
        "NoteRetriever([MemoryNote('a', 't', 'one cat', '', (), ())]).retrieve('cat', 1)\n"
        "assert 'numba' not in sys.modules and 'llvmlite' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
