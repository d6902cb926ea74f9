"""Running commands from tests, and where the repository is."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run_checked(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its standard output; fail the test with all it printed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        words = " ".join(str(word) for word in command)
        pytest.fail(f"{words}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout
