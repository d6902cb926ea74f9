"""``benchmarks/eviction_fidelity.py``, its tables and its plot with a stand-in engine."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
from benchmark_scripts import load

from phasekv.evaluation.replay import Replay, first_evicted_row
from phasekv.phases import TokenVocabulary

VOCABULARY = 256
# How far a policy moves probability from token 1 to token 0; full KV says even odds.
SHIFT = {"full": 0.0, "agentkv": 0.2, "h2o": 0.1, "streaming_llm": 0.4}


class ByteTokenizer:
    chat_template = None

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return list(text.encode())


class FakeReplayEngine:
    """Its hidden states hold the policy's shift, from which its distributions are made."""

    def __init__(self, *_, stride, **__):
        self.tokenizer = ByteTokenizer()
        self.stride = stride
        self.scale = 1.0
        self.calls = []
        engines.append(self)

    def replay(self, tokens, rows, setting, budget=None, observer=None):
        self.calls.append((setting.policy, budget))
        shift = SHIFT[setting.policy] / (1 if budget is None else budget / 32)
        report = {"tokens_kept": budget or len(tokens), "kept_by_phase": {}}
        return Replay(torch.full((len(rows), 1), shift), 0.5, report)

    def log_probs(self, hidden):
        row = torch.full((len(hidden), VOCABULARY), -700.0)
        row[:, 0] = (0.5 + hidden[:, 0]).log()
        row[:, 1] = (0.5 - hidden[:, 0]).log()
        return row


engines = []


def expected_kl(policy, budget):
    share = 0.5 + SHIFT[policy] / (budget / 32)
    return 0.5 * math.log(0.5 / share) + 0.5 * math.log(0.5 / (1 - share))


def trajectory(name, words):
    segments = [
        {"phase": "system", "text": "s" * 60},
        {"phase": "think", "text": "t" * words},
        {"phase": "tool_call", "text": "a" * 20},
        {"phase": "tool_result", "text": "r" * 300},
    ]
    return json.dumps({"source": "test", "id": name, "segments": segments})


@pytest.fixture
def benchmark(monkeypatch):
    engines.clear()
    module = load("eviction_fidelity.py")
    monkeypatch.setattr(module, "ReplayEngine", FakeReplayEngine)
    vocabulary = TokenVocabulary(
        bytes(range(VOCABULARY)), np.arange(VOCABULARY + 1), {}, frozenset()
    )
    monkeypatch.setattr(module, "token_vocabulary", lambda _: vocabulary)
    return module


@pytest.fixture
def arguments(tmp_path):
    data = tmp_path / "some.jsonl"
    data.write_text("\n".join([trajectory("one", 40), trajectory("two", 90), trajectory("x", 0)]))
    return argparse.Namespace(
        data=[data],
        trajectories=2,
        max_tokens=[1000],
        min_tokens=10,
        min_rows=1,
        budgets=[32, 64],
        policies=["agentkv", "h2o", "triattention"],
        variants=["agentkv, recent 64"],
        variant_budgets=[64],
        stride=16,
        block_size=16,
        calibration=None,
        model=tmp_path / "model",
        minutes=None,
        resume=False,
        json=tmp_path / "out" / "result.json",
    )


@pytest.fixture
def result(benchmark, arguments):
    benchmark.run(arguments)
    return json.loads(arguments.json.read_text())


def test_every_setting_is_compared_at_its_budgets(result):
    kept = [(row["setting"], row["budget"]) for row in result["rows"]]
    assert kept == [
        ("full", 32),
        ("full", 64),
        ("agentkv", 32),
        ("agentkv", 64),
        ("h2o", 32),
        ("h2o", 64),
        ("agentkv, recent 64", 64),
    ]
    for row in result["rows"]:
        expected = expected_kl(row["policy"], row["budget"])
        assert row["kl"]["mean"] == pytest.approx(expected, rel=1e-4)
        assert row["trajectories"] == 2
        # 40 and 90 bytes of thoughts, 20 of a call each, and the line breaks around them.
        assert row["positions"] == 42 + 92 + 2 * 22
    (full,) = [row for row in result["rows"] if (row["setting"], row["budget"]) == ("full", 32)]
    assert full["top1"]["mean"] == 1.0
    assert full["nll"]["mean"] == pytest.approx(700.0)


def test_differences_are_from_agentkv(result):
    lines = {(line["first"], line["budget"]): line for line in result["differences"]}
    assert set(lines) == {("h2o", 32), ("h2o", 64), ("agentkv, recent 64", 64)}
    difference = expected_kl("h2o", 32) - expected_kl("agentkv", 32)
    assert lines["h2o", 32]["kl"]["mean"] == pytest.approx(difference)
    assert lines["h2o", 32]["closer"] == 2
    assert lines["agentkv, recent 64", 64]["closer"] == 0


def test_trajectories_end_with_their_last_act_token(result):
    one, two = result["trajectories"]
    assert (one["id"], two["id"]) == ("one", "two")
    assert two["tokens"] - one["tokens"] == 50
    assert (one["think_tokens"], one["act_tokens"]) == (42, 22)


def test_only_what_is_missing_is_run_again(benchmark, arguments, result):
    engines.clear()
    arguments.resume = True
    arguments.policies = ["h2o", "streaming_llm"]
    benchmark.run(arguments)
    both = [("full", None), ("streaming_llm", 32), ("streaming_llm", 64)] * 2
    assert engines[0].calls == both
    completed = json.loads(arguments.json.read_text())
    assert [row for row in completed["rows"] if row["policy"] != "streaming_llm"] == result["rows"]
    assert len(completed["rows"]) == len(result["rows"]) + 2
    engines.clear()
    benchmark.run(arguments)
    assert engines[0].calls == []


def test_no_trajectory_begins_that_would_end_too_late(benchmark, arguments):
    arguments.minutes = 1e-9
    result = benchmark.run(arguments)
    assert result["trajectories"] == []


def test_another_stride_is_not_mixed_in(benchmark, arguments, result):
    arguments.resume, arguments.stride = True, 32
    with pytest.raises(SystemExit, match="stride 16"):
        benchmark.run(arguments)


def test_no_text_is_written(result):
    assert "ttt" not in json.dumps(result)


@pytest.mark.parametrize(("budget", "row"), [(32, 48), (64, 80)])
def test_first_evicted_row(budget, row):
    assert first_evicted_row(budget, 16) == row


def test_rows_before_the_first_event_do_not_count(benchmark, arguments):
    arguments.budgets = [32, 128]
    result = json.loads(json.dumps(benchmark.run(arguments)))
    (one, _) = result["trajectories"]
    by_budget = {
        run["budget"]: run["all"]["rows"] for run in one["runs"] if run["setting"] == "h2o"
    }
    assert by_budget[128] < by_budget[32] == 64
    positions = np.arange(one["tokens"])
    assert by_budget[128] <= (positions >= 144).sum()


def test_tables_and_plot(result, tmp_path):
    tables = load("plots/tables.py")
    lines = tables.eviction_fidelity_table(result).splitlines()
    assert len(lines) == 2 + len(result["rows"])
    assert lines[3].startswith("| `agentkv` | 32 | 2 | 0.087 (0.087 to 0.087) | 0.087 | 0.087 |")
    lines = tables.eviction_differences_table(result).splitlines()
    assert "| 2 of 2 |" in lines[2]
    assert "-0.067" in lines[2]
    picture = tmp_path / "picture.png"
    load("plots/eviction_fidelity.py").draw(result).savefig(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
