"""Tensor parallel 2 on the CPU: ranks drop the same rows and evict from their own heads."""

from __future__ import annotations

import pytest
import torch
from reference import Setting
from reuse_case import ReuseCase
from tiny_models import random_tokens

pytestmark = pytest.mark.engine


def test_two_ranks_equal_the_reference(start_engine, tmp_path):
    engine = start_engine(
        tensor_parallel_size=2,
        phasekv={"store_directory": str(tmp_path / "chunks"), "auto": True},
    )
    case = ReuseCase(engine, engine.folder, seed=500)
    for setting in (
        {"method": "phaseshift", "ratio": 0.2},
        {"method": "agentkvshift", "ratio": 0.2},
        {"method": "cacheblend", "ratio": 0.3},
        {"method": "epic", "ratio": 0.2},
        {"method": "phaseshift", "ratio": 1.0},
    ):
        expected, trace = case.reference.run(case.tokens, case.cached, Setting(**setting))
        answer = case.engine.one(case.tokens, chunks=case.ranges, **setting)
        assert answer.report["probes"] == len(trace.probes)
        torch.testing.assert_close(answer.logprobs[0].double(), expected, atol=2e-3, rtol=0)


def test_a_chunk_that_one_rank_lost_is_a_miss_on_both(start_engine, tmp_path):
    """LMCache#1379: ranks that disagree on hits crash or mix up rows."""
    directory = tmp_path / "chunks"
    settings = {"store_directory": str(directory)}
    engine = start_engine(tensor_parallel_size=2, phasekv=settings)
    chunk = random_tokens(64, 600)
    engine.store(chunk)
    engine.close()
    files = sorted(file for file in directory.rglob("*.safetensors"))
    assert len(files) == 2
    files[1].write_bytes(b"damaged")
    again = start_engine(tensor_parallel_size=2, phasekv=settings)
    tokens = random_tokens(10, 601) + chunk + random_tokens(10, 602)
    answer = again.one(tokens, chunks=[[10, 74]], method="full_reuse")
    assert answer.report["missed"] == [
        {"range": [10, 74], "reason": "not stored on every tensor-parallel rank"}
    ]


def test_eviction_and_sessions_on_two_ranks(start_engine):
    settings = {
        "phasekv": {"eviction": {"budget": 128, "stride": 32}},
        "max_num_batched_tokens": 128,
    }
    one = start_engine(**settings)
    two = start_engine(tensor_parallel_size=2, **settings)
    for policy in ("agentkv", "phase_balanced"):
        wish = {"eviction": {"policy": policy}, "session": policy}
        tokens = random_tokens(300, 700)
        answers = [engine.one(tokens, max_tokens=40, **wish) for engine in (one, two)]
        tokens = tokens + answers[0].tokens + random_tokens(60, 701)
        answers += [engine.one(tokens, max_tokens=20, **wish) for engine in (one, two)]
        for single, double in (answers[:2], answers[2:]):
            assert double.tokens == single.tokens
            torch.testing.assert_close(double.logprobs, single.logprobs, atol=2e-3, rtol=0)
            assert double.report == single.report
        assert answers[3].report["session"]["resumed_tokens"] == 339
