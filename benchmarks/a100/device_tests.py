"""Runs the C++ tests of the kernels on a device, each suite in a process of its own.

A kernel that writes where it must not spoils CUDA for its whole process, and one that never ends
holds it up. Neither then hides what the other suites find.

Example: python benchmarks/a100/device_tests.py --json tests.json -- \
    compute-sanitizer --tool memcheck build/cuda/tests/cuda_device/phasekv_cuda_device_tests
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LINES_OF_A_FAILURE = 50
END_OF_A_TEST = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+).*\(\d+ ms\)$", re.MULTILINE)


@dataclass
class Suite:
    """The tests of one op, and what became of them.

    Attributes
    ----------
    unfinished : list of str
        Tests that did not end, or did not begin, before the process did.
    """

    name: str
    tests: list[str]
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    exit_status: int = 0
    seconds: float = 0.0
    output: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all tests have passed, and the process says nothing else."""
        return self.exit_status == 0 and self.passed == self.tests

    def describe(self) -> str:
        """One line."""
        counts = [
            f"{len(names)} {what}"
            for what in ("passed", "failed", "skipped", "unfinished")
            if (names := getattr(self, what))
        ]
        end = "" if self.is_good else f", exit status {self.exit_status}"
        return f"{self.name:26} {self.seconds:6.1f} s  {', '.join(counts)}{end}"

    def end_of_output(self) -> str:
        """What says why it is not good."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in lines[-LINES_OF_A_FAILURE:])

    def to_json(self) -> dict[str, Any]:
        """Everything but the output."""
        return {
            "suite": self.name,
            "seconds": round(self.seconds, 2),
            "exit_status": self.exit_status,
            "passed": len(self.passed),
            "failed": self.failed,
            "skipped": self.skipped,
            "unfinished": self.unfinished,
        }


def parse_list(text: str) -> list[Suite]:
    """What a program of GoogleTest prints for ``--gtest_list_tests``."""
    suites: list[Suite] = []
    for line in text.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  ") and suites:
            suites[-1].tests.append(f"{suites[-1].name}.{name}")
        elif name.endswith("."):
            suites.append(Suite(name.removesuffix("."), []))
    return suites


def chosen(suites: list[Suite], patterns: Sequence[str]) -> list[Suite]:
    """Those tests that one of the patterns names."""
    kept = [
        Suite(suite.name, [t for t in suite.tests if any(fnmatchcase(t, p) for p in patterns)])
        for suite in suites
    ]
    return [suite for suite in kept if suite.tests]


def kill(process: subprocess.Popen[str]) -> None:
    """Whatever it has started too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Runner:
    """Runs suites, and leaves no process behind when it is ended itself."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self.command, self.seconds = command, seconds
        self._running: set[subprocess.Popen[str]] = set()
        signal.signal(signal.SIGTERM, self._end)

    def __call__(self, suite: Suite) -> Suite:
        """Note what became of the suite's tests; one that takes too long ends with status -9."""
        begin = time.monotonic()
        process = subprocess.Popen(
            [*self.command, f"--gtest_filter={':'.join(suite.tests)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._running.add(process)
        try:
            suite.output, _ = process.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            kill(process)
            suite.output, _ = process.communicate()
        self._running.discard(process)
        suite.seconds = time.monotonic() - begin
        suite.exit_status = process.returncode
        ends = {name: end for end, name in END_OF_A_TEST.findall(suite.output)}
        names = {"OK": suite.passed, "FAILED": suite.failed, "SKIPPED": suite.skipped}
        for test in suite.tests:
            names.get(ends.get(test, ""), suite.unfinished).append(test)
        return suite

    def _end(self, *_: object) -> None:
        for process in self._running:
            kill(process)
        os._exit(128 + signal.SIGTERM)


def main() -> int:
    """0 if every test has passed, and there was one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", nargs="+", default=["*"], help="patterns of their names")
    parser.add_argument("--seconds", type=float, default=600, help="that a suite may take")
    parser.add_argument("--jobs", type=int, default=1, help="suites that run at the same time")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("command", nargs="+", help="ends with the program of tests")
    arguments = parser.parse_args()
    listed = subprocess.run(
        [arguments.command[-1], "--gtest_list_tests"], capture_output=True, text=True, check=True
    )
    suites = chosen(parse_list(listed.stdout), arguments.tests)
    done: list[Suite] = []
    run = Runner(arguments.command, arguments.seconds)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for suite in pool.map(run, suites):
            done.append(suite)
            if not suite.is_good:
                print(f"{suite.name}:\n{suite.end_of_output()}", flush=True)
            # Anew after each suite: nobody knows how long the device is there.
            rows = [one.to_json() for one in done]
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(*(suite.describe() for suite in done), sep="\n")
    good = sum(suite.is_good for suite in done)
    tests = sum(len(suite.passed) for suite in done)
    print(f"{good} of {len(suites)} suites are good, {tests} tests have passed")
    return 0 if tests > 0 and good == len(suites) else 1


if __name__ == "__main__":
    sys.exit(main())
