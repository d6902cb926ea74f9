"""The OpenAI server as a child process, and the requests that a replay sends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from phasekv.errors import Error

_START_SECONDS = 600
_REQUEST_SECONDS = 1200
_NAME = "model"

_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class ServerError(Error):
    """The server did not start, or answered with an error."""

    def __init__(self, value: str, reason: str) -> None:
        super().__init__("server", value, reason)

    def __str__(self) -> str:
        return f"{self.argument}: {self.value}: {self.reason}"


class Server:
    """``phasekv serve`` on a free port of this machine, while the context lasts.

    Parameters
    ----------
    model : pathlib.Path
        Folder of a Hugging Face model.
    settings : dict
        The ``phasekv`` object of the configuration.
    options : sequence of str
        Further options of ``vllm serve``.
    log : pathlib.Path
        Receives what the server prints.
    """

    def __init__(
        self, model: Path, settings: dict[str, Any], options: Sequence[str], log: Path
    ) -> None:
        self._log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._command = [
            *(sys.executable, "-m", "phasekv.cli", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--served-model-name", _NAME),
            *options,
            *("--additional-config", json.dumps({"phasekv": settings})),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        # A server's engine is always a process of its own, whatever this one asked for.
        environment = {**_VARIABLES, **os.environ}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def complete(self, tokens: Sequence[int], **parameters: Any) -> dict[str, Any]:
        """The response of ``/v1/completions`` to a prompt of token ids.

        Raises
        ------
        ServerError
            With the server's own message, if it refuses or fails.
        """
        body = {"model": _NAME, "prompt": list(tokens), "temperature": 0.0, **parameters}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as reply:
                response: dict[str, Any] = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise ServerError(f"HTTP {error.code}", error.read().decode()[:2000]) from error
        return response

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=10):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.25)
        end = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise ServerError("did not start", f"{self._log} ends with\n{end}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
