"""Sessions: the next turn goes on with the compacted cache of the one before, or says why not."""

from __future__ import annotations

import pytest
import torch
from eviction_reference import POLICIES, EvictingReference
from tiny_models import random_tokens
from vllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.engine

BUDGET, STRIDE, CHUNK = 128, 32, 128
SETTINGS = {
    "phasekv": {"eviction": {"budget": BUDGET, "stride": STRIDE}},
    "max_num_batched_tokens": CHUNK,
    "worker_extension_cls": "survivor_probe.SurvivorProbe",
}


@pytest.fixture(scope="module")
def engine(start_engine):
    engine = start_engine(**SETTINGS)
    engine.llm.collective_rpc("watch_survivors")
    return engine


@pytest.fixture(scope="module")
def reference(model_folder):
    return EvictingReference(str(model_folder()))


def recorded(engine):
    """Survivors of all events so far, in their order."""
    (survivors,) = engine.llm.collective_rpc("survivors")
    return [
        [torch.tensor(layer).view(2, -1) for layer in event]
        for events in survivors.values()
        for event in events
    ]


def session_of(answer):
    return answer.report["session"]


@pytest.mark.parametrize("policy", ["agentkv", "h2o", "phase_balanced", "streaming_llm"])
def test_three_turns_are_one_long_request(engine, reference, policy):
    recorded(engine)
    tokens, steps, logprobs = random_tokens(200, 1), [], []
    computed = 0
    for turn in range(3):
        answer = engine.one(
            tokens, max_tokens=20, session=f"long {policy}", eviction={"policy": policy}
        )
        session = session_of(answer)
        assert session["resumed_tokens"] == computed
        assert session["recomputed_tokens"] == 0
        steps += [*range(computed + CHUNK, len(tokens), CHUNK)]
        steps += [*range(len(tokens), len(tokens) + 20)]
        logprobs.append((len(tokens), answer.logprobs))
        computed = len(tokens) + 19
        tokens = tokens + answer.tokens + random_tokens(90, 10 + turn)
    expected = reference.run_window(
        tokens, steps, BUDGET, STRIDE, POLICIES[policy], recorded(engine)
    )
    for prompt, rows in logprobs:
        first = steps.index(prompt)
        torch.testing.assert_close(rows, expected[first : first + 20].float(), atol=2e-3, rtol=0)


def test_only_new_tokens_are_sent_with_append(engine):
    first, second = random_tokens(180, 20), random_tokens(40, 21)
    answer = engine.one(first, max_tokens=10, session="whole")
    whole = engine.one(first + answer.tokens + second, max_tokens=10, session="whole")
    engine.one(first, max_tokens=10, session="parts")
    parts = engine.one(second, max_tokens=10, session="parts", append=True)
    assert session_of(parts)["resumed_tokens"] == session_of(whole)["resumed_tokens"] == 189
    assert parts.tokens == whole.tokens
    assert torch.equal(parts.logprobs, whole.logprobs)


def test_a_rewritten_history_is_computed_anew_and_the_response_says_so(engine):
    tokens = random_tokens(150, 30)
    answer = engine.one(tokens, max_tokens=12, session="rewritten")
    other = tokens[:100] + random_tokens(20, 31) + tokens[120:] + answer.tokens
    again = engine.one(other, max_tokens=12, session="rewritten")
    session = session_of(again)
    assert session["resumed_tokens"] == 0
    assert session["recomputed_tokens"] == 161
    assert "token 100 of 161" in session["reason"]
    fresh = engine.one(other, max_tokens=12)
    assert torch.equal(again.logprobs, fresh.logprobs)


def test_foreign_sessions_are_never_served(engine):
    tokens = random_tokens(150, 40)
    answer = engine.one(tokens, max_tokens=4, session="mine", salt="one tenant")
    prompt = tokens + answer.tokens + random_tokens(10, 41)
    other = engine.one(prompt, max_tokens=4, session="mine", salt="another")
    assert session_of(other)["reason"] == "new session"
    changed = engine.one(
        prompt, max_tokens=4, session="mine", salt="one tenant", eviction={"policy": "snapkv"}
    )
    assert "other settings" in session_of(changed)["reason"]
    # It is this last request's now, and the first one's no more.
    mine = engine.one(prompt, max_tokens=4, session="mine", salt="one tenant")
    assert session_of(mine)["resumed_tokens"] == 0


def test_two_requests_may_go_on_from_one_session(engine):
    tokens = random_tokens(150, 50)
    answer = engine.one(tokens, max_tokens=4, session="forked")
    prompts = [tokens + answer.tokens + random_tokens(30, seed) for seed in (51, 52)]
    together = engine.ask(
        [{"tokens": prompt, "phasekv": {"session": "forked"}} for prompt in prompts], max_tokens=6
    )
    assert [session_of(answer)["resumed_tokens"] for answer in together] == [153, 153]
    for prompt, answer in zip(prompts, together, strict=True):
        engine.one(tokens, max_tokens=4, session="alone")
        alone = engine.one(prompt, max_tokens=6, session="alone")
        assert alone.tokens == answer.tokens
        torch.testing.assert_close(alone.logprobs, answer.logprobs, atol=1e-3, rtol=0)


def test_a_prompt_without_anything_new_is_computed(engine):
    tokens = random_tokens(60, 60)
    engine.one(tokens, max_tokens=1, session="nothing new")
    answer = engine.one(tokens, max_tokens=1, session="nothing new")
    assert session_of(answer)["resumed_tokens"] == 0
    assert "nothing after" in session_of(answer)["reason"]


def test_bad_fields_are_refused_by_name(engine):
    for fields, name in [
        ({"session": 7}, "session"),
        ({"session": ""}, "session"),
        ({"append": True}, "append"),
        ({"session": "s", "append": "yes"}, "append"),
        ({"session": "s", "append": True, "chunks": [[0, 5]]}, "chunks"),
    ]:
        with pytest.raises(VLLMValidationError, match=name):
            engine.one(random_tokens(20, 1), **fields)


def test_sessions_outlive_the_engine_and_damaged_ones_are_misses(start_engine, tmp_path):
    settings = {**SETTINGS, "phasekv": {**SETTINGS["phasekv"], "session_directory": str(tmp_path)}}
    del settings["worker_extension_cls"]
    tokens, more = random_tokens(200, 70), random_tokens(30, 71)
    first = start_engine(**settings)
    answer = first.one(tokens, max_tokens=10, session="kept")
    first.one(tokens, max_tokens=10, session="damaged")
    prompt = tokens + answer.tokens + more
    expected = first.one(prompt, max_tokens=10, session="kept")
    first.one(tokens, max_tokens=10, session="kept")
    first.one(random_tokens(5, 1))  # the step in which it is saved
    first.close()
    files = sorted(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    assert len(files) == 2
    data = bytearray(files[0].read_bytes())
    data[-100] ^= 1
    files[0].write_bytes(bytes(data))
    second = start_engine(**settings)
    resumed = second.one(prompt, max_tokens=10, session="kept")
    assert session_of(resumed)["resumed_tokens"] == 209
    assert torch.equal(resumed.logprobs, expected.logprobs)
    damaged = second.one(prompt, max_tokens=10, session="damaged")
    assert damaged.tokens
    assert session_of(damaged)["resumed_tokens"] == 0
