"""Sessions on the scheduler's side: which request resumes which, and what its response says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError
from phasekv.eviction.settings import EvictionChoice
from phasekv.memory.keys import ModelIdentity
from phasekv.memory.session_files import SessionFiles, SessionHeader
from phasekv.memory.session_store import StoreChanges
from phasekv.vllm.request import parameters_of


@dataclass(frozen=True)
class SaveJob:
    """A finished request whose cache the workers keep before its blocks are freed.

    Attributes
    ----------
    request_id, key : str
        The request, and the session it becomes.
    settings : str
        See ``StoredSession``.
    tokens : numpy array
        int32: all its token ids.
    computed : int
        How many of them have keys.
    block_ids : tuple of int
        Of the request, from its first logical block on.
    """

    request_id: str
    key: str
    settings: str
    tokens: npt.NDArray[np.int32]
    computed: int
    block_ids: tuple[int, ...]


@dataclass
class _Request:
    """A running request of a session."""

    name: str
    key: str
    settings: str
    resumed: int = 0
    recomputed: int = 0
    reason: str = "new session"

    def as_response(self) -> dict[str, object]:
        return {
            "id": self.name,
            "resumed_tokens": self.resumed,
            "recomputed_tokens": self.recomputed,
            "reason": self.reason,
        }


class SessionLedger:
    """One per engine core.

    Parameters
    ----------
    identity : ModelIdentity
        Of the engine: sessions of another are never seen.
    files : sequence of SessionFiles
        Of every rank, where sessions are also kept on disk; else empty.
    """

    def __init__(self, identity: ModelIdentity, files: Sequence[SessionFiles] = ()) -> None:
        self._identity = identity
        self._files = files
        stored = files[0].scan() if files else ()
        self._sessions = {header.key: header for header in stored}
        # Sessions that are on disk only: a worker that finds a damaged file in the middle of a step
        # could not go on, so that they are looked at before they are promised.
        self._unchecked = set(self._sessions)
        self._requests: dict[str, _Request] = {}
        self._jobs: list[SaveJob] = []
        self._saving: dict[str, str] = {}  # request -> session

    def key_of(self, name: str, domain: tuple[str, str]) -> str:
        """Key of a session name for a tenant (salt) and adapter."""
        digest = blake2b(digest_size=20)
        for part in (repr(self._identity), *domain, name):
            digest.update(len(part.encode()).to_bytes(8, "little"))
            digest.update(part.encode())
        return digest.hexdigest()

    def register(self, request: Any, choice: EvictionChoice, domain: tuple[str, str]) -> None:
        """A request arrives."""
        try:
            name = session_name(parameters_of(request.kv_transfer_params))
        except InvalidArgumentError:
            return
        if name is not None:
            self._requests[request.request_id] = _Request(
                name, self.key_of(name, domain), settings_of(choice)
            )

    def continued(self, name: str, domain: tuple[str, str]) -> npt.NDArray[np.int32]:
        """Token ids of a session, to which a request appends its own.

        Raises
        ------
        InvalidArgumentError
            If there is no such session.
        """
        session = self._sessions.get(self.key_of(name, domain))
        if session is None:
            raise InvalidArgumentError("session", repr(name), "a stored session to append to")
        return session.tokens

    def match(self, request: Any) -> int | None:
        """How many tokens of a waiting request's prompt its session has; None: ask again later."""
        mine = self._requests.get(request.request_id)
        if mine is None:
            return 0
        if mine.key in self._saving.values():
            return None
        mine.resumed = mine.recomputed = 0
        session = self._sessions.get(mine.key)
        if session is None:
            mine.reason = "new session"
            return 0
        if not self._check(mine.key):
            mine.reason = "the session's file is damaged"
            return 0
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        shared = _common_prefix(prompt, session.tokens[: session.computed])
        mine.recomputed = shared
        if session.settings != mine.settings:
            mine.reason = "the session was compacted under other settings"
            return 0
        if shared < session.computed:
            mine.recomputed = min(session.computed, len(prompt))
            mine.reason = (
                f"the prompt differs from the session at token {shared} of {session.computed}: "
                "was its history rendered anew?"
            )
            return 0
        if len(prompt) <= session.computed:
            mine.reason = "the prompt has nothing after the session"
            return 0
        mine.resumed, mine.recomputed = session.computed, 0
        mine.reason = ""
        return session.computed

    def finish(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        """Whether the request's blocks are still needed, and the response's ``session`` object."""
        mine = self._requests.pop(request.request_id, None)
        if mine is None:
            return False, None
        response = mine.as_response()
        computed = request.num_computed_tokens
        if computed <= 0 or not block_ids or _is_aborted(request):
            return False, response
        tokens = np.asarray(request.all_token_ids, dtype=np.int32)
        self._jobs.append(
            SaveJob(request.request_id, mine.key, mine.settings, tokens, computed, tuple(block_ids))
        )
        self._saving[request.request_id] = mine.key
        self._unchecked.discard(mine.key)
        self._sessions[mine.key] = SessionHeader(mine.key, mine.settings, tokens, computed)
        return True, response

    def key_resumed_by(self, request_id: str) -> str | None:
        """Key of the session that a request resumes, None if it resumes none."""
        mine = self._requests.get(request_id)
        return mine.key if mine is not None and mine.resumed else None

    def take_jobs(self) -> tuple[SaveJob, ...]:
        """What the workers have to save in the next step."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def saved(self, request_ids: Iterable[str]) -> None:
        """The workers have saved these requests."""
        for request_id in request_ids:
            self._saving.pop(request_id, None)

    def update(self, changes: StoreChanges) -> None:
        """Sessions that the workers do not have in memory any more."""
        for key in changes.gone:
            self._sessions.pop(key, None)
        self._unchecked.update(changes.on_disk)

    def _check(self, key: str) -> bool:
        """Whether a session can be had: in memory, or from whole files of all ranks."""
        if key not in self._unchecked:
            return True
        session = self._sessions[key]
        for files in self._files:
            loaded = files.load(key)
            if loaded is None or loaded.computed != session.computed:
                self._sessions.pop(key)
                self._unchecked.discard(key)
                return False
        return True


def session_name(parameters: dict[str, Any]) -> str | None:
    """The ``session`` field of a request."""
    name = parameters.get("session")
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidArgumentError("session", repr(name), "a name")
    return name


def appends(parameters: dict[str, Any]) -> bool:
    """The ``append`` field of a request: its prompt follows what the session holds."""
    append = parameters.get("append", False)
    if not isinstance(append, bool):
        raise InvalidArgumentError("append", repr(append), "true or false")
    if append and session_name(parameters) is None:
        raise InvalidArgumentError("append", "true", "given together with session")
    return append


def check_session(parameters: dict[str, Any], has_sessions: bool) -> None:
    """Raise ``InvalidArgumentError`` unless ``session`` and ``append`` can be had."""
    name = session_name(parameters)
    if name is not None and not has_sessions:
        raise InvalidArgumentError(
            "session", repr(name), "absent: this engine was started without eviction"
        )
    if appends(parameters) and parameters.get("chunks"):
        raise InvalidArgumentError(
            "chunks", repr(parameters["chunks"]), "absent in a request that appends to a session"
        )


def settings_of(choice: EvictionChoice) -> str:
    """Everything that a session's state depends on."""
    return json.dumps(asdict(choice), sort_keys=True)


def _common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    count = min(len(one), len(other))
    different = np.nonzero(one[:count] != other[:count])[0]
    return int(different[0]) if len(different) else count


def _is_aborted(request: Any) -> bool:
    return bool(request.status.name == "FINISHED_ABORTED" or request.status.name.endswith("ERROR"))
