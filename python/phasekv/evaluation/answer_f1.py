"""LoCoMo's official answer score: F1 over stemmed words, with rules by question category."""

from __future__ import annotations

import re
import string
from collections import Counter

import Stemmer

from phasekv.errors import InvalidArgumentError

_STEMMER = Stemmer.Stemmer("porter")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SKIPPED_WORDS = re.compile(r"\b(a|an|the|and)\b")

MULTI_HOP = 1
OPEN_DOMAIN = 3
CATEGORIES = (1, 2, 3, 4)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, without *a*, *an*, *the* and *and*, single spaces."""
    text = text.replace(",", "").lower().translate(_PUNCTUATION)
    return " ".join(_SKIPPED_WORDS.sub(" ", text).split())


def word_f1(prediction: str, gold: str) -> float:
    """F1 of the two texts' multisets of stemmed words; 0 where they share none."""
    predicted = [_STEMMER.stemWord(word) for word in normalize_answer(prediction).split()]
    expected = [_STEMMER.stemWord(word) for word in normalize_answer(gold).split()]
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision = shared / len(predicted)
    recall = shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def locomo_f1(prediction: str, gold: str, category: int) -> float:
    """The score of one answer, between 0 and 1.

    Category 1 (multi-hop) compares the comma-separated parts: the mean over the gold parts of the
    best score among the predicted parts. Category 3 (open-domain) uses the gold text before its
    first semicolon. Categories 2 and 4 compare the whole texts. Category 5 has no gold answer.

    The official script stems with NLTK's variant of Porter's algorithm; this one uses Porter's
    original, which differs in a few words ("dying", "skies") on both sides alike.
    """
    if category not in CATEGORIES:
        raise InvalidArgumentError("category", str(category), f"one of {CATEGORIES}")
    if category == MULTI_HOP:
        predicted = prediction.split(",")
        parts = [max(word_f1(part, wanted) for part in predicted) for wanted in gold.split(",")]
        return sum(parts) / len(parts)
    if category == OPEN_DOMAIN:
        gold = gold.split(";")[0].strip()
    return word_f1(prediction, gold)
