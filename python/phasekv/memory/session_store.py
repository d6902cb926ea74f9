"""Sessions in memory, least recently used first out, and on disk beside it."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from phasekv.memory.session import StoredSession
from phasekv.memory.session_files import SessionFiles


class StoreChanges(NamedTuple):
    """Keys of sessions that left memory."""

    gone: list[str]
    on_disk: list[str]


class SessionStore:
    """The sessions of one worker.

    Parameters
    ----------
    capacity_bytes : int
        Memory for sessions; what exceeds it goes, the least recently used first.
    files : SessionFiles or None
        Where sessions are also kept on disk.
    """

    def __init__(self, capacity_bytes: int, files: SessionFiles | None = None) -> None:
        self._capacity = capacity_bytes
        self._files = files
        self._sessions: OrderedDict[str, StoredSession] = OrderedDict()
        self._on_disk: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Memory that sessions take."""
        return sum(session.nbytes for session in self._sessions.values())

    def put(self, session: StoredSession) -> StoreChanges:
        """Keep a session in the place of the one of the same key.

        Returns which sessions left memory for it, perhaps this one.
        """
        if self._files is not None:
            self._on_disk.discard(session.key)
            if self._files.put(session):
                self._on_disk.add(session.key)
        return self._insert(session)

    def get(self, key: str) -> StoredSession | None:
        """A session, from memory or from disk."""
        session = self._sessions.get(key)
        if session is not None:
            self._sessions.move_to_end(key)
            return session
        if self._files is None:
            return None
        session = self._files.load(key)
        if session is not None:
            self._on_disk.add(key)
            self._insert(session)
        return session

    def _insert(self, session: StoredSession) -> StoreChanges:
        self._sessions.pop(session.key, None)
        self._sessions[session.key] = session
        changes = StoreChanges([], [])
        while self.nbytes > self._capacity:
            key, _ = self._sessions.popitem(last=False)
            (changes.on_disk if key in self._on_disk else changes.gone).append(key)
        return changes
