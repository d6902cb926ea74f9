"""What must hold exactly: reuse of exact keys and values is plain vLLM, token for token."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_tokens

pytestmark = pytest.mark.engine

EXACT_METHODS = [
    {"method": "full_reuse"},
    {"method": "phaseshift", "ratio": 0.0},
    {"method": "agentkvshift", "ratio": 0.0},
    {"method": "cacheblend", "ratio": 0.0},
    {"method": "cacheblend_lmcache", "ratio": 0.0},
]
ALL_METHODS = ["agentkvshift", "cacheblend", "cacheblend_lmcache", "epic", "phaseshift"]


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine()


@pytest.fixture(scope="module")
def plain(start_engine):
    """vLLM without PhaseKV: its own engine, no settings."""
    return start_engine(phasekv=None)


def assert_same(answer, expected, tolerance=2e-4):
    assert answer.tokens == expected.tokens
    torch.testing.assert_close(answer.logprobs, expected.logprobs, atol=tolerance, rtol=0)


def test_without_chunks_nothing_changes(engine, plain):
    tokens = random_tokens(150, 1)
    answer = engine.one(tokens, max_tokens=8)
    assert answer.report is None
    assert_same(answer, plain.one(tokens, max_tokens=8), tolerance=0)


@pytest.mark.parametrize("setting", EXACT_METHODS, ids=lambda s: s["method"])
def test_exact_cache_and_no_probes_is_plain_vllm(engine, plain, setting):
    before, chunk, after = random_tokens(40, 2), random_tokens(96, 3), random_tokens(30, 4)
    engine.store(chunk, before)
    tokens = before + chunk + after
    answer = engine.one(tokens, max_tokens=8, chunks=[[40, 136]], **setting)
    assert answer.report["tokens_reused"] == 96
    assert answer.report["probes"] == 0
    assert_same(answer, plain.one(tokens, max_tokens=8))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_ratio_one_is_full_prefill(engine, plain, method):
    """Stored alone and moved, so that every cached key is wrong unless it is recomputed."""
    chunk = random_tokens(70, 5)
    engine.store(chunk)
    tokens = random_tokens(33, 6) + chunk + random_tokens(21, 7)
    answer = engine.one(tokens, max_tokens=8, chunks=[[33, 103]], method=method, ratio=1.0)
    assert answer.report["probes"] == 70
    assert answer.report["charged_ratio"] == 1.0
    assert_same(answer, plain.one(tokens, max_tokens=8))


def test_a_wrong_cache_is_seen(engine, plain):
    """The two tests above can fail: reuse of keys that were encoded alone changes the answer."""
    chunk = random_tokens(70, 5)
    engine.store(chunk)
    tokens = random_tokens(33, 6) + chunk + random_tokens(21, 7)
    answer = engine.one(tokens, chunks=[[33, 103]], method="full_reuse")
    difference = (answer.logprobs - plain.one(tokens).logprobs).abs().max()
    assert difference > 0.05


def test_first_use_stores_on_the_way_and_is_exact(engine, plain):
    before, chunk, after = random_tokens(25, 8), random_tokens(64, 9), random_tokens(12, 10)
    tokens = before + chunk + after
    first = engine.one(tokens, max_tokens=4, chunks=[[25, 89]])
    assert first.report["chunks_missed"] == 1
    assert first.report["missed"] == [{"range": [25, 89], "reason": "not stored"}]
    assert first.report["chunks_stored"] == 1
    assert_same(first, plain.one(tokens, max_tokens=4))
    second = engine.one(tokens, max_tokens=4, chunks=[[25, 89]], method="full_reuse")
    assert second.report["chunks_found"] == 1
    assert_same(second, first)


def test_key_does_not_depend_on_what_follows(engine):
    """LMCache#2026: a chunk was not found again when other text was glued to it."""
    chunk = random_tokens(50, 11)
    engine.one(random_tokens(7, 12) + chunk, chunks=[[7, 57]])
    tokens = random_tokens(30, 13) + chunk + random_tokens(80, 14)
    answer = engine.one(tokens, chunks=[[30, 80]])
    assert answer.report["chunks_found"] == 1


def test_chunk_of_one_token(engine, plain):
    token = random_tokens(1, 15)
    engine.store(token)
    tokens = random_tokens(20, 16) + token + random_tokens(10, 17)
    answer = engine.one(tokens, chunks=[[20, 21]], method="phaseshift", ratio=0.5)
    assert answer.report["probes"] == 1
    assert_same(answer, plain.one(tokens))


def test_prompt_that_is_one_chunk_only(engine, plain):
    chunk = random_tokens(40, 18)
    engine.store(chunk)
    answer = engine.one(chunk, max_tokens=4, chunks=[[0, 40]], method="full_reuse")
    assert answer.report["tokens_reused"] == 39
    assert_same(answer, plain.one(chunk, max_tokens=4))


def test_all_chunks_reordered(engine):
    """LMCache#938: the second request is all of the first one's chunks in another order."""
    notes = [random_tokens(40, 20 + i) for i in range(3)]
    engine.one(notes[0] + notes[1] + notes[2], chunks=[[0, 40], [40, 80], [80, 120]])
    tokens = notes[1] + notes[0] + notes[2]
    answer = engine.one(tokens, max_tokens=4, chunks=[[0, 40], [40, 80], [80, 120]])
    assert answer.report["chunks_found"] == 3
    assert torch.isfinite(answer.logprobs).all()


def test_the_same_chunk_twice_in_one_prompt(engine, plain):
    chunk = random_tokens(32, 26)
    engine.store(chunk)
    tokens = chunk + random_tokens(10, 27) + chunk + random_tokens(5, 28)
    ranges = [[0, 32], [42, 74]]
    answer = engine.one(tokens, chunks=ranges, method="phaseshift", ratio=1.0)
    assert answer.report["chunks_found"] == 2
    assert_same(answer, plain.one(tokens))


def test_salt_separates_tenants(engine):
    chunk = random_tokens(40, 30)
    engine.store(chunk, salt="tenant a")
    tokens = random_tokens(9, 31) + chunk + random_tokens(9, 32)
    assert engine.one(tokens, salt="tenant a", chunks=[[9, 49]]).report["chunks_found"] == 1
    assert engine.one(tokens, salt="tenant b", chunks=[[9, 49]]).report["chunks_found"] == 0
    assert engine.one(tokens, chunks=[[9, 49]]).report["chunks_found"] == 0
