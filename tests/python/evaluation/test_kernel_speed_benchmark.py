"""``benchmarks/cuda/kernel_speed.py``, on the CPU."""

from __future__ import annotations

import json
import sys

import pytest
from benchmark_scripts import load


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """The exit status and the rows for prompts of so many tokens."""

    def run(tokens):
        path = tmp_path / "kernels.json"
        words = ["--device", "cpu", "--tokens", str(tokens), "--repetitions", "1"]
        monkeypatch.setattr(sys, "argv", ["kernel_speed.py", *words, "--json", str(path)])
        status = load("cuda/kernel_speed.py").main()
        return status, json.loads(path.read_text(encoding="utf-8"))["rows"]

    return run


def test_every_op_has_a_time_and_a_bound(measure):
    status, rows = measure(160)
    assert status == 0
    assert len(rows) == len({row["op"] for row in rows}) == 14
    for row in rows:
        assert row["microseconds"] > 0
        assert row["share"] > 0
        assert row["bound"] in ("copy", "matrix product")
    peers = {name for row in rows for name in row["peer_microseconds"]}
    assert "torch SDPA" in peers


def test_an_op_that_fails_is_named_and_does_not_stop_the_others(measure):
    # These have 128 queries, the last of the prompt's.
    status, rows = measure(100)
    assert status == 1
    failed = {row["op"]: row["error"] for row in rows if "error" in row}
    assert list(failed) == ["accumulate_attention", "expected_attention_score"]
    assert "query_limits[0]" in failed["accumulate_attention"]
    assert len(rows) == 14


def test_a_machine_without_a_device_is_told_so(monkeypatch, capsys):
    script = load("cuda/kernel_speed.py")
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernel_speed.py"])
    assert script.main() != 0
    assert "no CUDA device" in capsys.readouterr().err
