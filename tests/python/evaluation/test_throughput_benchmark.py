"""``benchmarks/throughput.py``, its sessions, tables and plot with stand-ins for the engines."""

import argparse
import json
from types import SimpleNamespace

import pytest
from benchmark_scripts import load

from phasekv.evaluation.agent_sessions import SessionSizes, plan_sessions, run_sessions

VOCABULARY = 1000
SIZES = SessionSizes(turns=3, prompt=(1500, 1600), answer=(4, 9), result=(110, 130))


def encode(text):
    return list(text.encode())


class FakeEngine:
    """Answers every request with as many tokens 999 as it asks for, the shortest first."""

    def __init__(self):
        self.waiting = []
        self.prompts = []
        self.parameters = []

    def add_request(self, request_id, prompt, parameters):
        self.prompts.append(prompt["prompt_token_ids"])
        self.parameters.append(parameters.extra_args)
        self.waiting.append((parameters.max_tokens, request_id))

    def has_unfinished_requests(self):
        return bool(self.waiting)

    def step(self):
        self.waiting.sort()
        tokens, request_id = self.waiting.pop(0)
        completion = SimpleNamespace(token_ids=[999] * tokens)
        return [
            SimpleNamespace(
                finished=True,
                request_id=request_id,
                outputs=[completion],
                kv_transfer_params={"phasekv": {"session": {"resumed_tokens": 3}}},
            )
        ]


@pytest.fixture
def plans():
    return plan_sessions(encode, VOCABULARY, 5, SIZES, seed=1)


def test_plans_have_their_sizes_and_markers(plans):
    for plan in plans:
        assert 1500 <= len(plan.prompt) <= 1600
        assert len(plan.answers) == 3
        assert len(plan.results) == 2
        assert all(4 <= answer <= 9 for answer in plan.answers)
        assert all(110 <= len(result) <= 130 for result in plan.results)
        for tokens in [plan.prompt, *plan.results]:
            text = bytes(token if token < 256 else 32 for token in tokens).decode()
            assert "<tool_response>" in text
            assert max(tokens) < VOCABULARY
        assert plan.prompt[-8:] == encode("<think>\n")
    assert plans == plan_sessions(encode, VOCABULARY, 5, SIZES, seed=1)
    assert plans != plan_sessions(encode, VOCABULARY, 5, SIZES, seed=2)


def test_markers_have_to_fit_into_the_vocabulary():
    with pytest.raises(ValueError, match="vocabulary is 100"):
        plan_sessions(encode, 100, 1, SIZES)


def test_a_turn_has_the_whole_history(plans):
    pytest.importorskip("vllm")
    engine = FakeEngine()
    outcome = run_sessions(engine, plans)
    assert len(engine.prompts) == 15
    assert outcome.output_tokens == sum(sum(plan.answers) for plan in plans)
    assert outcome.prompt_tokens == sum(map(len, engine.prompts))
    first = plans[0]
    (second_prompt,) = [
        prompt
        for prompt in engine.prompts
        if prompt == first.prompt + [999] * first.answers[0] + first.results[0]
    ]
    third_prompt = second_prompt + [999] * first.answers[1] + first.results[1]
    assert third_prompt in engine.prompts
    assert len(third_prompt) + first.answers[2] == first.full_tokens


def test_turns_of_a_session_share_its_id(plans):
    pytest.importorskip("vllm")
    engine = FakeEngine()
    assert run_sessions(engine, plans, resume=True).resumed_tokens == 3 * 15
    names = [extra["kv_transfer_params"]["phasekv"]["session"] for extra in engine.parameters]
    assert sorted(map(names.count, set(names))) == [3] * 5
    assert run_sessions(engine, plans).resumed_tokens == 0
    assert engine.parameters[15:] == [None] * 15


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(
        sessions=8,
        turns=2,
        layers=10,
        policies=["agentkv"],
        budget=1024,
        pools=["small", "large"],
        overhead_policies=["agentkv"],
        overhead_budgets=[2048, 512],
        rounds=3,
        model=tmp_path / "model",
        json=tmp_path / "out" / "throughput.json",
        worker=None,
    )


@pytest.fixture
def result(monkeypatch, arguments):
    throughput = load("throughput.py")
    rates = {"plain": iter([2.0, 4.0, 1.0, 4.0, 2.0, 4.0]), "agentkv": iter([4, 4, 3, 5, 5, 3])}
    jobs = []

    def measure(job):
        jobs.append((job["kind"], job["policy"], job.get("pool", job["budget"])))
        if job["kind"] == "overhead":
            times = {f"{part}_seconds": 1.0 for part in ("collecting", "scoring", "compacting")}
            shares = {"share": 0.02, "share_with_collecting": 0.03, "decode_seconds": 100.0}
            return {**job, **times, **shares, "stride": 128}
        counts = ("output_tokens", "prompt_tokens", "resumed_tokens")
        names = ("seconds", "blocks", "full_blocks", "turns", *counts)
        return {
            "tokens_per_s": next(rates[job["policy"]]),
            "preemptions": 7.0,
            "sessions": 8,
            **dict.fromkeys(names, 1),
        }

    monkeypatch.setattr(throughput, "in_own_process", measure)
    throughput.run(arguments)
    assert jobs[:4] == [
        ("sessions", "plain", "small"),
        ("sessions", "agentkv", "small"),
        ("sessions", "plain", "large"),
        ("sessions", "agentkv", "large"),
    ]
    assert jobs[12:] == [("overhead", "agentkv", 2048), ("overhead", "agentkv", 512)]
    return json.loads(arguments.json.read_text())


def test_ratios_are_within_rounds(result):
    rows = {(row["policy"], row["pool"]): row for row in result["rows"]}
    assert rows["plain", "small"]["throughput_ratio"] == 1.0
    assert rows["plain", "small"]["budget"] is None
    small, large = rows["agentkv", "small"], rows["agentkv", "large"]
    assert small["throughput_ratio"] == 2.5
    assert small["throughput_ratio_spread"] == [2.0, 3.0]
    assert small["tokens_per_s"] == 4
    assert large["throughput_ratio_spread"] == [0.75, 1.25]
    assert small["preemptions"] == 7
    assert small["budget"] == 1024


def test_tables_and_plot(result, tmp_path):
    tables = load("plots/tables.py")
    assert "| `agentkv` | 1024 | small | 2.50 | 2.00 to 3.00 | 4.0 | 7 |" in (
        tables.throughput_table(result).splitlines()
    )
    lines = tables.overhead_table(result)
    assert "| `agentkv` | 512 | 128 | 8 | 1.00% | 1.00% | 2.00% | 3.00% |" in lines.splitlines()
    picture = tmp_path / "picture.png"
    load("plots/throughput.py").draw(result).savefig(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
