"""Eviction in the real engine, beside a reference that holds the same survivors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from eviction_reference import POLICIES, EvictingReference, start
from tiny_models import random_tokens
from vllm.exceptions import VLLMValidationError

from commands import run_checked

pytestmark = pytest.mark.engine

BUDGET, STRIDE, CHUNK = 128, 32, 128


def engine_steps(prompt: int, answers: int, chunk: int = CHUNK) -> list[int]:
    """Ends of the engine's steps for one request alone."""
    return [*range(chunk, prompt, chunk), *range(prompt, prompt + answers)]


@pytest.fixture(scope="module")
def engine(start_engine):
    engine = start_engine(
        phasekv={
            "eviction": {
                "budget": 512,
                "stride": STRIDE,
                "function": "python_policies:as_queries_say",
            }
        },
        max_num_batched_tokens=CHUNK,
        worker_extension_cls="survivor_probe.SurvivorProbe",
    )
    engine.llm.collective_rpc("watch_survivors")
    return engine


@pytest.fixture(scope="module")
def plain(start_engine):
    """vLLM without PhaseKV."""
    return start_engine(phasekv=None, max_num_batched_tokens=CHUNK)


@pytest.fixture(scope="module")
def reference(model_folder):
    return EvictingReference(str(model_folder()))


def survivors_of(engine, heads=2):
    """Per request in the order of their first events: event -> layer -> [kv heads, kept]."""
    (recorded,) = engine.llm.collective_rpc("survivors")
    return [
        [[torch.tensor(layer).view(heads, -1) for layer in event] for event in events]
        for events in recorded.values()
    ]


