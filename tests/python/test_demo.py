"""The memory demo: its files and tables with a stand-in engine, and a short real run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evaluation.fake_engine import FakeEngine
from phasekv.cli import main
from phasekv.demo import memory
from phasekv.demo.report import report_html

METHODS = ["full_recompute", "full_reuse", "cacheblend", "agentkvshift", "phaseshift"]


def demo(output, said, **changes):
    options = {
        "model": Path("some-model"),
        "locomo": None,
        "questions": 10,
        "notes": 8,
        "ratio": 0.1,
        "encode": "prefix",
        "answer_tokens": 8,
        "output": output,
        "say": said.append,
    }
    return memory.MemoryDemo(**{**options, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("demo")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "MemoryEngine", FakeEngine)
        result = demo(output, said).run()
    return output, "\n".join(said), result


def test_json_is_the_result(finished):
    output, _, result = finished
    written = json.loads((output / "demo.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(result))
    assert written["notes"] >= 40
    assert len(written["questions"]) == 10
    assert all(len(row["notes"]) == 8 for row in written["questions"])
    assert list(written["methods"]) == METHODS
    assert written["machine"]["processor"]


def test_each_note_is_encoded_once(tmp_path, monkeypatch):
    engines = []

    def start(*_, **__):
        engines.append(FakeEngine())
        return engines[0]

    monkeypatch.setattr(memory, "MemoryEngine", start)
    result = demo(tmp_path, [], encode="alone").run()
    (engine,) = engines
    assert len(set(engine.stored)) == len(engine.stored) == result["encoded_notes"]
    assert all(prefix == () for prefix, _ in engine.stored)
    assert result["encoded_tokens"] == sum(len(chunk) for _, chunk in engine.stored)


def test_every_method_answers_every_question(finished):
    _, said, result = finished
    for row in result["questions"]:
        assert list(row["methods"]) == METHODS
        assert row["question"] in said
        for method in METHODS:
            assert row["methods"][method]["answer"]
            assert row["methods"][method]["kl"]
    assert result["methods"]["full_recompute"]["kl"]["mean"] == pytest.approx(0.0)
    assert result["methods"]["full_reuse"]["speedup"] == pytest.approx(8.0)


def test_summary_has_a_line_per_method(finished):
    _, said, _ = finished
    table = said[said.index("method ") :]
    assert [line.split()[0] for line in table.splitlines()[1:6]] == METHODS
    full_reuse = table.splitlines()[2]
    assert re.search(r"0\.50 s +8\.00x", full_reuse)


def test_plot_is_a_picture(finished):
    output, _, _ = finished
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")


class Page(HTMLParser):
    VOID = ("meta", "br", "hr", "link", "img")

    def __init__(self):
        super().__init__()
        self.open = []
        self.links = []
        self.text = []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_report_is_one_whole_page_that_needs_nothing_else(finished):
    output, _, result = finished
    html = (output / "report.html").read_text(encoding="utf-8")
    assert html == report_html({"memory": result})
    page = Page()
    page.feed(html)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    text = " ".join(page.text)
    for row in result["questions"]:
        assert row["question"] in text
    # An answer is shown as text, never as markup.
    assert "<b>battery</b>" in text
    assert "<script" not in html


def test_locomo_is_taken_instead(tmp_path, monkeypatch):
    turns = [
        {"speaker": "Ana", "dia_id": f"D1:{index}", "text": f"I like number{index} best."}
        for index in range(12)
    ]
    conversation = {
        "sample_id": "conv-1",
        "conversation": {
            "speaker_a": "Ana",
            "speaker_b": "Ben",
            "session_1_date_time": "noon",
            "session_1": turns,
        },
        "qa": [
            {
                "question": f"Who likes number{index}?",
                "answer": "Ana",
                "evidence": [f"D1:{index}"],
                "category": 4,
            }
            for index in range(3)
        ],
    }
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([conversation]))
    monkeypatch.setattr(memory, "MemoryEngine", FakeEngine)
    result = demo(tmp_path / "out", [], locomo=path, questions=3).run()
    assert result["data"] == "locomo.json"
    assert result["notes"] == 12
    assert [row["notes"][0] for row in result["questions"]] == ["D1:0", "D1:1", "D1:2"]


def test_a_missing_locomo_file_is_one_line(tmp_path, capsys):
    words = ["demo", "memory", "--model", str(tmp_path), "--locomo", str(tmp_path / "none.json")]
    assert main(words) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_real_run(demo_model, tmp_path):
    said = []
    result = demo(tmp_path, said, model=demo_model, questions=1, answer_tokens=4).run()
    for method in METHODS[1:]:
        row = result["methods"][method]
        assert row["chunks_found"] == 8
        assert row["chunks_missed"] == 0
        assert row["tokens_computed"] < result["methods"]["full_recompute"]["tokens_computed"]
        assert 0.0 < row["kl"]["mean"] < 5.0
    assert result["methods"]["full_recompute"]["kl"]["mean"] == 0.0
    reuse, shift = (result["methods"][name]["charged_ratio"] for name in METHODS[1::3])
    assert reuse < shift < 0.5
