"""Every method in the real engine against the separately written float64 reference."""

from __future__ import annotations

import pytest
import torch
from reference import Setting
from reuse_case import ReuseCase

pytestmark = pytest.mark.engine

SETTINGS = [
    {"method": "full_recompute", "ratio": 0.1},
    {"method": "full_reuse", "ratio": 0.1},
    {"method": "cacheblend", "ratio": 0.16},
    {"method": "cacheblend_lmcache", "ratio": 0.15},
    {"method": "epic", "ratio": 0.2},
    {"method": "epic", "ratio": 0.2, "boundary_tokens": 4},
    {"method": "agentkvshift", "ratio": 0.1},
    {"method": "agentkvshift", "ratio": 0.3},
    {"method": "agentkvshift", "ratio": 0.2, "frame": "unrotated"},
    {"method": "agentkvshift", "ratio": 0.2, "weight": "one"},
    {"method": "agentkvshift", "ratio": 0.2, "weight": "relative", "probes": "key"},
    {"method": "phaseshift", "ratio": 0.0},
    {"method": "phaseshift", "ratio": 0.05},
    {"method": "phaseshift", "ratio": 0.3},
    {"method": "phaseshift", "ratio": 0.2, "frame": "unrotated", "weight": "clipped"},
    {"method": "phaseshift", "ratio": 0.2, "probes": "value"},
    {"method": "phaseshift", "ratio": 1.0},
]


@pytest.fixture(scope="module")
def case(start_engine):
    engine = start_engine()
    return ReuseCase(engine, engine.folder, seed=100)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_method_equals_reference(case, setting):
    expected, trace = case.reference.run(case.tokens, case.cached, Setting(**setting))
    answer = case.engine.one(case.tokens, chunks=case.ranges, **setting)
    assert answer.report["chunks_found"] == 3
    assert answer.report["probes"] == len(trace.probes)
    assert answer.report["tokens_reused"] == 57 + 96 + 33 - len(trace.probes)
    torch.testing.assert_close(answer.logprobs[0].double(), expected, atol=2e-3, rtol=0)


def test_references_differ_between_methods(case):
    """The comparison above can tell the methods apart: it would fail for the wrong one."""
    results = [
        case.reference.run(case.tokens, case.cached, Setting(**setting))[0]
        for setting in SETTINGS
        if setting["method"] != "full_recompute" and setting["ratio"] not in (0.0, 1.0)
    ]
    for i, first in enumerate(results):
        for second in results[i + 1 :]:
            assert (first - second).abs().max() > 2e-2


def test_charged_ratio_counts_layers(case):
    answer = case.engine.one(case.tokens, chunks=case.ranges, method="phaseshift", ratio=0.3)
    tokens, probes = answer.report["tokens_found"], answer.report["probes"]
    layers = 4
    assert answer.report["charged_ratio"] == pytest.approx(
        (2 * tokens + (layers - 2) * probes) / (layers * tokens)
    )
    early = case.engine.one(case.tokens, chunks=case.ranges, method="epic", ratio=0.3)
    assert early.report["charged_ratio"] == pytest.approx(early.report["probes"] / tokens)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_model_families(start_engine, family):
    engine = start_engine(family)
    case = ReuseCase(engine, engine.folder, seed=200)
    for setting in (
        {"method": "phaseshift", "ratio": 0.2},
        {"method": "agentkvshift", "ratio": 0.2},
        {"method": "epic", "ratio": 0.2},
    ):
        expected, _ = case.reference.run(case.tokens, case.cached, Setting(**setting))
        answer = engine.one(case.tokens, chunks=case.ranges, **setting)
        torch.testing.assert_close(answer.logprobs[0].double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_rope_types(start_engine, rope):
    engine = start_engine(rope=rope)
    case = ReuseCase(engine, engine.folder, seed=300)
    setting = {"method": "phaseshift", "ratio": 0.2}
    expected, _ = case.reference.run(case.tokens, case.cached, Setting(**setting))
    answer = engine.one(case.tokens, chunks=case.ranges, **setting)
    torch.testing.assert_close(answer.logprobs[0].double(), expected, atol=2e-3, rtol=0)


def test_chunked_prefill_treats_each_step_as_a_segment(start_engine):
    engine = start_engine(max_num_batched_tokens=64, max_num_seqs=4)
    case = ReuseCase(engine, engine.folder, seed=400)
    ends = [*range(64, len(case.tokens), 64), len(case.tokens)]
    for setting in ({"method": "phaseshift", "ratio": 0.2}, {"method": "epic", "ratio": 0.2}):
        expected, trace = case.reference.run(
            case.tokens, case.cached, Setting(**setting), steps=ends
        )
        answer = engine.one(case.tokens, chunks=case.ranges, **setting)
        assert answer.report["probes"] == len(trace.probes)
        torch.testing.assert_close(answer.logprobs[0].double(), expected, atol=2e-3, rtol=0)