def assert_follows(answer, tokens, survivors, reference, policy, budget=BUDGET):
    sequence = tokens + answer.tokens
    steps = engine_steps(len(tokens), len(answer.tokens))
    logprobs = reference.run_window(sequence, steps, budget, STRIDE, POLICIES[policy], survivors)
    torch.testing.assert_close(
        answer.logprobs, logprobs[-len(answer.tokens) :].float(), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_large_budget_is_plain_vllm(engine, plain, policy):
    tokens = random_tokens(300, 1)
    answer = engine.one(tokens, max_tokens=40, eviction={"policy": policy, "budget": 512})
    expected = plain.one(tokens, max_tokens=40)
    assert answer.tokens == expected.tokens
    assert torch.equal(answer.logprobs, expected.logprobs)
    assert answer.report["eviction"]["compactions"] == 0
    assert answer.report["eviction"]["tokens_kept"] == 339


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_follows_its_definition(engine, reference, policy):
    tokens = random_tokens(300, 2)
    answer = engine.one(tokens, max_tokens=70, eviction={"policy": policy, "budget": BUDGET})
    (survivors,) = survivors_of(engine)
    # Prefill ends at 256 and 300, decoding passes 320 and 352.
    assert [len(event[0][0]) for event in survivors] == [128, 140, 128, 128]
    assert_follows(answer, tokens, survivors, reference, policy)
    report = answer.report["eviction"]
    assert report["compactions"] == 4
    assert report["tokens_seen"] == 369
    assert report["tokens_evicted"] == start(369, BUDGET, STRIDE) == 224
    assert report["blocks_freed"] == 7
    assert report["kept_by_phase"]["others"] == pytest.approx(128)


def test_requests_with_their_own_policies_share_batches(engine, reference):
    wishes = [("agentkv", 128), ("h2o", 160), ("streaming_llm", 64), ("snapkv", 512)]
    # So short that they are evicted from while decoding only: prompts share a step's tokens as
    # they happen to arrive.
    prompts = [random_tokens(30 + 10 * i, 10 + i) for i in range(4)]
    answers = engine.ask(
        [
            {"tokens": tokens, "phasekv": {"eviction": {"policy": policy, "budget": budget}}}
            for tokens, (policy, budget) in zip(prompts, wishes, strict=True)
        ],
        max_tokens=180,
    )
    recorded = survivors_of(engine)
    evicted = [
        (answer, tokens, policy, budget)
        for answer, tokens, (policy, budget) in zip(answers, prompts, wishes, strict=True)
        if answer.report["eviction"]["compactions"]
    ]
    assert len(evicted) == len(recorded) == 3
    for answer, tokens, policy, budget in evicted:
        # Whose survivors are whose is told by their number.
        (mine,) = [
            events
            for events in recorded
            if len(events) == answer.report["eviction"]["compactions"]
            and len(events[-1][0][0]) == budget
        ]
        steps = [*range(len(tokens), len(tokens) + 180)]
        logprobs = reference.run_window(
            tokens + answer.tokens, steps, budget, STRIDE, POLICIES[policy], mine
        )
        torch.testing.assert_close(answer.logprobs, logprobs.float(), atol=1e-3, rtol=0)


def test_a_request_holds_no_more_than_its_window(model_folder):
    """Counted in the scheduler's own block pool, after each of its allocations."""
    program = Path(__file__).with_name("held_blocks.py")
    numbers = map(str, (BUDGET, STRIDE, CHUNK))
    output = run_checked(sys.executable, program, model_folder(), *numbers)
    (line,) = [line for line in output.splitlines() if line.startswith("[")]
    most, steps, free, total = json.loads(line)
    assert steps > 100
    assert BUDGET // 32 < most <= -(-(BUDGET + STRIDE - 1 + CHUNK) // 32)
    assert free == total - 1  # all but the null block


def test_a_prompt_longer_than_the_pool_is_served(start_engine):
    """Admitted by its budget, not by its length; other requests wait their turn."""
    engine = start_engine(
        phasekv={"eviction": {"budget": BUDGET, "stride": STRIDE}},
        max_num_batched_tokens=64,
        num_gpu_blocks_override=16,
        max_model_len=448,
    )
    prompts = [{"tokens": random_tokens(400, seed)} for seed in range(5)]
    answers = engine.ask(prompts, max_tokens=40)
    alone = engine.one(prompts[3]["tokens"], max_tokens=40)
    assert all(len(answer.tokens) == 40 for answer in answers)
    assert all(bool(answer.logprobs.isfinite().all()) for answer in answers)
    assert alone.report["eviction"]["compactions"] > 0


def test_preempted_requests_begin_anew(start_engine):
    """What a preempted request computes again depends on the schedule; that it ends does not."""
    engine = start_engine(
        phasekv={"eviction": {"budget": 256, "stride": STRIDE}},
        max_num_batched_tokens=64,
        num_gpu_blocks_override=17,
        max_num_seqs=4,
        max_model_len=448,
        disable_log_stats=False,
    )
    first = engine.one(random_tokens(50, 90), max_tokens=300)
    prompts = [{"tokens": random_tokens(50, seed)} for seed in range(91, 95)]
    answers = engine.ask(prompts, max_tokens=300)
    assert engine.metric("vllm:num_preemptions") > 0
    for answer in answers:
        assert len(answer.tokens) == 300
        assert bool(answer.logprobs.isfinite().all())
        assert answer.report["eviction"]["tokens_seen"] == 349
    again = engine.one(random_tokens(50, 90), max_tokens=300)
    assert torch.equal(again.logprobs, first.logprobs)


def test_the_prompt_may_be_compressed_at_its_end(start_engine, reference):
    engine = start_engine(
        phasekv={"eviction": {"budget": BUDGET, "stride": STRIDE, "compress_prompt": "end"}},
        max_num_batched_tokens=CHUNK,
        worker_extension_cls="survivor_probe.SurvivorProbe",
    )
    engine.llm.collective_rpc("watch_survivors")
    tokens = random_tokens(300, 7)
    answer = engine.one(tokens, max_tokens=30, eviction={"policy": "snapkv"})
    (survivors,) = survivors_of(engine)
    assert [len(event[0][0]) for event in survivors] == [140, 128]
    steps = [300, *range(301, 330)]
    logprobs = reference.run_window(
        tokens + answer.tokens, steps, BUDGET, STRIDE, POLICIES["snapkv"], survivors
    )
    torch.testing.assert_close(answer.logprobs, logprobs.float(), atol=1e-3, rtol=0)


def test_a_policy_in_python(engine, reference):
    """The same scores as streaming_llm, from a function of keys, values and queries."""
    tokens = random_tokens(300, 8)
    wish = {"policy": "function", "budget": BUDGET}
    answer = engine.one(tokens, max_tokens=40, eviction=wish)
    (survivors,) = survivors_of(engine)
    assert_follows(answer, tokens, survivors, reference, "streaming_llm")


@pytest.mark.parametrize(("queries", "says"), [(1, "not finite"), (2, "[2, "), (3, "no idea")])
def test_a_broken_policy_is_named_and_the_engine_lives_on(engine, plain, queries, says):
    wish = {"policy": "function", "queries": queries, "budget": BUDGET}
    answer = engine.one(random_tokens(300, 9), max_tokens=4, eviction=wish)
    failure = answer.report["eviction"]["failure"]
    assert "function" in failure
    assert says in failure
    assert bool(answer.logprobs.isfinite().all())
    survivors_of(engine)
    tokens = random_tokens(50, 9)
    assert engine.one(tokens, max_tokens=4).tokens == plain.one(tokens, max_tokens=4).tokens


def test_reuse_and_eviction_in_one_request(engine, plain):
    """An exact chunk inside an evicted prompt changes nothing but the buffers' queries."""
    before, chunk, after = random_tokens(20, 21), random_tokens(100, 22), random_tokens(230, 23)
    engine.store(chunk, before)
    tokens = before + chunk + after
    wish = {"eviction": {"policy": "streaming_llm", "budget": BUDGET}}
    exact = engine.one(tokens, max_tokens=40, **wish)
    reused = engine.one(tokens, max_tokens=40, chunks=[[20, 120]], method="full_reuse", **wish)
    assert reused.report["tokens_reused"] == 100
    assert reused.report["eviction"]["tokens_evicted"] == 256
    assert reused.tokens == exact.tokens
    torch.testing.assert_close(reused.logprobs, exact.logprobs, atol=1e-3, rtol=0)
    survivors_of(engine)


def test_a_chunk_that_was_evicted_from_is_not_stored(engine):
    tokens = random_tokens(350, 31)
    answer = engine.one(
        tokens, chunks=[[10, 340]], eviction={"policy": "streaming_llm", "budget": BUDGET}
    )
    assert answer.report["chunks_stored"] == 0
    assert "evicted" in answer.report["missed"][0]["reason"]
    survivors_of(engine)


BAD_WISHES = [
    ({"budget": 1024}, "budget", "1024"),
    ({"budget": 100}, "budget", "100"),
    ({"budget": 0}, "budget", "0"),
    ({"budget": 32}, "budget", "32"),
    ({"policy": "agent"}, "policy", "agent"),
    ({"policy": "triattention"}, "calibration", "null"),
    ({"policy": "full"}, "budget", "512"),
    ({"policy": "adakv"}, "policy", "adakv is not supported"),
    ({"policy": "pyramidkv"}, "policy", "pyramidkv is not supported"),
    ({"policy": "h2o", "pooling": "max"}, "pooling", "set"),
    ({"pooling": "median"}, "pooling", "median"),
    ({"phase_quota": 2.0}, "phase_quota", "2"),
    ({"stride": 64}, "stride", "64"),
    ({"policy": "function", "function": "nothing:here"}, "function", "nothing:here"),
    ({"function": "os:getcwd"}, "function", "os:getcwd"),
    ({"compress_prompt": "end"}, "compress_prompt", "end"),
    ("tight", "eviction", "tight"),
    ({"policy": "h2o", "recent": 544}, "budget", "512"),
]


@pytest.mark.parametrize(("wish", "field", "value"), BAD_WISHES, ids=lambda x: str(x)[:40])
def test_bad_wishes_are_refused_by_name(engine, wish, field, value):
    with pytest.raises(VLLMValidationError, match=field) as caught:
        engine.one(random_tokens(20, 1), eviction=wish)
    assert value in str(caught.value)
    assert len(engine.one(random_tokens(20, 1), max_tokens=2).tokens) == 2


def test_an_engine_without_eviction_refuses_it_by_name(start_engine):
    engine = start_engine(phasekv={})
    with pytest.raises(VLLMValidationError, match="without eviction"):
        engine.one(random_tokens(20, 1), eviction={"budget": 64})


BAD_SETTINGS = [
    ({}, "budget"),
    ({"budget": 100}, "budget"),
    ({"budget": 128, "stride": 20}, "stride"),
    ({"budget": 64, "stride": 64}, "budget"),
    ({"budget": 128, "policy": "nobody"}, "policy"),
    ({"budget": 128, "policy": "adakv"}, "policy = adakv is not supported"),
    ({"budget": 128, "sinc": 3}, "sinc"),
    ({"budget": 128, "policy": "function"}, "function"),
    ({"budget": 128, "policy": "function", "function": "nothing:here"}, "function"),
]


@pytest.mark.parametrize(("setting", "field"), BAD_SETTINGS, ids=lambda x: str(x)[:40])
def test_bad_settings_are_refused_at_start(model_folder, setting, field):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model_folder()),
        skip_tokenizer_init=True,
        block_size=32,
        additional_config={"phasekv": {"eviction": setting}},
    )
    with pytest.raises((ValueError, RuntimeError), match=field):
        arguments.create_engine_config()
