"""What ``--additional-config '{"phasekv": {...}}'`` may say, validated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from phasekv._core import Method, method_names
from phasekv.errors import InvalidArgumentError
from phasekv.eviction.settings import EvictionChoice, parse_engine_choice
from phasekv.fields import (
    boolean,
    integer,
    optional_integer,
    optional_text,
    refuse_unknown,
)

GIBIBYTE = 1 << 30


@dataclass(frozen=True)
class MethodChoice:
    """A reuse method with its nominal recompute ratio and switches.

    Attributes
    ----------
    method : str
        One of ``phasekv.methods.names()``.
    ratio : float
        Nominal recompute ratio r in [0, 1]: the share of a chunk's tokens that become probes.
    frame, weight, probes : str or None
        Switches of the shift methods; None is the method's own definition
        (``docs/reuse.md`` lists them).
    boundary_tokens : int or None
        EPIC only: tokens recomputed at the head of every chunk, instead of ``ratio``.
    """

    method: str = "phaseshift"
    ratio: float = 0.1
    frame: str | None = None
    weight: str | None = None
    probes: str | None = None
    boundary_tokens: int | None = None

    def build(self) -> Method:
        """The method itself. Raises ``InvalidArgumentError`` naming the field that is wrong."""
        return Method(
            self.method,
            frame=self.frame,
            weight=self.weight,
            probes=self.probes,
            boundary_tokens=self.boundary_tokens,
        )


METHOD_FIELDS = tuple(field.name for field in fields(MethodChoice))


@dataclass(frozen=True)
class PhaseKVConfig:
    """The engine-wide settings of PhaseKV.

    Attributes
    ----------
    choice : MethodChoice
        What a request gets that does not name a method of its own.
    auto : bool
        Look for stored chunks anywhere in every prompt, by content.
    auto_min_tokens : int
        Shortest match that ``auto`` considers, in tokens (at least 8).
    store_on_use : bool
        Keep the keys and values of a named chunk that was not stored yet, from its first use.
    chunk_store_bytes : int
        Memory for stored chunks, per worker process.
    store_directory : str or None
        Where chunks are also kept on disk; None: only in memory.
    store_directory_bytes : int or None
        Limit of that directory per worker; None: no limit.
    eviction : EvictionChoice or None
        Policy, budget and stride of every request that does not say otherwise; None: nothing is
        evicted.
    session_bytes : int
        Memory for sessions, per worker process.
    session_directory : str or None
        Where sessions are also kept on disk; None: only in memory.
    phases : str or None
        Name or file of the marker table; None: picked from the tokenizer and its chat template.
    """

    choice: MethodChoice = MethodChoice()
    auto: bool = False
    auto_min_tokens: int = 16
    store_on_use: bool = True
    chunk_store_bytes: int = 1 * GIBIBYTE
    store_directory: str | None = None
    store_directory_bytes: int | None = None
    eviction: EvictionChoice | None = None
    session_bytes: int = 1 * GIBIBYTE
    session_directory: str | None = None
    phases: str | None = None

    @classmethod
    def parse(cls, settings: object) -> PhaseKVConfig:
        """Validate the value of the ``phasekv`` key.

        Raises
        ------
        InvalidArgumentError
            For anything that is not a known key with a value of its type and range.
        """
        if not isinstance(settings, dict):
            raise InvalidArgumentError("phasekv", repr(settings), "a JSON object of settings")
        own = [field.name for field in fields(cls) if field.name != "choice"]
        refuse_unknown("phasekv", settings, (*METHOD_FIELDS, *own))
        defaults = cls()
        return cls(
            choice=parse_choice(settings, defaults.choice),
            auto=boolean(settings, "auto", defaults.auto),
            auto_min_tokens=integer(settings, "auto_min_tokens", defaults.auto_min_tokens, 8),
            store_on_use=boolean(settings, "store_on_use", defaults.store_on_use),
            chunk_store_bytes=integer(settings, "chunk_store_bytes", defaults.chunk_store_bytes, 0),
            store_directory=optional_text(settings, "store_directory"),
            store_directory_bytes=optional_integer(settings, "store_directory_bytes", 0),
            eviction=parse_engine_choice(settings.get("eviction")),
            session_bytes=integer(settings, "session_bytes", defaults.session_bytes, 0),
            session_directory=optional_text(settings, "session_directory"),
            phases=optional_text(settings, "phases"),
        )


def parse_choice(settings: dict[str, Any], defaults: MethodChoice) -> MethodChoice:
    """The method, ratio and switches in ``settings``; what is absent comes from ``defaults``.

    A method named anew starts from its own definition, not from the switches of the default one.
    """
    method = settings.get("method", defaults.method)
    if not isinstance(method, str) or method not in method_names():
        raise InvalidArgumentError("method", repr(method), "one of " + ", ".join(method_names()))
    inherited = defaults if method == defaults.method else MethodChoice()
    ratio = settings.get("ratio", defaults.ratio)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise InvalidArgumentError("ratio", repr(ratio), "a recompute ratio in [0, 1]")
    choice = MethodChoice(
        method=method,
        ratio=float(ratio),
        frame=optional_text(settings, "frame", inherited.frame),
        weight=optional_text(settings, "weight", inherited.weight),
        probes=optional_text(settings, "probes", inherited.probes),
        boundary_tokens=optional_integer(settings, "boundary_tokens", 0, inherited.boundary_tokens),
    )
    choice.build()
    return choice
