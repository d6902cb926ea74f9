"""Chunks on disk: one safetensors file for each chunk and rank.

A file is either whole or not there: it is written under a temporary name, flushed to the disk and
renamed. Everything in it is checked on the way back: its format version, the model it belongs to,
its key, shapes and dtype, and checksums over the header and over the tensors. Whatever does not
pass is a miss with a warning that names the file and the reason. Several processes may share a
directory, as may several models and all ranks of one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

from phasekv.errors import InvalidArgumentError
from phasekv.memory.chunk import StoredChunk
from phasekv.memory.keys import ChunkKey, ModelIdentity, int32_tokens
from phasekv.memory.quantized_tensor import QuantizedTensor
from phasekv.quantization import GroupAxis, Quantization

logger = logging.getLogger("phasekv")

FORMAT = "phasekv chunk"
FORMAT_VERSION = "1"
"""Of the files. Files of another format or version are left alone and not read."""

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
}
"""As safetensors calls them."""

_CHUNK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_SUFFIX = ".safetensors"
_TEMPORARY_SUFFIX = ".tmp"
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself


class _UnreadableError(Exception):
    """Why a file is not a chunk of ours."""


class ScannedChunk(NamedTuple):
    """What the header of a stored chunk says."""

    key: ChunkKey
    tokens: npt.NDArray[np.int32]
    """Token ids, ``[tokens]``."""
    position: int
    """Position of the first token when it was encoded."""


@dataclass
class DiskStatistics:
    """Counts since a `DiskTier` was made."""

    stored: int = 0
    """Files written."""
    loaded: int = 0
    """Files read and found whole."""
    damaged: int = 0
    """Files that were there and could not be used, each counted once."""
    failures: int = 0
    """Files that could not be written."""
    evictions: int = 0
    """Files removed to stay below the capacity."""


def _header_checksum(metadata: dict[str, str]) -> str:
    text = json.dumps(
        {name: value for name, value in metadata.items() if name != "header_checksum"},
        sort_keys=True,
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Memory of a contiguous tensor."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def _tensor_checksum(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the bytes, which processors have instructions for."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(_bytes_of(tensor))
    return checksum.hexdigest()


def _split_header(head: bytes, file_size: int) -> tuple[int, bytes]:
    """Length of the header and as much of it as `head` holds."""
    if len(head) < _LENGTH_BYTES:
        raise _UnreadableError(f"{file_size} bytes are no safetensors file")
    (length,) = struct.unpack("<Q", head[:_LENGTH_BYTES])
    if length > min(file_size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise _UnreadableError("it is truncated or its header is damaged")
    return length, head[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _parse_header(header: bytes, file_size: int) -> dict[str, str]:
    """Metadata of a file of our format, after checking its text and the file's extent."""
    try:
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        extent = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        is_text = all(isinstance(value, str) for value in metadata.values())
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise _UnreadableError("its header is damaged") from error
    # First, since another format may have other checksums.
    for name, value in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        if metadata.get(name) != value:
            raise _UnreadableError(f"its {name} is {metadata.get(name)!r}, not {value!r}")
    if not is_text or metadata.get("header_checksum") != _header_checksum(metadata):
        raise _UnreadableError("its header is damaged")
    if _LENGTH_BYTES + len(header) + extent != file_size:
        raise _UnreadableError("it is truncated or has something appended")
    result: dict[str, str] = metadata
    return result


