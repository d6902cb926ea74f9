"""What a request may say in ``kv_transfer_params["phasekv"]``, validated against its prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.fields import refuse_unknown
from phasekv.reuse.choice import METHOD_FIELDS, MethodChoice, parse_choice
from phasekv.vllm.config import PhaseKVConfig, one_pass

PARAMETER = "phasekv"


FIELDS = (*METHOD_FIELDS, "chunks", "store", "auto", "eviction", "session", "append")


def parameters_of(kv_transfer_params: object) -> dict[str, Any]:
    """The ``phasekv`` object of a request; empty if it has none.

    Raises
    ------
    InvalidArgumentError
        If it is not an object, or has a key that is not known.
    """
    if kv_transfer_params is None:
        return {}
    if not isinstance(kv_transfer_params, dict):
        raise InvalidArgumentError("kv_transfer_params", repr(kv_transfer_params), "a JSON object")
    settings = kv_transfer_params.get(PARAMETER)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise InvalidArgumentError(PARAMETER, repr(settings), "a JSON object")
    refuse_unknown(PARAMETER, settings, FIELDS)
    return settings


@dataclass(frozen=True)
class ReuseRequest:
    """One request's wishes.

    Attributes
    ----------
    choice : MethodChoice
        Method, nominal ratio and switches.
    chunks : tuple of (int, int)
        Half-open token ranges of the prompt, ascending and disjoint.
    store : bool
        Compute exactly and (re)place the named chunks in the store; nothing is reused.
    auto : bool
        Also look for stored chunks by content, outside the named ranges.
    """

    choice: MethodChoice
    chunks: tuple[tuple[int, int], ...] = ()
    store: bool = False
    auto: bool = False

    @classmethod
    def parse(
        cls, kv_transfer_params: object, prompt_tokens: int, config: PhaseKVConfig
    ) -> ReuseRequest:
        """Validate the parameters of a request whose prompt has ``prompt_tokens`` tokens.

        Raises
        ------
        InvalidArgumentError
            Naming the field and the value: an unknown key, a range outside the prompt, an empty or
            overlapping range, an unknown method, a ratio outside [0, 1], or ``store`` without
            chunks.
        """
        settings = parameters_of(kv_transfer_params)
        chunks = _parse_chunks(settings.get("chunks", []), prompt_tokens)
        for flag in ("store", "auto"):
            if not isinstance(settings.get(flag, False), bool):
                raise InvalidArgumentError(flag, repr(settings[flag]), "true or false")
        store = settings.get("store", False)
        if store and not chunks:
            raise InvalidArgumentError("store", "true", "given together with chunks")
        if settings.get("function", config.choice.function) != config.choice.function:
            raise InvalidArgumentError(
                "function", repr(settings["function"]), "left away: the engine's settings name it"
            )
        return cls(
            choice=one_pass(parse_choice(settings, config.choice)),
            chunks=chunks,
            store=store,
            auto=settings.get("auto", config.auto) and not store,
        )


def _parse_chunks(value: Any, prompt_tokens: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list | tuple):
        raise InvalidArgumentError("chunks", repr(value), "a list of [begin, end] token ranges")
    ranges = []
    for index, item in enumerate(value):
        name = f"chunks[{index}]"
        if (
            not isinstance(item, list | tuple)
            or len(item) != 2
            or not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in item)
        ):
            raise InvalidArgumentError(name, repr(item), "a [begin, end] pair of whole numbers")
        begin, end = item
        if begin >= end:
            raise InvalidArgumentError(name, repr(item), "a range of at least one token")
        if begin < 0 or end > prompt_tokens:
            raise InvalidArgumentError(
                name, repr(item), f"a range inside the prompt of {prompt_tokens} tokens"
            )
        ranges.append((begin, end))
    ranges.sort()
    for before, after in itertools.pairwise(ranges):
        if before[1] > after[0]:
            raise InvalidArgumentError(
                "chunks", f"{list(before)} and {list(after)}", "ranges that do not overlap"
            )
    return tuple(ranges)
