"""Processes forked from one that has imported what vLLM's engines import.

vLLM starts an engine core and its worker as new interpreters, which spend most of a tiny engine's
start on importing torch and vLLM. With `use_fork_server` one process imports them, once for a test
worker, and what is to be spawned is forked from it. Nothing but imports ran there: an engine still
has processes of its own, with the environment of whoever starts it. Programs that tests run, such
as `phasekv serve` and the documentation's, are interpreters of their own with engines of theirs.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

# Imported before the first fork: all that vLLM imports while it starts an engine on the CPU.
PRELOADED = [
    "fork_server",
    "torch",
    "transformers",
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]
TESTS = Path(__file__).parent


class ForkedProcess(ForkServerProcess):
    """A process forked from the server, with environment and outputs of the one that starts it."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        # A server that starts now has to find this module.
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            super().start()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_outputs": [reduction.DupFd(1), reduction.DupFd(2)]}

    def run(self) -> None:
        import torch

        # Collections, of which vLLM asks for several, need not look through what was imported.
        gc.freeze()
        for descriptor, output in enumerate(self._outputs, start=1):
            received = output.detach()
            os.dup2(received, descriptor)
            os.close(received)
        os.environ.clear()
        os.environ.update(self._environment)
        if "OMP_NUM_THREADS" in os.environ:  # which torch reads when it is imported
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        # Its own processes come from the same server; CPython would start another one for them.
        forkserver._forkserver.ensure_running = resource_tracker.ensure_running
        _fork_instead_of_spawning()
        super().run()


class ForkingContext(ForkServerContext):
    """What `multiprocessing.get_context` returns for "spawn"."""

    Process = ForkedProcess


def use_fork_server() -> None:
    """Fork what this process and its engines are to spawn; the first start makes the server."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    _fork_instead_of_spawning()


def _fork_instead_of_spawning() -> None:
    forking = ForkingContext()
    original = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return forking if method == "spawn" else original(method)

    multiprocessing.get_context = get_context
