"""Reuse beside other requests: mixed batches, decode rows, chunked prefill, preemption."""

from __future__ import annotations

import pytest
import torch
from eviction_reference import POLICIES, EvictingReference
from tiny_models import random_tokens

pytestmark = pytest.mark.engine


def assert_same(answer, expected, tolerance=3e-4):
    assert answer.tokens == expected.tokens
    torch.testing.assert_close(answer.logprobs, expected.logprobs, atol=tolerance, rtol=0)


def prompts_of(engine, count, seed, ratio=0.2):
    """Requests with and without reuse, of different methods and lengths."""
    methods = ["phaseshift", "epic", None, "agentkvshift", "full_reuse", None, "cacheblend"]
    prompts = []
    for index in range(count):
        note, other = random_tokens(48, seed + 10 * index), random_tokens(31, seed + 10 * index + 1)
        before = random_tokens(5 + 7 * index, seed + 10 * index + 2)
        tokens = before + note + other + random_tokens(9, seed + 10 * index + 3)
        prompt = {"tokens": tokens}
        method = methods[index % len(methods)]
        if method is not None:
            engine.store(note)
            engine.store(other)
            begin = len(before)
            prompt["phasekv"] = {
                "chunks": [[begin, begin + 48], [begin + 48, begin + 79]],
                "method": method,
                "ratio": ratio,
            }
        prompts.append(prompt)
    return prompts


def test_mixed_batch_equals_each_request_alone(start_engine):
    engine = start_engine()
    prompts = prompts_of(engine, 7, 1000)
    alone = [engine.ask([prompt], max_tokens=6)[0] for prompt in prompts]
    together = engine.ask(prompts, max_tokens=6)
    for one, other, prompt in zip(alone, together, prompts, strict=True):
        assert_same(other, one)
        assert other.report == one.report
        assert (other.report is None) == ("phasekv" not in prompt)


def test_decode_rows_beside_reuse(start_engine):
    """A short prompt decodes while a long one is still being prefilled with reuse, in chunks."""
    engine = start_engine(max_num_batched_tokens=64, max_num_seqs=4)
    prompts = prompts_of(engine, 4, 2000, ratio=0.0)
    prompts.insert(0, {"tokens": random_tokens(6, 2999)})
    together = engine.ask(prompts, max_tokens=12)
    roomy = start_engine()
    for prompt, answer in zip(prompts, together, strict=True):
        for begin, end in prompt.get("phasekv", {}).get("chunks", []):
            roomy.store(prompt["tokens"][begin:end])
        # At ratio 0 nothing depends on where the engine cuts a prompt.
        assert_same(answer, roomy.ask([prompt], max_tokens=12)[0])


def test_preemption(start_engine):
    """Too few blocks for all: requests are preempted, recomputed with reuse, and end the same."""
    engine = start_engine(
        num_gpu_blocks_override=14, max_num_seqs=4, max_model_len=384, disable_log_stats=False
    )
    prompts = prompts_of(engine, 5, 3000, ratio=1.0)
    for prompt in prompts:
        if "phasekv" in prompt:
            prompt["phasekv"]["method"] = "phaseshift"
    alone = [engine.ask([prompt], max_tokens=40)[0] for prompt in prompts]
    assert engine.metric("vllm:num_preemptions") == 0
    together = engine.ask(prompts, max_tokens=40)
    assert engine.metric("vllm:num_preemptions") > 0
    for one, other in zip(alone, together, strict=True):
        assert_same(other, one)


def test_exact_reuse_survives_chunked_prefill(start_engine):
    engine = start_engine(max_num_batched_tokens=48, max_num_seqs=2)
    before, chunk, after = random_tokens(40, 41), random_tokens(130, 42), random_tokens(30, 43)
    engine.store(chunk, before)
    tokens = before + chunk + after
    expected = engine.one(tokens, max_tokens=8)
    for method in ("full_reuse", "phaseshift"):
        answer = engine.one(tokens, max_tokens=8, chunks=[[40, 170]], method=method, ratio=0.0)
        assert answer.report["tokens_reused"] == 130
        assert_same(answer, expected)


@pytest.mark.slow
def test_default_compilation(start_engine, model_folder):
    """Without enforce_eager: reuse steps bypass the compiled graph, all others use it."""
    engine = start_engine(
        phasekv={"eviction": {"budget": 512, "stride": 32}},
        enforce_eager=False,
        max_num_batched_tokens=128,
        worker_extension_cls="survivor_probe.SurvivorProbe",
    )
    before, chunk, after = random_tokens(40, 51), random_tokens(50, 52), random_tokens(30, 53)
    engine.store(chunk, before)
    tokens = before + chunk + after
    expected = engine.one(tokens, max_tokens=8)
    for setting in (
        {"method": "full_reuse"},
        {"method": "phaseshift", "ratio": 0.0},
        {"method": "agentkvshift", "ratio": 1.0},
    ):
        assert_same(engine.one(tokens, max_tokens=8, chunks=[[40, 90]], **setting), expected)
    assert_same(engine.one(tokens, max_tokens=8), expected, tolerance=0)

    engine.llm.collective_rpc("watch_survivors")
    tokens = random_tokens(300, 54)
    answer = engine.one(tokens, max_tokens=40, eviction={"policy": "agentkv", "budget": 128})
    ((events,),) = (recorded.values() for recorded in engine.llm.collective_rpc("survivors"))
    survivors = [[torch.tensor(layer).view(2, -1) for layer in event] for event in events]
    logprobs = EvictingReference(str(model_folder())).run_window(
        tokens + answer.tokens,
        [128, 256, *range(300, 340)],
        128,
        32,
        POLICIES["agentkv"],
        survivors,
    )
    torch.testing.assert_close(answer.logprobs, logprobs[2:].float(), atol=1e-3, rtol=0)
