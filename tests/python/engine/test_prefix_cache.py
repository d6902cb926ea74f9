"""With prefix caching on, no other request ever sees corrected keys and values."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_tokens

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(enable_prefix_caching=True, disable_log_stats=False)


@pytest.fixture(scope="module")
def plain(start_engine):
    return start_engine(phasekv=None)


def assert_same(answer, expected):
    assert answer.tokens == expected.tokens
    torch.testing.assert_close(answer.logprobs, expected.logprobs, atol=3e-4, rtol=0)


def test_corrected_blocks_are_never_shared(engine, plain):
    chunk = random_tokens(96, 1)
    engine.store(chunk)
    tokens = random_tokens(64, 2) + chunk + random_tokens(70, 3)
    reused = engine.one(tokens, max_tokens=4, chunks=[[64, 160]], method="full_reuse")
    assert reused.report["tokens_reused"] == 96
    expected = plain.one(tokens, max_tokens=4)
    assert (reused.logprobs[0] - expected.logprobs[0]).abs().max() > 0.05
    assert_same(engine.one(tokens, max_tokens=4), expected)
    assert_same(engine.one(tokens, max_tokens=4), expected)


def test_exact_prefix_before_the_first_chunk_is_shared(engine, plain):
    """LMCache#1875: a prefix hit of the engine and reuse in one request."""
    prefix, chunk = random_tokens(128, 11), random_tokens(50, 12)
    engine.store(chunk)
    engine.one(prefix + random_tokens(5, 13))
    tokens = prefix + chunk + random_tokens(20, 14)
    answer = engine.one(tokens, max_tokens=4, chunks=[[128, 178]], method="phaseshift", ratio=1.0)
    assert answer.report["probes"] == 50
    assert_same(answer, plain.one(tokens, max_tokens=4))


def test_a_request_does_not_read_its_own_earlier_corrected_blocks(engine):
    chunk = random_tokens(96, 21)
    engine.store(chunk)
    tokens = random_tokens(64, 22) + chunk + random_tokens(40, 23)
    first = engine.one(tokens, chunks=[[64, 160]], method="full_reuse")
    second = engine.one(tokens, chunks=[[64, 160]], method="phaseshift", ratio=1.0)
    assert second.report["probes"] == 96
    assert (first.logprobs - second.logprobs).abs().max() > 0.05


def test_storing_shares_blocks_because_it_is_exact(engine, plain):
    """Stored twice, the second time from blocks that the prefix cache already holds."""
    before, chunk = random_tokens(32, 31), random_tokens(64, 32)
    engine.store(chunk, before)
    engine.store(chunk, before)
    tokens = before + chunk + random_tokens(9, 33)
    answer = engine.one(tokens, chunks=[[32, 96]], method="full_reuse")
    assert answer.report["chunks_found"] == 1
    assert_same(answer, plain.one(tokens))
