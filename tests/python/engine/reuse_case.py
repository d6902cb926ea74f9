"""Stored notes and a prompt that has them again, in an engine and in the reference."""

from __future__ import annotations

from reference import Reference
from tiny_models import random_tokens


class ReuseCase:
    """Three notes in an order other than the one they were encoded in, and a question."""

    def __init__(self, engine, folder, seed):
        self.engine = engine
        self.reference = Reference(str(folder))
        notes = [random_tokens(count, seed + i) for i, count in enumerate((57, 96, 33))]
        shared = random_tokens(20, seed + 10)
        self.stored = []
        for before, note in zip(([], shared, shared), notes, strict=True):
            engine.store(note, before)
            encoded = self.reference.encode([*before, *note], len(before), len(before) + len(note))
            self.stored.append(encoded)
        self.tokens, self.ranges, self.cached = random_tokens(25, seed + 11), [], []
        for index in (2, 0, 1):
            begin = len(self.tokens)
            self.tokens += notes[index]
            self.ranges.append([begin, len(self.tokens)])
            self.cached.append((begin, self.stored[index]))
        self.tokens += random_tokens(18, seed + 12)
