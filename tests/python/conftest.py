"""What several test files share: the repository, an installed C++ prefix, the demo model."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Engine processes inherit these: no test asks a model hub or reports usage.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")


def run_checked(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its standard output; fail the test with all it printed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        pytest.fail(f"{words}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


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
    run_checked(
        "cmake", "--install", build_directory, "--prefix", prefix, "--component", "cpp"
    )
    return prefix


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the converted demo model, SmolLM2-135M-Instruct."""
    default = Path.home() / ".cache" / "phasekv" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("PHASEKV_DEMO_MODEL", default))
    if not (folder / "config.json").exists():
        pytest.skip(f"no demo model in {folder}: run `make model`")
    return folder
