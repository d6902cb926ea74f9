"""A project outside the repository finds the installed C++ library, builds and runs."""

import math
import shutil
from pathlib import Path

from commands import run_checked


def test_find_package_builds_and_runs_an_op(
    repository: Path, installed_prefix: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(repository / "tests" / "consumer", source)
    build = tmp_path / "build"
    run_checked(
        "cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={installed_prefix}"
    )
    run_checked("cmake", "--build", build)

    rotated, refused = run_checked(build / "consumer").splitlines()

    assert [float(word) for word in rotated.split()[1:]] == [
        round(math.cos(1.0), 6),
        round(math.sin(1.0), 6),
    ]
    assert refused.startswith("refused ")
    assert "rotary_dim" in refused


def test_installed_headers_need_no_python_torch_or_cuda(installed_prefix: Path) -> None:
    headers = list((installed_prefix / "include" / "phasekv").rglob("*.h"))
    assert headers
    for header in headers:
        included = [line for line in header.read_text().splitlines() if line.startswith("#include")]
        for line in included:
            if line.startswith('#include "phasekv/'):
                continue  # which is one of these headers
            assert not any(word in line for word in ("Python.h", "torch", "pybind", "cuda")), (
                header.name + ": " + line
            )
