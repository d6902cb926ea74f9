"""The OpenAI-compatible server, started as a user would with ``phasekv serve``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

NOTES = [
    "Maria planted three apple trees behind the old library on Saturday morning.",
    "Tom repaired the blue bicycle and left the key with the neighbour upstairs.",
]


class Server:
    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.log = log
        self.output = log.open("w")
        self.process = subprocess.Popen(
            [
                Path(sys.executable).parent / "phasekv",
                "serve",
                model,
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--enforce-eager",
                "--max-model-len",
                "2048",
                "--dtype",
                "float32",
                "--served-model-name",
                "demo",
                *flags,
            ],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
        )

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.base + path, timeout=60) as reply:
            return reply.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self.base + path,
            data=json.dumps({"model": "demo", "temperature": 0, **body}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def tokens(self, text: str) -> list[int]:
        _, reply = self.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return reply["tokens"]

    def counter(self, name: str) -> float:
        for line in self.get("/metrics").splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
        pytest.fail(f"no metric {name}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self.output.close()


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    server = Server(
        demo_model,
        tmp_path_factory.mktemp("server") / "log",
        "--method",
        "phaseshift",
        "--ratio",
        "0.2",
        "--auto",
        "--budget",
        "1024",
        "--stride",
        "128",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
    )
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_completions_report_and_count(server):
    chunks = [server.tokens(note) for note in NOTES]
    before = server.tokens("Notes:\n")
    prompt, ranges = list(before), []
    for chunk in chunks:
        ranges.append([len(prompt), len(prompt) + len(chunk)])
        prompt += chunk
    prompt += server.tokens("\nQuestion: Who repaired the bicycle? Answer:")
    body = {"prompt": prompt, "max_tokens": 4}
    status, exact = server.post("/v1/completions", body)
    assert status == 200
    named = {**body, "kv_transfer_params": {"phasekv": {"chunks": ranges}}}
    status, first = server.post("/v1/completions", named)
    assert status == 200
    assert first["kv_transfer_params"]["phasekv"]["chunks_missed"] == 2
    assert first["choices"][0]["text"] == exact["choices"][0]["text"]
    found = server.counter("vllm:phasekv_chunks_found_total")
    status, second = server.post("/v1/completions", named)
    report = second["kv_transfer_params"]["phasekv"]
    assert report["chunks_found"] == 2
    assert report["method"] == "phaseshift"
    assert 0 < report["charged_ratio"] < 1
    assert server.counter("vllm:phasekv_chunks_found_total") == found + 2
    assert server.counter("vllm:phasekv_tokens_reused_total") >= report["tokens_reused"]


def test_chat_finds_chunks_by_content(server):
    note = "The meeting about the harbour bridge moved to the ninth of May at half past two."
    system = {"role": "system", "content": "You answer from notes."}
    ask = {
        "messages": [system, {"role": "user", "content": f"Notes:\n{note}\nWhen do we meet?"}],
        "max_tokens": 3,
    }
    tokens = server.tokens("\n" + note + "\n")
    server.post(
        "/v1/completions",
        {
            "prompt": tokens,
            "max_tokens": 1,
            "kv_transfer_params": {"phasekv": {"chunks": [[0, len(tokens)]], "store": True}},
        },
    )
    status, reply = server.post("/v1/chat/completions", ask)
    assert status == 200
    assert reply["kv_transfer_params"]["phasekv"]["chunks_found"] == 1


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"chunks": [[0, 99999]]}, "chunks[0]"),
        ({"ratio": 7}, "ratio"),
        ({"sauce": 1}, "sauce"),
        ({"eviction": {"budget": 2048}}, "budget"),
        ({"eviction": {"budget": 200}}, "budget"),
    ],
)
def test_bad_request_is_http_400(server, parameters, field):
    status, reply = server.post(
        "/v1/completions",
        {"prompt": "Hello", "max_tokens": 1, "kv_transfer_params": {"phasekv": parameters}},
    )
    assert status == 400
    assert field in reply["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1})[0] == 200


TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def test_a_tool_using_chat_is_evicted_and_counted(server):
    """The history holds a call and its result; the request gets a budget of its own."""
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "read_file", "arguments": json.dumps({"path": "notes.txt"})},
    }
    text = " ".join(f"Line {line} of the notes says {line * 7 % 31}." for line in range(60))
    ask = {
        "messages": [
            {"role": "user", "content": "What do the notes say in line nine?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": text},
            {"role": "user", "content": "Now tell me."},
        ],
        "tools": [TOOL],
        "max_tokens": 4,
        "kv_transfer_params": {
            "phasekv": {"eviction": {"policy": "phase_balanced", "budget": 256}, "session": "notes"}
        },
    }
    status, reply = server.post("/v1/chat/completions", ask)
    assert status == 200, reply
    report = reply["kv_transfer_params"]["phasekv"]
    assert report["eviction"]["policy"] == "phase_balanced"
    assert report["eviction"]["tokens_kept"] < 256 + 128 < report["eviction"]["tokens_seen"]
    assert report["session"]["reason"] == "new session"
    name = "vllm:phasekv_tokens_evicted_total"
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(name)]
    (line,) = [line for line in lines if 'policy="phase_balanced"' in line]
    assert float(line.rsplit(" ", 1)[1]) == report["eviction"]["tokens_evicted"]


def test_a_chat_goes_on_with_its_new_messages_only(server, demo_model):
    """What a template would leave out of the history stays: nothing is rendered anew."""
    from transformers import AutoTokenizer

    from phasekv.memory import render_new_messages

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    parameters = {"phasekv": {"session": "new messages only"}}
    first = {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 12,
        "return_token_ids": True,
        "kv_transfer_params": parameters,
    }
    status, reply = server.post("/v1/chat/completions", first)
    assert status == 200, reply
    said = reply["choices"][0]["token_ids"]
    ended = reply["choices"][0]["finish_reason"] == "stop"
    new = render_new_messages(
        tokenizer, [{"role": "user", "content": "And another?"}], turn_ended=ended
    )
    second = {"prompt": new, "max_tokens": 6, "logprobs": 0}
    status, appended = server.post(
        "/v1/completions",
        {**second, "kv_transfer_params": {"phasekv": {**parameters["phasekv"], "append": True}}},
    )
    assert status == 200, appended
    session = appended["kv_transfer_params"]["phasekv"]["session"]
    # The last token of a turn is sampled and not computed yet.
    assert session["resumed_tokens"] == len(reply["prompt_token_ids"]) + len(said) - 1
    whole = {**second, "prompt": [*reply["prompt_token_ids"], *said, *new]}
    status, plain = server.post("/v1/completions", whole)
    assert status == 200, plain
    assert appended["choices"][0]["text"] == plain["choices"][0]["text"]
