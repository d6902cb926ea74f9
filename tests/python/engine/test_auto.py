"""``auto``: stored chunks are found by content, so that an agent framework needs no change."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_tokens

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(phasekv={"auto": True, "method": "phaseshift", "ratio": 0.2})


def test_found_anywhere_and_as_when_named(engine):
    notes = [random_tokens(40 + i, 10 + i) for i in range(3)]
    for note in notes:
        engine.store(note)
    tokens, ranges = random_tokens(13, 20), []
    for note in reversed(notes):
        ranges.append([len(tokens), len(tokens) + len(note)])
        tokens = tokens + note + random_tokens(3, 21)
    found = engine.one(tokens)
    assert found.report["chunks_found"] == 3
    named = engine.one(tokens, chunks=ranges, auto=False)
    assert torch.equal(found.logprobs, named.logprobs)


def test_a_chunk_whose_edges_were_tokenised_otherwise(engine):
    note = random_tokens(60, 30)
    engine.store(note)
    tokens = random_tokens(11, 31) + note[1:-2] + random_tokens(8, 32)
    answer = engine.one(tokens)
    assert answer.report["chunks_found"] == 1
    assert answer.report["tokens_found"] == 57


def test_nothing_to_find(engine):
    assert engine.one(random_tokens(200, 40)).report is None


def test_not_found_across_salts(engine):
    note = random_tokens(50, 50)
    engine.store(note, salt="a")
    assert engine.one(note + random_tokens(5, 51), salt="b").report is None
    assert engine.one(note + random_tokens(5, 51), salt="a").report["chunks_found"] == 1


def test_a_chunk_that_left_the_store_is_not_found(start_engine):
    """Two layers' worth of bytes: the first note is evicted by the second."""
    one_note = 4 * 2 * 64 * 2 * 32 * 4
    engine = start_engine(phasekv={"auto": True, "chunk_store_bytes": one_note + 1000})
    first, second = random_tokens(64, 60), random_tokens(64, 61)
    engine.store(first)
    engine.store(second)
    assert engine.one(second + random_tokens(5, 62)).report["chunks_found"] == 1
    assert engine.one(first + random_tokens(5, 63)).report is None


def test_chunks_on_disk_are_found_after_a_restart(start_engine, tmp_path):
    settings = {"auto": True, "store_directory": str(tmp_path / "chunks"), "ratio": 0.0}
    note, tail = random_tokens(64, 70), random_tokens(9, 71)
    before = start_engine(phasekv=settings)
    secret = random_tokens(64, 72)
    before.store(note)
    before.store(secret, salt="a")
    expected = before.one(note + tail)
    before.close()
    after = start_engine(phasekv=settings)
    answer = after.one(note + tail)
    assert answer.report["chunks_found"] == 1
    assert torch.equal(answer.logprobs, expected.logprobs)
    for salt in (None, "b"):
        assert after.one(secret + tail, salt=salt).report is None


def test_a_chunk_too_large_for_the_store_is_not_found(start_engine):
    engine = start_engine(phasekv={"auto": True, "chunk_store_bytes": 1000})
    note = random_tokens(64, 80)
    answer = engine.one(note + random_tokens(5, 81), chunks=[[0, 64]])
    assert answer.report["chunks_stored"] == 0
    assert engine.one(note + random_tokens(5, 82)).report is None
