"""What several test files share: the repository, an installed C++ prefix, the demo model."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import REPOSITORY, run_checked
from fork_server import use_fork_server
from frozen_imports import pytest_collection_finish, pytest_sessionfinish  # noqa: F401
from phasekv.model_conversion import default_model_directory, is_converted

# Engine processes inherit these: no test asks a model hub or reports usage.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# OpenMP's threads wait for each other by spinning: two processes that each use all cores crawl.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
use_fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, then those with engines: no worker is left with one last.

    Workers that run files side by side take them in this order (`--no-loadscope-reorder`).
    """
    slow, engines = (
        Counter(item.path for item in items if item.get_closest_marker(name))
        for name in ("slow", "engine")
    )
    items.sort(key=lambda item: (-slow[item.path], -engines[item.path], item.path))


@pytest.fixture(scope="module", autouse=True)
def _own_environment() -> Iterator[None]:
    """Each test file leaves the environment as it found it, and so what vLLM remembers of it.

    Commands and evaluation engines ask for an engine inside their own process; the engines of
    another file that the same worker runs later must not inherit that.
    """
    found = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(found)
    if "vllm.envs" in sys.modules:
        sys.modules["vllm.envs"].disable_envs_cache()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def build_directory() -> Path:
    """CMake's build directory, as `make build` or PHASEKV_BUILD_DIR names it."""
    directory = Path(os.environ.get("PHASEKV_BUILD_DIR", REPOSITORY / "build"))
    if not (directory / "CMakeCache.txt").exists():
        pytest.skip(f"no CMake build in {directory}: run `make build`")
    return directory


@pytest.fixture(scope="session")
def installed_prefix(build_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix that holds the C++ library as `cmake --install` lays it out."""
    prefix = tmp_path_factory.mktemp("prefix")
    run_checked("cmake", "--install", build_directory, "--prefix", prefix, "--component", "cpp")
    return prefix


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the converted demo model, SmolLM2-135M-Instruct."""
    folder = default_model_directory()
    if not is_converted(folder):
        pytest.skip(f"no demo model in {folder}: run `make model`")
    return folder
