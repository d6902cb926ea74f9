"""What is spawned in the tests is forked, and sees and says what a spawned process does."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

import pytest


def _say(who: str, nested: bool) -> None:
    print(who, os.environ.get("WHO"), os.environ.get("OLD"), "torch" in sys.modules, flush=True)
    if nested:
        os.environ["WHO"] = "changed"
        _run("grandchild", nested=False)
        print("what went wrong", file=sys.stderr, flush=True)
        sys.exit(3)


def _run(who: str, nested: bool) -> int | None:
    process = multiprocessing.get_context("spawn").Process(target=_say, args=(who, nested))
    process.start()
    process.join()
    return process.exitcode


def test_environment_outputs_and_exit_status_are_the_starters(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WHO", "somebody")
    monkeypatch.setenv("OLD", "there")
    assert _run("child", nested=True) == 3
    monkeypatch.delenv("OLD")
    assert _run("another", nested=False) == 0
    said = capfd.readouterr()
    assert said.out.splitlines() == [
        "child somebody there True",
        "grandchild changed there True",
        "another somebody None True",
    ]
    assert said.err.endswith("what went wrong\n")  # after what the imports say


def test_modules_are_imported_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes are forks of one: both have the server as their parent."""
    context = multiprocessing.get_context("spawn")
    parents = []
    for _ in range(2):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_send_parent, args=(send,))
        process.start()
        parents.append(receive.recv())
        process.join()
    assert parents[0] == parents[1] != os.getpid()


def _send_parent(send: Connection) -> None:
    send.send(os.getppid())
