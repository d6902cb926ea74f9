"""Takes every barrier out of the CUDA kernels, one at a time, and runs the emulation's tests.

A barrier whose absence no test notices is either not needed or not tested. ThreadSanitizer's
program runs first, on small shapes, then all emulated tests in all thread orders. The build folder
must be configured already; kernels are edited in the working tree and restored.

Example: python tests/cuda_emulation/take_out_barriers.py build --only attend_rows_tile.cuh
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BARRIER = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|wait_async_copies<0>\(\);")
DEFINED_IN = "platform.cuh"  # where barriers are made, not used
PROGRAMS = {
    "phasekv_cuda_emulation_races": "EveryThreadOrder.*:Each/SelectTop.*/forward",
    "phasekv_cuda_emulation_tests": "-PlantedBugs.*:*ThreadsDoNotMatter*",
}


class Barrier(NamedTuple):
    """A line of a kernel's source with a barrier; ``index`` counts from 0."""

    path: Path
    index: int

    def __str__(self) -> str:
        return f"{self.path.name}:{self.index + 1}"


def barriers() -> list[Barrier]:
    """All of them."""
    found = []
    for path in sorted((ROOT / "kernels").glob("*.cu*")):
        if path.name != DEFINED_IN:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [Barrier(path, i) for i, line in enumerate(lines) if BARRIER.search(line)]
    return found


def who_notices(barrier: Barrier, build: Path) -> str | None:
    """The test that fails without the barrier; None where every test passes."""
    text = barrier.path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    lines[barrier.index] = BARRIER.sub("", lines[barrier.index], count=1)
    try:
        barrier.path.write_text("".join(lines), encoding="utf-8")
        for program, tests in PROGRAMS.items():
            subprocess.run(
                ["cmake", "--build", build, "--target", program], check=True, capture_output=True
            )
            run = subprocess.run(
                [
                    build / "tests" / "cuda_emulation" / program,
                    f"--gtest_filter={tests}",
                    "--gtest_fail_fast",
                ],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
            )
            if run.returncode != 0:
                return f"{program} {failing_test(run.stdout)}"
    finally:
        barrier.path.write_text(text, encoding="utf-8")
    return None


def failing_test(output: str) -> str:
    """The first that failed, or the one in which the program was ended."""
    failed = re.search(r"FAILED +] ([^\s,]+)", output)
    return failed.group(1) if failed else str(re.findall(r"RUN +] (.*)", output)[-1])


def main() -> int:
    """One line per barrier; status 1 where one is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="CMake's build folder")
    parser.add_argument("--only", help="name of the one source to look at")
    arguments = parser.parse_args()
    missed = 0
    for barrier in barriers():
        if arguments.only not in (None, barrier.path.name):
            continue
        noticed = who_notices(barrier, arguments.build.resolve())
        missed += noticed is None
        print(f"{barrier}: {noticed or 'NOBODY NOTICES'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