class DiskTier:
    """A directory of stored chunks.

    Safe to use from several threads and, on one directory, from several processes.

    Parameters
    ----------
    directory : str | os.PathLike[str]
        Made if it is missing.
    identity : ModelIdentity
        Only this model's chunks are seen.
    rank : int
        Tensor-parallel rank; only this rank's files are seen.
    capacity_bytes : int | None
        Limit of the bytes of this model's files of this rank. The least recently used go first.
        None does not limit them.

    Raises
    ------
    InvalidArgumentError
        If the directory cannot be made or written, or an argument is out of range.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        identity: ModelIdentity,
        rank: int = 0,
        capacity_bytes: int | None = None,
    ) -> None:
        if not 0 <= rank < identity.tensor_parallel_size:
            raise InvalidArgumentError(
                "rank", str(rank), f"between 0 and {identity.tensor_parallel_size - 1}"
            )
        if capacity_bytes is not None and capacity_bytes < 0:
            raise InvalidArgumentError("capacity_bytes", str(capacity_bytes), "at least 0 or None")
        self.directory = Path(directory)
        self.identity = identity
        self.rank = rank
        self.capacity_bytes = capacity_bytes
        self._identity_hex = identity.digest().hex()
        # The key alone would do to keep models apart; the prefix lets a scan skip other models.
        self._prefix = f"{self._identity_hex[:16]}-"
        self._ending = f"-r{rank}{_SUFFIX}"
        self._lock = threading.Lock()
        self._statistics = DiskStatistics()
        self._damaged: set[str] = set()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            # A directory may exist and still refuse files: permissions, a read-only mount.
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            # A full disk is no reason not to start: what is stored can still be read.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise InvalidArgumentError(
                    "store_directory",
                    str(self.directory),
                    f"a directory that can be created and written ({error.strerror})",
                ) from error
        self._used_bytes = sum(size for _, size, _ in self._files())
        self._evict(keep=None)

    def path_of(self, key: ChunkKey) -> Path:
        """File that holds, or would hold, the chunk of this key."""
        return self.directory / f"{self._prefix}{key}{self._ending}"

    def contains(self, key: ChunkKey) -> bool:
        """Whether there is a file for the key that has not turned out to be damaged."""
        path = self.path_of(key)
        return path.name not in self._damaged and path.is_file()

    def put(self, chunk: StoredChunk) -> tuple[bool, list[ChunkKey]]:
        """Write a chunk, unless it is there.

        Parameters
        ----------
        chunk : StoredChunk
            Of this tier's model.

        Returns
        -------
        tuple[bool, list[ChunkKey]]
            Whether the chunk is on disk now, and the keys whose files were removed to make room.
            A disk that is full or broken is not an error: it is logged and counted.

        Raises
        ------
        InvalidArgumentError
            If the chunk does not fit the model.
        """
        self.check(chunk)
        path = self.path_of(chunk.key)
        if self.contains(chunk.key):
            return True, []
        parts = self._serialize(chunk)
        size = sum(len(part) for part in parts)
        if self.capacity_bytes is not None and size > self.capacity_bytes:
            self._count_failure(path, f"{size} bytes exceed {self.capacity_bytes} bytes")
            return False, []
        try:
            self._write(path, parts)
        except OSError as error:
            self._count_failure(path, error.strerror or str(error))
            return False, []
        with self._lock:
            self._damaged.discard(path.name)
            self._statistics.stored += 1
            self._used_bytes += size
        return True, self._evict(keep=chunk.key)

    def check(self, chunk: StoredChunk) -> None:
        """Make sure that a chunk is of this tier's model.

        Raises
        ------
        InvalidArgumentError
            If its dtype, layers, KV heads or head size are others.
        """
        problem = self._misfit(chunk)
        if problem is not None:
            raise InvalidArgumentError("chunk", chunk.key, problem)

    def load(self, key: ChunkKey) -> StoredChunk | None:
        """Read a chunk back, bit for bit as it was stored.

        Returns
        -------
        StoredChunk | None
            None if there is no such file or it cannot be trusted; the latter is logged once.
        """
        path = self.path_of(key)
        try:
            data = path.read_bytes()
            chunk = self._deserialize(data)
            if chunk.key != key:
                raise _UnreadableError(f"it holds another chunk, {chunk.key}")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._count_damaged(path, error.strerror or str(error))
            return None
        except _UnreadableError as error:
            self._count_damaged(path, str(error))
            return None
        with self._lock:
            self._statistics.loaded += 1
            self._damaged.discard(path.name)
        try:
            os.utime(path)
        except OSError:
            # Removed or owned by somebody else meanwhile: only its age suffers.
            logger.debug("cannot mark %s as used", path)
        return chunk

    def drop(self, key: ChunkKey) -> bool:
        """Remove a chunk's file. False if there was none."""
        return self._remove(self.path_of(key))

    def clear(self) -> None:
        """Remove all files of this model and rank."""
        for path, _, _ in self._files():
            self._remove(path)

    def scan(self) -> Iterator[ScannedChunk]:
        """Read the headers of all stored chunks of this model and rank.

        Yields
        ------
        ScannedChunk
            Key, tokens and position. The tensors are checked only by `load`.
        """
        for path, _, _ in self._files():
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    length, _ = _split_header(file.read(_LENGTH_BYTES), size)
                    metadata = _parse_header(file.read(length), size)
                scanned = self._check_metadata(metadata)
                if self.path_of(scanned.key) != path:
                    raise _UnreadableError(f"it holds another chunk, {scanned.key}")
            except FileNotFoundError:
                continue
            except OSError as error:
                self._count_damaged(path, error.strerror or str(error))
            except _UnreadableError as error:
                self._count_damaged(path, str(error))
            else:
                yield scanned

    def statistics(self) -> DiskStatistics:
        """Counts so far (a copy)."""
        with self._lock:
            return DiskStatistics(**vars(self._statistics))

    @property
    def nbytes(self) -> int:
        """Bytes of this model's files of this rank, read from the directory."""
        return sum(size for _, size, _ in self._files())

    def _misfit(self, chunk: StoredChunk) -> str | None:
        """What a chunk would have to be to belong to this model, None if it does."""
        name = "" if chunk.quantization is None else chunk.quantization.name
        if name != self.identity.quantization:
            return f"quantization {self.identity.quantization!r}, found {name!r}"
        layers, _, kv_heads, head_size = chunk.keys.shape
        found = (str(chunk.keys.dtype).removeprefix("torch."), layers, kv_heads, head_size)
        expected = (
            self.identity.dtype.removeprefix("torch."),
            self.identity.num_layers,
            self.identity.local_kv_heads,
            self.identity.head_size,
        )
        if found != expected:
            return f"dtype, layers, KV heads, head size {expected}, found {found}"
        if chunk.keys.dtype not in _CHUNK_DTYPES:
            return f"one of the dtypes {[str(dtype) for dtype in _CHUNK_DTYPES]}"
        return None

    def _serialize(self, chunk: StoredChunk) -> list[bytes | memoryview]:
        """Parts of a chunk's file, in order.

        The format is simple, and the library's own writer copies the tensors twice.
        """
        tensors = {name: part.contiguous() for name, part in chunk.parts.items()}
        metadata = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "identity": self._identity_hex,
            "rank": str(self.rank),
            "key": chunk.key,
            "tokens": json.dumps(chunk.tokens.tolist(), separators=(",", ":")),
            "position": str(chunk.position),
            "checksum": _tensor_checksum(tensors.values()),
        }
        if chunk.quantization is not None:
            metadata["bits"] = str(chunk.quantization.bits)
            metadata["group_size"] = str(chunk.quantization.group_size)
        metadata["header_checksum"] = _header_checksum(metadata)
        entries: dict[str, object] = {"__metadata__": metadata}
        offset = 0
        for name, tensor in tensors.items():
            entries[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _LENGTH_BYTES)  # so that the tensors are aligned
        data = [_bytes_of(tensor) for tensor in tensors.values()]
        return [struct.pack("<Q", len(header)), header, *data]

    def _check_metadata(self, metadata: dict[str, str]) -> ScannedChunk:
        """Read a header whose checksum is right, and refuse what is not of our kind."""
        for name, value in (("identity", self._identity_hex), ("rank", str(self.rank))):
            if metadata.get(name) != value:
                raise _UnreadableError(f"its {name} is {metadata.get(name)!r}, not {value!r}")
        try:
            tokens = int32_tokens(json.loads(metadata["tokens"]))
            return ScannedChunk(ChunkKey(metadata["key"]), tokens, int(metadata["position"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _UnreadableError("its header is damaged") from error

    def _deserialize(self, data: bytes) -> StoredChunk:
        length, header = _split_header(data, len(data))
        metadata = _parse_header(header[:length], len(data))
        scanned = self._check_metadata(metadata)
        try:
            tensors = safetensors.torch.load(data)
            keys, values = self._keys_and_values(tensors, metadata, scanned.tokens.size)
            chunk = StoredChunk(scanned.key, scanned.tokens, scanned.position, keys, values)
        except (safetensors.SafetensorError, InvalidArgumentError, KeyError, ValueError) as error:
            raise _UnreadableError(f"its tensors are damaged ({error})") from error
        problem = self._misfit(chunk)
        if problem is not None:
            raise _UnreadableError(f"its tensors do not fit the model: {problem}")
        if _tensor_checksum(chunk.parts.values()) != metadata.get("checksum"):
            raise _UnreadableError("the checksum of its tensors is wrong")
        return chunk

    def _keys_and_values(
        self, tensors: dict[str, torch.Tensor], metadata: dict[str, str], tokens: int
    ) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor | QuantizedTensor]:
        """A file's tensors: exact ones, or the parts of quantised ones."""
        if "bits" not in metadata:
            return tensors["keys"], tensors["values"]
        quantization = Quantization(int(metadata["bits"]), int(metadata["group_size"]))
        model = self.identity
        shape = (model.num_layers, tokens, model.local_kv_heads, model.head_size)
        dtype = getattr(torch, model.dtype.removeprefix("torch."))

        def quantized(name: str, axis: GroupAxis) -> QuantizedTensor:
            parts = (tensors[f"{name}.{part}"] for part in ("codes", "scales", "zero_points"))
            return QuantizedTensor(quantization, axis, shape, dtype, *parts)

        return quantized("keys", "tokens"), quantized("values", "channels")

    def _write(self, path: Path, parts: list[bytes | memoryview]) -> None:
        """Write a whole file or none; nobody else may read it (mode 0600)."""
        descriptor, temporary = tempfile.mkstemp(
            dir=self.directory, prefix=f".{path.stem}-", suffix=_TEMPORARY_SUFFIX
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                # Held until the file is closed, even by a killed process: see _sweep.
                with contextlib.suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _sweep(self) -> None:
        """Remove temporary files whose writers are gone: nobody holds their lock any more.

        Process numbers would not do: they start anew in every container and are used again.
        """
        for entry in self._entries():
            if not (entry.name.startswith(".") and entry.name.endswith(_TEMPORARY_SUFFIX)):
                continue
            try:
                with open(entry.path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
            except OSError:
                # Still being written, or another process swept it first.
                logger.debug("left %s in place", entry.path)

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.directory) as entries:
            return list(entries)

    def _files(self) -> list[tuple[Path, int, int]]:
        """Path, size in bytes and time of last use (ns) of each file of this model and rank."""
        files = []
        try:
            entries = self._entries()
        except OSError as error:
            logger.warning("cannot list store_directory %s: %s", self.directory, error.strerror)
            return []
        for entry in entries:
            if not (entry.name.startswith(self._prefix) and entry.name.endswith(self._ending)):
                continue
            try:
                status = entry.stat()
            except OSError:
                continue
            files.append((Path(entry.path), status.st_size, status.st_mtime_ns))
        return files

    def _evict(self, keep: ChunkKey | None) -> list[ChunkKey]:
        """Remove the least recently used files above the capacity, but not that of `keep`."""
        if self.capacity_bytes is None or self._used_bytes <= self.capacity_bytes:
            return []
        removed = []
        # Other processes add and remove files too, so the directory is asked again.
        files = sorted(self._files(), key=lambda file: file[2])
        used = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if used <= self.capacity_bytes:
                break
            key = ChunkKey(path.name[len(self._prefix) : -len(self._ending)])
            if key != keep and self._remove(path):
                used -= size
                removed.append(key)
        with self._lock:
            self._used_bytes = used
            self._statistics.evictions += len(removed)
        return removed

    def _remove(self, path: Path) -> bool:
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError:
            return False
        with self._lock:
            self._damaged.discard(path.name)
            self._used_bytes -= size
        return True

    def _count_damaged(self, path: Path, reason: str) -> None:
        with self._lock:
            if path.name in self._damaged:
                return
            self._damaged.add(path.name)
            self._statistics.damaged += 1
        logger.warning("stored chunk %s is ignored: %s", path, reason)

    def _count_failure(self, path: Path, reason: str) -> None:
        with self._lock:
            self._statistics.failures += 1
        logger.warning("chunk is not stored on disk as %s: %s", path, reason)
