"""What the scheduler side tells the workers about a request's chunks."""

from __future__ import annotations

from dataclasses import dataclass

from phasekv.memory.keys import ChunkKey
from phasekv.reuse.choice import MethodChoice


@dataclass(frozen=True)
class PlannedChunk:
    """One token range of a prompt that may be filled from a stored chunk.

    Attributes
    ----------
    begin, end : int
        Half-open token range of the prompt.
    key : ChunkKey
        Content key of the chunk in the store.
    chunk_begin : int
        Token of the stored chunk that stands at ``begin`` (0 unless only a part of it matched).
    tokens : tuple of int
        The chunk's token ids when it may be stored from this request; empty otherwise.
    """

    begin: int
    end: int
    key: ChunkKey
    chunk_begin: int = 0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReusePlan:
    """A request's chunks and how to treat them; fixed when the request arrives.

    Attributes
    ----------
    choice : MethodChoice
        Method, nominal ratio and switches.
    chunks : tuple of PlannedChunk
        Ascending and disjoint.
    prompt_tokens : int
        Length of the prompt.
    reuse : bool
        False: the chunks are only stored, the prompt is computed exactly.
    replace : bool
        Stored chunks of the same key are replaced.
    domain : tuple of (str, str)
        Salt and adapter: chunks are never shared across them.
    """

    choice: MethodChoice
    chunks: tuple[PlannedChunk, ...]
    prompt_tokens: int
    reuse: bool = True
    replace: bool = False
    domain: tuple[str, str] = ("", "")

    @property
    def first_reusable_token(self) -> int | None:
        """Where keys and values may stop being exact; None if they stay exact throughout."""
        return self.chunks[0].begin if self.reuse and self.chunks else None

    @property
    def end(self) -> int:
        """One past the last token that a chunk covers."""
        return self.chunks[-1].end if self.chunks else 0


@dataclass(frozen=True)
class StoredContent:
    """A chunk that the workers have just stored, as the content index needs it."""

    key: ChunkKey
    tokens: tuple[int, ...]
    domain: tuple[str, str]


@dataclass(frozen=True)
class ScheduledRequest:
    """A planned request's share of one engine step.

    ``first_slot`` (block * block size + offset) is where the first scheduled token's keys go; no
    two rows of a step share a slot, so it tells the worker which rows are this request's.
    """

    request_id: str
    plan: ReusePlan
    first_slot: int


@dataclass(frozen=True)
class StepReuse:
    """All planned requests of one engine step.

    Attributes
    ----------
    requests : tuple of ScheduledRequest
        Those whose scheduled tokens touch or complete a chunk.
    released : tuple of str
        Requests that finished or were preempted: what the workers hold for them can go.
    """

    requests: tuple[ScheduledRequest, ...] = ()
    released: tuple[str, ...] = ()
