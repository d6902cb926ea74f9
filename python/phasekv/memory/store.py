"""The chunk store: encoded chunks in memory, below a limit of bytes, with a disk tier behind it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from phasekv.errors import InvalidArgumentError
from phasekv.memory.chunk import StoredChunk
from phasekv.memory.chunk_quantizer import ChunkQuantizer
from phasekv.memory.disk import DiskTier
from phasekv.memory.keys import ChunkKey

logger = logging.getLogger("phasekv")


@dataclass
class StoreStatistics:
    """What a `ChunkStore` holds now, and its counts since it was made."""

    chunks: int = 0
    """In memory now."""
    bytes: int = 0
    """Measured, of the chunks in memory now."""
    pinned: int = 0
    """Chunks in memory that a running request uses now."""
    writing: int = 0
    """Chunks in memory that are still to be written to disk."""
    hits: int = 0
    """Calls of `ChunkStore.get` that found a chunk, in memory or on disk."""
    misses: int = 0
    """Calls of `ChunkStore.get` that found none."""
    disk_hits: int = 0
    """Hits that were read from disk."""
    evictions: int = 0
    """Chunks that left memory to make room."""
    refused: int = 0
    """Times a chunk could not stay in memory: too large, or too much is pinned."""
    last_refusal: str = ""
    """Why, the last time."""
    damaged_files: int = 0
    """Files on disk that could not be used."""
    disk_failures: int = 0
    """Chunks that could not be written to disk."""


class ChunkStore:
    """Stored chunks by content key, least recently used out first.

    A chunk is written to disk when it is put, if there is a disk tier, so leaving memory loses
    nothing. The first chunk stored under a key stays. All methods may be called from several
    threads.

    A disk takes its time: with `write_behind`, `put` leaves the writing to a thread and returns. A
    chunk stays in memory until it is written, and `put` waits when all room is taken by such
    chunks. A process that ends normally writes them first; one that is killed loses them.

    Parameters
    ----------
    capacity_bytes : int
        Limit of the measured bytes of all chunks in memory; never exceeded.
    disk : DiskTier | None
        Where chunks go as well.
    write_behind : bool
        Whether a thread writes to the disk.
    quantizer : ChunkQuantizer | None
        Chunks are quantised when they are put, and kept so in memory and on disk; None keeps them
        exact. The disk tier's identity must say the same.
    """

    def __init__(
        self,
        capacity_bytes: int,
        disk: DiskTier | None = None,
        write_behind: bool = False,
        quantizer: ChunkQuantizer | None = None,
    ) -> None:
        if capacity_bytes < 0:
            raise InvalidArgumentError("capacity_bytes", str(capacity_bytes), "at least 0")
        name = "" if quantizer is None else quantizer.quantization.name
        if disk is not None and disk.identity.quantization != name:
            raise InvalidArgumentError(
                "quantization", repr(name), f"as the disk tier's: {disk.identity.quantization!r}"
            )
        self._quantizer = quantizer
        self.capacity_bytes = capacity_bytes
        self.disk = disk
        self._lock = threading.RLock()
        self._chunks: OrderedDict[ChunkKey, StoredChunk] = OrderedDict()  # last used last
        self._sizes: dict[ChunkKey, int] = {}
        self._bytes = 0
        self._pins: dict[ChunkKey, int] = {}
        self._gone: list[ChunkKey] = []  # not yet reported by put()
        self._writer: ThreadPoolExecutor | None = None
        if write_behind and disk is not None:
            self._writer = ThreadPoolExecutor(1, "phasekv chunk writer")
        self._writing: dict[ChunkKey, Future[None]] = {}
        self._counts = StoreStatistics()

    def __len__(self) -> int:
        """Chunks in memory."""
        with self._lock:
            return len(self._chunks)

    @property
    def nbytes(self) -> int:
        """Measured bytes of the chunks in memory."""
        with self._lock:
            return self._bytes

    def contains(self, key: ChunkKey) -> bool:
        """Whether the chunk is in memory or on disk. Does not count as a use."""
        with self._lock:
            if key in self._chunks:
                return True
        return self.disk is not None and self.disk.contains(key)

    def get(self, key: ChunkKey) -> StoredChunk | None:
        """Find a chunk, in memory or else on disk, and mark it as used.

        Returns
        -------
        StoredChunk | None
            The chunk itself, not a copy; it must not be changed. None on a miss. A chunk from
            disk is kept in memory if there is room for it.
        """
        chunk = self._get_from_memory(key)
        if chunk is not None:
            return chunk
        # Outside the lock: others need not wait for the disk.
        loaded = None if self.disk is None else self.disk.load(key)
        with self._lock:
            if loaded is None:
                self._counts.misses += 1
                return None
            self._counts.hits += 1
            self._counts.disk_hits += 1
            if key not in self._chunks:
                self._insert(loaded)
            return self._chunks.get(key, loaded)

    def put(self, chunk: StoredChunk, replace: bool = False) -> list[ChunkKey]:
        """Store a chunk in memory and on disk.

        Parameters
        ----------
        chunk : StoredChunk
            Copied only if its tensors are views of something larger, or to be quantised.
        replace : bool
            Put it in the place of a chunk of the same key, unless that is pinned. Otherwise the
            first one stays, and nothing happens.

        Returns
        -------
        list[ChunkKey]
            Chunks that since the last call left both memory and disk, so that an index can forget
            them. This one is among them if it could be kept nowhere.
        """
        if replace:
            self.drop(chunk.key)
        if not self.contains(chunk.key):
            if self._quantizer is not None:
                chunk = self._quantizer(chunk)
            self._store(chunk.compact())
        with self._lock:
            # A chunk that was stored again meanwhile is not gone.
            gone = [key for key in dict.fromkeys(self._gone) if not self.contains(key)]
            self._gone.clear()
        return gone

    def flush(self) -> None:
        """Wait until all chunks are written to disk."""
        with self._lock:
            writing = list(self._writing.values())
        wait(writing)

    def pin(self, key: ChunkKey) -> bool:
        """Keep a chunk in memory until it is unpinned as often as it was pinned.

        Returns
        -------
        bool
            False, without effect, if it is not in memory: `get` it first.
        """
        with self._lock:
            if key not in self._chunks:
                return False
            self._pins[key] = self._pins.get(key, 0) + 1
            return True

    def unpin(self, key: ChunkKey) -> None:
        """Take back one `pin`.

        Raises
        ------
        InvalidArgumentError
            If the chunk is not pinned.
        """
        with self._lock:
            count = self._pins.get(key, 0)
            if count == 0:
                raise InvalidArgumentError("key", key, "the key of a pinned chunk")
            if count == 1:
                del self._pins[key]
            else:
                self._pins[key] = count - 1

    def drop(self, key: ChunkKey) -> bool:
        """Remove a chunk from memory and from disk.

        Returns
        -------
        bool
            False, without effect, if it is pinned or stored nowhere.
        """
        while True:
            with self._lock:
                writing = self._writing.get(key)
                if writing is None:
                    if key in self._pins:
                        return False
                    was_there = self._remove_from_memory(key)
                    if self.disk is not None:
                        was_there = self.disk.drop(key) or was_there
                    return was_there
            wait([writing])  # or the file would come back

    def clear(self, disk: bool = False) -> None:
        """Remove all chunks that are not pinned from memory, and with `disk` also all files."""
        self.flush()
        with self._lock:
            for key in self._chunks.keys() - self._held():
                self._remove_from_memory(key)
            if disk and self.disk is not None:
                self.disk.clear()

    def statistics(self) -> StoreStatistics:
        """What is held now and the counts so far (a copy)."""
        with self._lock:
            statistics = StoreStatistics(**vars(self._counts))
            statistics.chunks = len(self._chunks)
            statistics.bytes = self._bytes
            statistics.pinned = len(self._pins)
            statistics.writing = len(self._writing)
        if self.disk is not None:
            on_disk = self.disk.statistics()
            statistics.damaged_files = on_disk.damaged
            statistics.disk_failures = on_disk.failures
        return statistics

    def _get_from_memory(self, key: ChunkKey) -> StoredChunk | None:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
                self._counts.hits += 1
            return chunk

    def _store(self, chunk: StoredChunk) -> None:
        """Put a compact chunk that is not stored into memory and on disk."""
        if self._writer is not None and self.disk is not None:
            self.disk.check(chunk)
            self._wait_for_room(chunk.nbytes)
            with self._lock:
                if chunk.key in self._chunks:
                    return
                if self._insert(chunk):
                    self._writing[chunk.key] = self._writer.submit(self._write, chunk)
                    return
            # Memory has no room for it, so there is nothing to leave to the thread.
        # The disk comes first: whatever leaves memory is on disk, or known not to be.
        removed = [] if self.disk is None else self.disk.put(chunk)[1]
        with self._lock:
            self._gone.extend(key for key in removed if key not in self._chunks)
            if self._writer is None and chunk.key not in self._chunks:
                self._insert(chunk)
            self._note_if_gone(chunk.key)

    def _write(self, chunk: StoredChunk) -> None:
        """Write a chunk to disk, on the writer's thread."""
        removed: list[ChunkKey] = []
        try:
            if self.disk is not None:
                removed = self.disk.put(chunk)[1]
        except Exception:
            # The next chunk shall be written all the same.
            logger.exception("chunk %s is not written to disk", chunk.key)
        finally:
            with self._lock:
                del self._writing[chunk.key]
                self._gone.extend(key for key in removed if key not in self._chunks)

    def _wait_for_room(self, size: int) -> None:
        """Wait while there would be room for `size` bytes but for chunks to be written."""
        while True:
            with self._lock:
                writing = list(self._writing.values())
                has_room = self._bytes_of(self._held()) + size <= self.capacity_bytes
                never = self._bytes_of(self._pins.keys()) + size > self.capacity_bytes
                if has_room or never or not writing:
                    return
            wait(writing, return_when=FIRST_COMPLETED)

    def _held(self) -> set[ChunkKey]:
        """Chunks that must stay in memory."""
        return self._pins.keys() | self._writing.keys()

    def _bytes_of(self, keys: Iterable[ChunkKey]) -> int:
        return sum(self._sizes[key] for key in keys)

    def _insert(self, chunk: StoredChunk) -> bool:
        """Put a new chunk into memory, evicting others. False if there cannot be room for it."""
        size = chunk.nbytes
        held = self._held()
        held_bytes = self._bytes_of(held)
        if held_bytes + size > self.capacity_bytes:
            reason = (
                f"chunk of {size} bytes does not fit in memory: the capacity is "
                f"{self.capacity_bytes} bytes, of which {held_bytes} are in use by running "
                "requests or still to be written to disk"
            )
            if self._counts.refused == 0:
                logger.warning("%s (later ones are only counted)", reason)
            self._counts.refused += 1
            self._counts.last_refusal = reason
            return False
        for key in list(self._chunks):
            if self._bytes + size <= self.capacity_bytes:
                break
            if key not in held:
                self._remove_from_memory(key)
                self._counts.evictions += 1
                self._note_if_gone(key)
        self._chunks[chunk.key] = chunk
        self._sizes[chunk.key] = size
        self._bytes += size
        return True

    def _remove_from_memory(self, key: ChunkKey) -> bool:
        if key not in self._chunks:
            return False
        del self._chunks[key]
        self._bytes -= self._sizes.pop(key)
        return True

    def _note_if_gone(self, key: ChunkKey) -> None:
        if not self.contains(key):
            self._gone.append(key)
