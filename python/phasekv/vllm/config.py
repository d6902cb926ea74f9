"""What ``--additional-config '{"phasekv": {...}}'`` may say, validated."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.eviction.settings import EvictionChoice, parse_engine_choice
from phasekv.fields import (
    boolean,
    integer,
    optional_integer,
    optional_text,
    refuse_unknown,
)
from phasekv.quantization import Quantization
from phasekv.reuse.choice import METHOD_FIELDS, MethodChoice, parse_choice

GIBIBYTE = 1 << 30


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
    chunk_store_bits : int or None
        Bits that stored chunks are quantised to, 2 or 4; None: they are kept exactly.
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

    choice: MethodChoice = field(default_factory=MethodChoice)
    auto: bool = False
    auto_min_tokens: int = 16
    store_on_use: bool = True
    chunk_store_bytes: int = 1 * GIBIBYTE
    store_directory: str | None = None
    store_directory_bytes: int | None = None
    chunk_store_bits: int | None = None
    eviction: EvictionChoice | None = None
    session_bytes: int = 1 * GIBIBYTE
    session_directory: str | None = None
    phases: str | None = None

    @property
    def quantization(self) -> Quantization | None:
        """How stored chunks are kept; None: exactly."""
        return None if self.chunk_store_bits is None else Quantization(self.chunk_store_bits)

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
        own = [one.name for one in fields(cls) if one.name != "choice"]
        refuse_unknown("phasekv", settings, (*METHOD_FIELDS, *own))
        defaults = cls()
        return cls(
            choice=one_pass(parse_choice(settings, defaults.choice)),
            auto=boolean(settings, "auto", defaults.auto),
            auto_min_tokens=integer(settings, "auto_min_tokens", defaults.auto_min_tokens, 8),
            store_on_use=boolean(settings, "store_on_use", defaults.store_on_use),
            chunk_store_bytes=integer(settings, "chunk_store_bytes", defaults.chunk_store_bytes, 0),
            store_directory=optional_text(settings, "store_directory"),
            store_directory_bytes=optional_integer(settings, "store_directory_bytes", 0),
            chunk_store_bits=_bits(settings, "chunk_store_bits"),
            eviction=parse_engine_choice(settings.get("eviction")),
            session_bytes=integer(settings, "session_bytes", defaults.session_bytes, 0),
            session_directory=optional_text(settings, "session_directory"),
            phases=optional_text(settings, "phases"),
        )


def one_pass(choice: MethodChoice) -> MethodChoice:
    """The choice, unless its method wants a pass through the model before the engine's own."""
    if choice.build().needs_attention:
        raise InvalidArgumentError(
            "method",
            choice.method,
            "a method that is content with the engine's one pass through the model: this one runs "
            "the question through it beforehand, which phasekv.transformers can do",
        )
    return choice


def _bits(settings: dict[str, Any], key: str) -> int | None:
    value = settings.get(key)
    if value is not None and (isinstance(value, bool) or value not in (2, 4)):
        raise InvalidArgumentError(key, repr(value), "2 or 4, or null to keep chunks exactly")
    return value
