"""benchmarks/a100/run.sh on a machine that seems to have a device: what it runs, says and skips.

Every tool is a stand-in that checks how it is called; nothing is compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A program of GoogleTest, as far as the scripts know one. Suites behave as they are called.
TESTS = """#!{python}
import os, signal, sys, time

SUITES = {suites}
NAMES = [f"Each/{{suite}}.Test/device_native" for suite in SUITES]
if "--gtest_list_tests" in sys.argv:
    for suite in SUITES:
        print(f"Each/{{suite}}.")
        print("  Test/device_native  # GetParam() = device (native)")
        print("  Other/device_native  # GetParam() = device (native)")
    sys.exit(0)
(wanted,) = [word for word in sys.argv if word.startswith("--gtest_filter=")]
status = 0
for test in wanted.removeprefix("--gtest_filter=").split(":"):
    suite = test.removeprefix("Each/").split(".")[0]
    print(f"[ RUN      ] {{test}}", flush=True)
    if ".Other/" in test:
        if suite == "Crashing":
            os.kill(os.getpid(), signal.SIGSEGV)
        if suite == "Hanging":
            time.sleep(600)
        if suite == "Wrong":
            print("expected 1, which is 2")
            print(f"[  FAILED  ] {{test}}, where GetParam() = device (native) (3 ms)")
            status = 1
            continue
        if suite == "Skipping":
            print(f"[  SKIPPED ] {{test}} (0 ms)")
            continue
    if suite == "WithoutDevice":
        print("skipped: no device", file=sys.stderr)
        sys.exit(77)
    print(f"[       OK ] {{test}} (12 ms)", flush=True)
sys.exit(status)
"""

CMAKE = """#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS/cmake"
case $1 in
  --version) echo "cmake version $CMAKE_VERSION" ;;
  --build)
    program=build/cuda/tests/cuda_device/phasekv_cuda_device_tests
    mkdir -p "${program%/*}"
    cp "$CALLS/program" "$program"
    ;;
esac
"""

NVIDIA_SMI = """#!/bin/bash
[[ $HAS_DEVICE == yes ]] || { echo "couldn't communicate with the NVIDIA driver"; exit 9; }
case "$*" in
  "") echo "| NVIDIA H200 |" ;;
  "--query-gpu=compute_cap --format=csv,noheader") printf '9.0\\n9.0\\n' ;;
  "--query-gpu=compute_mode --format=csv,noheader") printf 'Default\\nDefault\\n' ;;
  *) echo "invalid combination of input arguments" >&2; exit 6 ;;
esac
"""

COMPUTE_SANITIZER = """#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS/compute-sanitizer"
while [[ $1 == --* ]]; do
  case $1 in
    --tool) [[ $2 =~ ^(memcheck|racecheck|synccheck|initcheck)$ ]] || exit 255; shift 2 ;;
    --error-exitcode) [[ $2 =~ ^[0-9]+$ ]] || exit 255; shift 2 ;;
    *) echo "unrecognised option '$1'" >&2; exit 255 ;;
  esac
