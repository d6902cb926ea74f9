"""The agent demo: its files and tables with a stand-in server, and a short real run."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from evaluation.fake_engine import FakeEngine
from phasekv.cli import main
from phasekv.demo import agent, memory
from phasekv.demo.report import report_html
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.server_replay import FORCED_TOKENS, Turn, assistant_turns
from phasekv.phases import phase_names
from test_demo import Page
from test_demo import demo as memory_demo


class FakeServer:
    """Holds what fits a budget, and finds every word of a full run half as likely as before."""

    asked: list[dict] = []  # noqa: RUF012 - the test's own record

    def __init__(self, model, settings, options, log):
        self.settings = settings
        self.options = options
        self.sessions = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def complete(self, tokens, **parameters):
        self.asked.append({"tokens": list(tokens), **parameters})
        forced = parameters["vllm_xargs"][FORCED_TOKENS]
        assert parameters["max_tokens"] == len(forced)
        wishes = parameters["kv_transfer_params"]["phasekv"]
        seen = len(tokens) + len(forced) - 1
        budget = wishes["eviction"].get("budget", 10**9)
        stride = self.settings["eviction"]["stride"]
        start = max(0, seen // stride * stride - budget)
        name = wishes["session"]
        resumed = self.sessions.get(name, 0)
        self.sessions[name] = seen
        logprob = math.log(0.5 if budget > 10**6 else 0.25)
        wrong = forced[0] + 1
        top = [{f"token_id:{token}": logprob} for token in forced]
        if budget < 10**6:
            top[0] = {f"token_id:{forced[0]}": logprob, f"token_id:{wrong}": logprob + 0.1}
        return {
            "choices": [
                {"logprobs": {"token_logprobs": [logprob] * len(forced), "top_logprobs": top}}
            ],
            "kv_transfer_params": {
                "phasekv": {
                    "eviction": {
                        "tokens_seen": seen,
                        "tokens_kept": seen - start,
                        "compactions": int(start > 0),
                        "kept_by_phase": {"think": 0.0, "act": 0.0, "tool": 0.0, "others": budget}
                        if start > 0
                        else {},
                    },
                    "session": {"resumed_tokens": resumed},
                }
            },
        }


def demo(output, said, **changes):
    options = {
        "model": Path("some-model"),
        "trajectory": None,
        "index": 0,
        "policy": "agentkv",
        "budgets": (256, 512),
        "stride": 128,
        "turns": 6,
        "max_tokens": 4096,
        "output": output,
        "say": said.append,
    }
    return agent.AgentDemo(**{**options, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory, demo_model):
    output = tmp_path_factory.mktemp("demo")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "Server", FakeServer)
        FakeServer.asked.clear()
        result = demo(output, said, model=demo_model).run()
    return output, "\n".join(said), result


def test_json_is_the_result(finished):
    output, _, result = finished
    written = json.loads((output / "agent.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(result))
    assert 2000 <= written["tokens"] <= 4096
    assert 3 <= len(written["turns"]) <= 6
    assert list(written["runs"]) == ["full", "agentkv 256", "agentkv 512"]


def test_the_trajectory_has_all_phases_in_every_part(finished):
    _, _, result = finished
    assert sum(count for _, count in result["phases"]) == result["tokens"]
    assert {name for name, _ in result["phases"]} == set(phase_names())
    assert all(turn["said_by_phase"]["think"] > 20 for turn in result["turns"])
    assert sum(turn["said_by_phase"]["act"] > 10 for turn in result["turns"]) >= 3
    last = result["turns"][-1]
    assert sum(last["seen_by_phase"].values()) == last["runs"]["full"]["tokens_seen"]


def test_turns_follow_each_other_as_one_history(finished):
    _, _, result = finished
    asked = FakeServer.asked[1:]  # the first one warms up
    assert len(asked) == 3 * len(result["turns"])
    for run in range(3):
        mine = asked[run::3]
        assert len({request["kv_transfer_params"]["phasekv"]["session"] for request in mine}) == 1
        for before, after in itertools.pairwise(mine):
            history = before["tokens"] + before["vllm_xargs"][FORCED_TOKENS]
            assert after["tokens"][: len(history)] == history
    sessions = {request["kv_transfer_params"]["phasekv"]["session"] for request in asked}
    assert len(sessions) == 3
    assert result["turns"][1]["runs"]["full"]["tokens_resumed"] > 0


def test_agreement_is_with_the_full_run(finished):
    _, said, result = finished
    full, small = result["runs"]["full"], result["runs"]["agentkv 256"]
    assert full["top1"] == 1.0
    assert full["logprob_difference"] == 0.0
    assert small["nll"] - full["nll"] == pytest.approx(math.log(2))
    assert small["logprob_difference"] == pytest.approx(math.log(2))
    lengths = np.array([turn["end"] - turn["begin"] for turn in result["turns"]])
    assert small["top1"] == pytest.approx(1 - len(lengths) / lengths.sum())
    assert f"{small['top1']:.0%}" in said


def test_blocks_and_phases_of_what_is_kept(finished):
    _, _, result = finished
    for turn in result["turns"]:
        for run in turn["runs"].values():
            assert sum(run["kept_by_phase"].values()) == pytest.approx(run["tokens_kept"])
            held = run["tokens_kept"] / result["block_size"]
            assert held <= run["blocks_held"] <= held + 1
    last = result["turns"][-1]
    assert last["runs"]["full"]["kept_by_phase"] == last["seen_by_phase"]


def test_a_turn_without_an_event_keeps_what_the_one_before_kept():
    phases = np.array([3] * 90 + [0] * 10, dtype=np.uint8)
    before = {"think": 5.0, "act": 1.0, "tool": 30.0, "others": 34.0}
    report = {"tokens_seen": 100, "tokens_kept": 80, "kept_by_phase": {}}
    kept = agent.kept_by_phase(report, phases, before)
    assert kept == {"think": 15.0, "act": 1.0, "tool": 30.0, "others": 34.0}


def test_the_table_and_the_picture(finished):
    output, said, _ = finished
    table = said[said.index("run  ") :]
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["full", "agentkv", "agentkv"]
    assert (output / "agent.png").read_bytes().startswith(b"\x89PNG")


def check_page(html, demos):
    page = Page()
    page.feed(html)
    assert page.open == []
    assert [link for link in page.links if link.startswith("#")] == page.links
    assert "<script" not in html
    for name in ("memory", "agent"):
        assert (f'<section id="{name}">' in html) == (name in demos)
    return " ".join(page.text)


def test_the_report_has_a_page_for_each_demo(finished, monkeypatch):
    output, _, result = finished
    alone = (output / "report.html").read_text(encoding="utf-8")
    assert alone == report_html({"agent": result})
    text = check_page(alone, ["agent"])
    assert "loan_export" in text
    monkeypatch.setattr(memory, "MemoryEngine", FakeEngine)
    memory_demo(output, []).run()
    both = (output / "report.html").read_text(encoding="utf-8")
    check_page(both, ["memory", "agent"])
    assert both.count('href="#agent"') == 1


def test_turns_of_the_assistant(demo_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nassistant\n<|im_end|>\n<|im_start|>assistant\n<think>\nso"
    )
    tokens = tokenizer.encode(text)
    turns = assistant_turns(tokens, tokenizer)
    assert [tokenizer.decode(tokens[turn.begin : turn.end]) for turn in turns] == [
        "Hello<|im_end|>",
        "<think>\nso",
    ]
    with pytest.raises(InvalidArgumentError, match="turn of the assistant"):
        assistant_turns(tokenizer.encode("Hello"), tokenizer)
    assert turns[1] == Turn(turns[1].begin, len(tokens))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--index", "7"], "index = 7"),
        (["--turns", "0"], "turns = 0"),
        (["--trajectory", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-tokens", "0"], "max_tokens = 0"),
    ],
)
def test_bad_arguments_are_one_line(demo_model, tmp_path, capsys, words, message):
    options = ["--model", str(demo_model), "--output", str(tmp_path)]
    assert main(["demo", "agent", *options, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_run(demo_model, tmp_path):
    said = []
    # The second turn is cut short.
    options = {"model": demo_model, "budgets": (128,), "stride": 64, "turns": 2, "max_tokens": 850}
    result = demo(tmp_path, said, **options).run()
    first, second = (turn["runs"] for turn in result["turns"])
    for turn in (first, second):
        assert turn["full"]["tokens_kept"] == turn["full"]["tokens_seen"]
        assert turn["agentkv 128"]["tokens_seen"] == turn["full"]["tokens_seen"]
        assert 128 <= turn["agentkv 128"]["tokens_kept"] < 128 + 64
        assert turn["agentkv 128"]["blocks_held"] <= (128 + 64) // 32
        assert 0.0 < turn["agentkv 128"]["logprob_difference"] < 10.0
        assert 0.3 < turn["full"]["nll"] < 6.0
    assert second["full"]["tokens_resumed"] == first["full"]["tokens_seen"]
    assert second["agentkv 128"]["tokens_resumed"] == first["full"]["tokens_seen"]
    assert first["agentkv 128"]["kept_by_phase"]["think"] > 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_server_refuses_is_told(demo_model, tmp_path, capsys):
    words = ["--budgets", "100", "--turns", "1", "--output", str(tmp_path)]
    assert main(["demo", "agent", "--model", str(demo_model), *words]) == 2
    error = capsys.readouterr().err
    assert "HTTP 400" in error
    assert "budget = 100" in error
