"""Sessions on disk: one safetensors file for each session and rank.

A file is written under a temporary name, flushed and renamed, so that it is whole or not there.
Whatever does not pass the checks on the way back is a miss with a warning, never a session.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch

from phasekv.errors import InvalidArgumentError
from phasekv.memory.session import StoredSession

logger = logging.getLogger("phasekv")

FORMAT = "phasekv session 1"
"""Of the files. Others are left alone."""

_SUFFIX = ".session.safetensors"
_TENSORS = ("keys", "values", "state", "tokens")


class SessionHeader(NamedTuple):
    """What a stored session is about, without its keys and values."""

    key: str
    settings: str
    tokens: npt.NDArray[np.int32]
    computed: int


class SessionFiles:
    """The sessions of one rank in a directory.

    Parameters
    ----------
    directory : str or Path
        Is created; several ranks and models may share it.
    rank : int
        Of this worker; each has its own files.

    Raises
    ------
    InvalidArgumentError
        If the directory cannot be made or written.
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        self._directory = Path(directory)
        self._rank = rank
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory):
                pass
        except OSError as error:
            raise InvalidArgumentError(
                "session_directory", str(directory), f"a directory to write to ({error.strerror})"
            ) from error

    def put(self, session: StoredSession) -> bool:
        """Write a session over the one of the same key; False, with a warning, if that fails."""
        tensors = {
            "keys": session.keys.contiguous(),
            "values": session.values.contiguous(),
            "state": torch.frombuffer(bytearray(session.state), dtype=torch.uint8),
            "tokens": torch.from_numpy(session.tokens),
        }
        metadata = {
            "format": FORMAT,
            "key": session.key,
            "settings": session.settings,
            "computed": str(session.computed),
        }
        metadata["checksum"] = _checksum(metadata, tensors)
        path = self._path(session.key)
        descriptor, temporary = tempfile.mkstemp(dir=self._directory, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(safetensors.torch.save(tensors, metadata))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            logger.warning("PhaseKV: session %s is not on disk: %s", session.key, error)
            return False
        return True

    def load(self, key: str) -> StoredSession | None:
        """The session, or None with a warning if its file is damaged or foreign."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                metadata = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
            checksum = metadata.pop("checksum", "")
            if metadata.get("format") != FORMAT or metadata.get("key") != key:
                raise ValueError(f"it is {metadata.get('format')!r} of {metadata.get('key')!r}")
            if checksum != _checksum(metadata, tensors):
                raise ValueError("its checksum is wrong")
            return StoredSession(
                key=key,
                settings=metadata["settings"],
                tokens=tensors["tokens"].numpy(),
                computed=int(metadata["computed"]),
                keys=tensors["keys"],
                values=tensors["values"],
                state=tensors["state"].numpy().tobytes(),
            )
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            logger.warning("PhaseKV: %s is not used: %s", path, error)
            return None

    def drop(self, key: str) -> None:
        """Remove a session."""
        self._path(key).unlink(missing_ok=True)

    def scan(self) -> Iterator[SessionHeader]:
        """All sessions of this rank whose headers can be read."""
        for path in sorted(self._directory.glob(f"*.{self._rank}{_SUFFIX}")):
            try:
                with safetensors.safe_open(str(path), framework="pt") as file:
                    metadata: dict[str, Any] = dict(file.metadata() or {})
                    if metadata.get("format") != FORMAT:
                        continue
                    tokens = file.get_tensor("tokens").numpy()
                yield SessionHeader(
                    metadata["key"], metadata["settings"], tokens, int(metadata["computed"])
                )
            except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
                logger.warning("PhaseKV: %s is not used: %s", path, error)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.{self._rank}{_SUFFIX}"


def _checksum(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in _TENSORS:
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