done
exec "$@"
"""

NVCC = """#!/bin/bash
[[ $1 == --list-gpu-code ]] && printf 'sm_80\\nsm_90\\n'
"""

# Runs the scripts that need nothing, and stands in for what needs a device.
PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >>"$CALLS/python"
case "$*" in
  "- "*) [[ -z $LACKING ]] || echo "$LACKING" ;;
  *torch.cuda.is_available*) ;;
  "-c import vllm") [[ $HAS_VLLM == yes ]] ;;
  "-m pip "*) mkdir -p build/cuda/site ;;
  "-m pytest "*) echo "3 passed" ;;
  *kernel_speed.py*) cp "$CALLS/kernels.json" "${@: -1}" ;;
  *prefill.py*|*throughput.py*) echo '{"rows": []}' >"${@: -1}" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

KERNELS = {
    "machine": {"device": "abacus"},
    "rows": [
        {"op": "gather_blocks", "tokens": 4096, "share": 0.8},
        {"op": "attend_rows", "tokens": 4096, "error": "an illegal memory access"},
    ],
}


class Machine:
    """A folder with the scripts, and stand-ins for all tools."""

    def __init__(self, folder: Path, repository: Path, suites: list[str]) -> None:
        self.folder = folder / "tree"
        shutil.copytree(repository / "benchmarks" / "a100", self.folder / "benchmarks" / "a100")
        (self.folder / "build" / "googletest").mkdir(parents=True)
        self.calls = folder / "calls"
        self.tools = folder / "tools"
        self.output = folder / "output folder"
        self.calls.mkdir()
        self.tools.mkdir()
        program = TESTS.format(python=sys.executable, suites=suites)
        self._make_tool(self.calls / "program", program)
        (self.calls / "kernels.json").write_text(json.dumps(KERNELS))
        for name, text in {
            "cmake": CMAKE,
            "nvidia-smi": NVIDIA_SMI,
            "compute-sanitizer": COMPUTE_SANITIZER,
            "nvcc": NVCC,
            "ninja": "#!/bin/bash\n",
            "c++": "#!/bin/bash\n",
            "python-of-the-device": PYTHON,
        }.items():
            self._make_tool(self.tools / name, text)

    @staticmethod
    def _make_tool(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *model: Path, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run run.sh."""
        environment = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "PYTHON": str(self.tools / "python-of-the-device"),
            "REAL_PYTHON": sys.executable,
            "CMAKE_VERSION": "4.1.0",
            "HAS_DEVICE": "yes",
            "HAS_VLLM": "no",
            "LACKING": "",
            **settings,
        }
        return subprocess.run(
            [self.folder / "benchmarks" / "a100" / "run.sh", self.output, *model],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def result(self) -> dict[str, Any]:
        """What it has written."""
        result: dict[str, Any] = json.loads((self.output / "result.json").read_text())
        return result

    def statuses(self) -> dict[str, Any]:
        """Exit status of each step, or why it was skipped."""
        return {
            step["step"]: step.get("exit_status", step.get("skipped"))
            for step in self.result()["steps"]
        }

    def called(self, tool: str) -> str:
        """The command lines of a tool."""
        path = self.calls / tool
        return path.read_text() if path.exists() else ""


SANITIZERS = ("memcheck", "racecheck", "synccheck")


def test_everything_runs_for_this_device_and_is_collected(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["GatherScatter", "RotateKeys"])
    done = machine.run()
    assert done.returncode == 0, done.stdout + done.stderr
    steps = ["configure", "build", "tests", "package", "bindings", "kernels", *SANITIZERS]
    without_model = dict.fromkeys(["prefill", "throughput"], "no model folder was given")
    assert machine.statuses() == dict.fromkeys(steps, 0) | without_model
    result = machine.result()
    assert [suite["passed"] for suite in result["tests"]] == [2, 2]
    # Only what is small: the stand-in's tests have the names of none of RotateKeys'.
    assert [suite["suite"] for suite in result["memcheck"]] == ["Each/GatherScatter"]
    assert result["kernels"] == KERNELS
    assert (machine.output / "kernels.png").stat().st_size > 1000
    assert sorted(path.name for path in machine.output.iterdir()) == [
        "kernels.png",
        "log.txt",
        "result.json",
    ]
    configured = machine.called("cmake")
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in configured
    assert f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={machine.folder}/build/googletest" in configured
    assert "--target phasekv_cuda_device_tests _core" in configured


def test_a_model_is_measured_with_prompts_that_it_has_positions_for(
    tmp_path: Path, repository: Path
) -> None:
    machine = Machine(tmp_path, repository, ["GatherScatter"])
    model = tmp_path / "a model"
    model.mkdir()
    machine.run(model, STEPS="build package prefill throughput", HAS_VLLM="yes")
    nothing = f"{model} has no config.json"
    assert machine.statuses()["prefill"] == machine.statuses()["throughput"] == nothing
    config = {"num_hidden_layers": 30, "max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(config))
    machine.run(model, STEPS="prefill")
    assert machine.statuses() == {"prefill": f"{machine.tools}/python-of-the-device has no vllm"}
    done = machine.run(model, STEPS="prefill throughput", HAS_VLLM="yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.statuses() == {"prefill": 0, "throughput": 0}
    assert {"prefill", "throughput"} <= set(machine.result())
    called = machine.called("python")
    assert f"prefill.py --model {model} --dtype bfloat16 --tokens 2048 4096 --engines" in called
    assert f"throughput.py --model {model} --layers 30 --dtype bfloat16" in called


def test_a_machine_without_a_device_is_told_so(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["GatherScatter"])
    done = machine.run(HAS_DEVICE="no")
    assert done.returncode == 1
    assert "no CUDA device: nvidia-smi failed" in done.stderr
    assert "--build" not in machine.called("cmake")


def test_what_the_build_lacks_is_named_before_it_begins(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["GatherScatter"])
    (machine.tools / "c++").write_text("#!/bin/bash\nexit 1\n")
    done = machine.run(CMAKE_VERSION="3.25.1")
    assert done.returncode == 1
    assert "missing: cmake 3.26 or newer, not 3.25.1, a C++20 compiler" in done.stderr
    assert "--build" not in machine.called("cmake")


def test_kernels_are_tested_where_the_python_module_cannot_be_built(
    tmp_path: Path, repository: Path
) -> None:
    machine = Machine(tmp_path, repository, ["GatherScatter"])
    done = machine.run(LACKING="scikit_build_core\nPython.h")
    assert done.returncode == 0, done.stdout + done.stderr
    reason = "missing: scikit_build_core, Python.h"
    assert machine.statuses() == {
        **dict.fromkeys(["configure", "build", "tests", *SANITIZERS], 0),
        **dict.fromkeys(["package", "bindings", "kernels", "prefill", "throughput"], reason),
    }
    assert "PHASEKV_PYTHON" not in machine.called("cmake")
    assert "_core" not in machine.called("cmake")


def test_tests_that_find_no_device_are_no_success(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["WithoutDevice"])
    done = machine.run()
    assert done.returncode == 1
    assert machine.statuses()["tests"] == 1
    assert "0 tests have passed" in done.stdout
    assert "skipped: no device" in done.stdout
    # The others go on.
    assert machine.statuses()["kernels"] == 0


def test_some_steps_alone_use_what_is_there(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["GatherScatter"])
    machine.run(STEPS="build tests")
    assert machine.statuses() == {"configure": 0, "build": 0, "tests": 0}
    machine.run(STEPS="memcheck")
    assert machine.statuses() == {"memcheck": 0}
    assert set(machine.result()) == {"steps", "tests", "memcheck"}
    machine.run(STEPS="kernels")
    assert machine.statuses() == {"kernels": "there is no package"}


def test_a_step_may_not_take_forever(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["Hanging"])
    done = machine.run(STEPS="build tests", SECONDS_PER_STEP="2")
    assert done.returncode == 1
    assert machine.statuses() == {"configure": 0, "build": 0, "tests": 124}


def test_a_suite_neither_spoils_nor_holds_up_the_others(tmp_path: Path, repository: Path) -> None:
    suites = ["Crashing", "Hanging", "Wrong", "Skipping", "Fine"]
    machine = Machine(tmp_path, repository, suites)
    script = repository / "benchmarks" / "a100" / "device_tests.py"
    found = tmp_path / "found.json"
    command = [sys.executable, script, "--json", found, "--seconds", "2", "--jobs", "3"]
    done = subprocess.run(
        [*command, "--", machine.calls / "program"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    rows = json.loads(found.read_text())
    assert [row["suite"] for row in rows] == [f"Each/{suite}" for suite in suites]
    assert [row["passed"] for row in rows] == [1, 1, 1, 1, 2]
    assert [row["exit_status"] for row in rows] == [-11, -9, 1, 0, 0]
    other = [f"Each/{suite}.Other/device_native" for suite in suites]
    assert [row["unfinished"] for row in rows] == [[other[0]], [other[1]], [], [], []]
    assert [row["failed"] for row in rows] == [[], [], [other[2]], [], []]
    assert [row["skipped"] for row in rows] == [[], [], [], [other[3]], []]
    assert "expected 1, which is 2" in done.stdout
    assert "1 of 5 suites are good, 6 tests have passed" in done.stdout


@pytest.mark.parametrize("patterns", [["*Fine.Other*"], ["*Fine*", "*Wrong.Test*"]])
def test_tests_are_chosen_by_name(tmp_path: Path, repository: Path, patterns: list[str]) -> None:
    machine = Machine(tmp_path, repository, ["Crashing", "Wrong", "Fine"])
    script = repository / "benchmarks" / "a100" / "device_tests.py"
    found = tmp_path / "found.json"
    command = [sys.executable, script, "--json", found, "--tests", *patterns]
    subprocess.run([*command, "--", machine.calls / "program"], check=True, capture_output=True)
    passed = {row["suite"]: row["passed"] for row in json.loads(found.read_text())}
    expected = [{"Each/Fine": 1}, {"Each/Wrong": 1, "Each/Fine": 2}]
    assert passed == expected[len(patterns) - 1]


def test_no_test_is_no_success(tmp_path: Path, repository: Path) -> None:
    machine = Machine(tmp_path, repository, ["Fine"])
    script = repository / "benchmarks" / "a100" / "device_tests.py"
    command = [sys.executable, script, "--json", tmp_path / "found.json", "--tests", "*Nothing*"]
    done = subprocess.run([*command, "--", machine.calls / "program"], capture_output=True)
    assert done.returncode == 1
