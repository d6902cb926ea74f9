"""Reads LoCoMo, a benchmark of very long conversations, as memory notes in A-Mem's layout.

LoCoMo is licensed for non-commercial use only, so its file is given by path and never shipped.

One note is one dialogue turn, as in A-Mem. A-Mem asks a language model for a note's context,
keywords and tags; here they come from the file itself, so that a run is reproducible: the context
is the turn's *observation* from the file where there is one, the keywords are the turn's most
specific words (by TF-IDF over the conversation), the tags name the kind, speaker and session.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.json_file import read_json
from phasekv.evaluation.memory_notes import MemoryNote, MemoryTask, Question

ANSWERABLE_CATEGORIES = (1, 2, 3, 4)
_KEYWORDS_PER_NOTE = 4
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{3,}")
_EVIDENCE = re.compile(r"D\d+:\d+")


def load_locomo(path: Path) -> list[MemoryTask]:
    """One task per conversation, with the questions of categories 1 to 4.

    Category 5 (adversarial) has no gold answer and is left out.

    Raises
    ------
    InvalidArgumentError
        If the file is not a list of LoCoMo conversations.
    """
    raw = read_json(path, "locomo")
    if not isinstance(raw, list) or not all(
        isinstance(entry, dict) and {"conversation", "qa", "sample_id"} <= entry.keys()
        for entry in raw
    ):
        raise InvalidArgumentError("locomo", str(path), "LoCoMo's JSON, a list of conversations")
    return [_read_conversation(entry) for entry in raw]


def _read_conversation(entry: dict[str, Any]) -> MemoryTask:
    conversation = entry["conversation"]
    observations = _observations(entry.get("observation", {}))
    turns = [
        (session, conversation[f"session_{session}_date_time"], turn)
        for session in _sessions(conversation)
        for turn in conversation[f"session_{session}"]
    ]
    texts = [_turn_text(turn) for _, _, turn in turns]
    keywords = _most_specific_words(texts)
    notes = tuple(
        MemoryNote(
            id=turn["dia_id"],
            timestamp=timestamp,
            content=f"Speaker {turn['speaker']}says : {text}",
            context=observations.get(turn["dia_id"], _plain_context(conversation, turn)),
            keywords=words,
            tags=("conversation", turn["speaker"].lower(), f"session {session}"),
        )
        for (session, timestamp, turn), text, words in zip(turns, texts, keywords, strict=True)
    )
    known = {note.id for note in notes}
    questions = tuple(
        Question(
            question=row["question"],
            answer=str(row["answer"]),
            evidence=tuple(
                name
                for text in row.get("evidence", ())
                for name in _EVIDENCE.findall(text)
                if name in known
            ),
            category=int(row["category"]),
        )
        for row in entry["qa"]
        if row["category"] in ANSWERABLE_CATEGORIES
    )
    return MemoryTask(entry["sample_id"], notes, questions)


def _sessions(conversation: dict[str, Any]) -> list[int]:
    """Numbers of the sessions that have turns, in order."""
    names = (re.fullmatch(r"session_(\d+)", key) for key in conversation)
    return sorted(int(name.group(1)) for name in names if name and conversation[name.group(0)])


def _turn_text(turn: dict[str, Any]) -> str:
    caption = turn.get("blip_caption")
    return f"{turn['text']} and shared {caption}." if caption else str(turn["text"])


def _plain_context(conversation: dict[str, Any], turn: dict[str, Any]) -> str:
    speakers = (conversation["speaker_a"], conversation["speaker_b"])
    other = speakers[1] if turn["speaker"] == speakers[0] else speakers[0]
    return f"{turn['speaker']} talks with {other}."


def _observations(raw: dict[str, Any]) -> dict[str, str]:
    """Turn id to the sentences that were observed in it."""
    found: dict[str, list[str]] = {}
    for session in raw.values():
        for rows in session.values():
            for sentence, where in rows:
                for name in [where] if isinstance(where, str) else where:
                    for turn in _EVIDENCE.findall(name):
                        found.setdefault(turn, []).append(sentence)
    return {turn: " ".join(sentences) for turn, sentences in found.items()}


def _most_specific_words(texts: list[str]) -> list[tuple[str, ...]]:
    """For each text its few words of highest TF-IDF, in order of that, then of the alphabet."""
    words = [[word.lower() for word in _WORD.findall(text)] for text in texts]
    documents = Counter(word for text in words for word in set(text))
    result = []
    for text in words:
        weight = {
            word: count * math.log(len(texts) / documents[word])
            for word, count in Counter(text).items()
        }
        ranked = sorted(weight, key=lambda word: (-weight[word], word))
        result.append(tuple(ranked[:_KEYWORDS_PER_NOTE]))
    return result
