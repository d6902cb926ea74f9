"""A tiny model, a prompt with reused notes, and the same computed by the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Reference
from tiny_models import make_model, random_tokens
from transformers import AutoModelForCausalLM

from phasekv.analysis import measure_prompt
from phasekv.transformers import ChunkMemory

NOTES = (57, 96, 33)
PREFIX, QUESTION = 25, 14


@dataclass
class Exact:
    """Float64 numpy; keys and queries before RoPE, [layers, tokens, heads, head size].

    ``stored`` are keys and values of each note as they were encoded, ``begins`` where they stand.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    begins: list[int]
    stored: list[tuple[np.ndarray, np.ndarray]]
    frequencies: np.ndarray

    def rotate(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[..., tokens, heads, head size] turned by each token's position."""
        angle = positions[:, None, None] * self.frequencies
        first, second = np.split(rows, 2, axis=-1)
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ],
            axis=-1,
        )

    def span(self, note: int) -> np.ndarray:
        """Positions of a note's tokens."""
        return np.arange(self.begins[note], self.begins[note] + NOTES[note])

    def residuals(self, note: int, kind: str) -> np.ndarray:
        """[layers, tokens, kv heads, head size]."""
        span = self.span(note)
        key, value = self.stored[note]
        if kind == "values":
            return self.values[:, span] - value
        unrotated = self.keys[:, span] - key
        return self.rotate(unrotated, span) if kind == "keys" else unrotated


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="session")
def tiny_model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def note_tokens():
    return [random_tokens(count, 40 + count) for count in NOTES]


@pytest.fixture(scope="session")
def measured(tiny_model, note_tokens):
    memory = ChunkMemory(tiny_model, None)
    shared = random_tokens(20, 10)
    chunks = [memory.encode(tokens, shared) for tokens in note_tokens]
    return measure_prompt(memory, [random_tokens(PREFIX, 1), *chunks, random_tokens(QUESTION, 2)])


@pytest.fixture(scope="session")
def exact(tiny_folder, note_tokens, exact_queries):
    reference = Reference(str(tiny_folder))
    shared = random_tokens(20, 10)
    tokens, begins, stored = random_tokens(PREFIX, 1), [], []
    for note in note_tokens:
        begins.append(len(tokens))
        tokens = tokens + note
        one = reference.encode([*shared, *note], len(shared), len(shared) + len(note))
        stored.append((one.keys.numpy(), one.values.numpy()))
    tokens = tokens + random_tokens(QUESTION, 2)
    whole = reference.encode(tokens, 0, len(tokens))
    return Exact(
        exact_queries(tokens),
        whole.keys.numpy(),
        whole.values.numpy(),
        begins,
        stored,
        reference.frequencies.numpy(),
    )


@pytest.fixture(scope="session")
def exact_queries(tiny_folder):
    """A prompt's queries before RoPE, [layers, tokens, query heads, head size]."""
    reference = Reference(str(tiny_folder))

    @torch.no_grad()
    def queries(tokens: list[int]) -> np.ndarray:
        hidden = reference.model.model.embed_tokens(torch.tensor(tokens))
        positions = torch.arange(len(tokens))
        found = []
        for layer in reference.layers:
            query, key, value = reference.project(layer, hidden)
            found.append(query)
            query, key = (reference.rotate(rows, positions) for rows in (query, key))
            hidden = reference.finish(layer, hidden, query, positions, key, value)
        return torch.stack(found).numpy()

    return queries
