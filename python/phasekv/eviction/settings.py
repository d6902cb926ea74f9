"""What the ``eviction`` object of the configuration, or of a request, may say; validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from phasekv._core import FunctionPolicy, Policy, TriattentionStatistics, Window, policy_names
from phasekv.calibration import load_statistics
from phasekv.errors import InvalidArgumentError
from phasekv.fields import (
    boolean,
    integer,
    load_function,
    optional_integer,
    optional_number,
    optional_text,
    refuse_unknown,
)

FUNCTION = "function"
"""Name of the policy that calls a Python function."""

TRIATTENTION = "triattention"
"""Name of the policy that needs a calibration."""

OPTIONS = (
    "queries",
    "sinks",
    "recent",
    "group",
    "pooling",
    "pooling_kernel",
    "marker_queries",
    "phase_quota",
    "redundancy",
    "safeguard",
    "steepness",
)


@dataclass(frozen=True)
class EvictionChoice:
    """A policy with its window and options.

    Attributes
    ----------
    budget : int
        B: tokens a request holds after an event; of the engine's own settings also the limit of
        what a request may ask for. A multiple of the block size.
    stride : int
        Delta: an event comes at every multiple of it. A multiple of the block size; the engine's
        own holds for all requests.
    policy : str
        One of ``phasekv.policies.names()``, or "function".
    function : str, callable or None
        The Python function that scores, as "module:name" or itself, with policy "function". A
        request gets the engine's.
    compress_prompt : str
        "chunk": a prompt is compressed whenever a scheduled chunk of it exceeds the window;
        "end": only when it is complete (it must then fit into the cache).
    queries, sinks, recent, group, pooling, pooling_kernel, marker_queries, phase_quota, redundancy
        Options of the policy (``docs/eviction.md``); None is the policy's own definition.
    safeguard, steepness : float or None
        The same of ``adakv`` and ``pyramidkv``.
    calibration : str or None
        File of ``phasekv calibrate``, for policy "triattention".
    """

    budget: int
    stride: int = 128
    policy: str = "phase_balanced"
    function: str | Callable[..., Any] | None = None
    compress_prompt: str = "chunk"
    queries: int | None = None
    sinks: int | None = None
    recent: int | None = None
    group: str | None = None
    pooling: str | None = None
    pooling_kernel: int | None = None
    marker_queries: bool | None = None
    phase_quota: float | None = None
    redundancy: float | None = None
    safeguard: float | None = None
    steepness: float | None = None
    calibration: str | None = None

    def build(self, statistics: TriattentionStatistics | None = None) -> Policy:
        """The policy itself. Raises ``InvalidArgumentError`` naming the field that is wrong.

        Parameters
        ----------
        statistics : TriattentionStatistics or None
            Calibration of a worker's own query heads; None: of all, from the file.
        """
        if self.policy == FUNCTION:
            return FunctionPolicy(
                self.function if callable(self.function) else load_function(self.function),
                queries=32 if self.queries is None else self.queries,
                sinks=4 if self.sinks is None else self.sinks,
                recent=0 if self.recent is None else self.recent,
            )
        options = {name: getattr(self, name) for name in OPTIONS}
        if self.policy != TRIATTENTION:
            return Policy(self.policy, **options)
        if statistics is None and self.calibration is not None:
            statistics = load_statistics(self.calibration)
        return Policy(self.policy, **options, statistics=statistics)

    def window(self, prompt_tokens: int, computed: int = 0) -> Window:
        """The window of a request whose first ``computed`` tokens come from a session."""
        if self.compress_prompt == "chunk":
            return Window(budget=self.budget, stride=self.stride)
        return Window(
            budget=self.budget, stride=self.stride, held_from=computed, held_until=prompt_tokens
        )

    def check(
        self,
        block_size: int,
        max_model_len: int,
    ) -> None:
        """Raise ``InvalidArgumentError`` unless budget, stride and policy fit together."""
        if self.policy == TRIATTENTION and self.calibration is None:
            raise InvalidArgumentError(
                "calibration", "null", "a file of `phasekv calibrate`, for the policy triattention"
            )
        if self.policy == "full" and self.budget < max_model_len:
            raise InvalidArgumentError(
                "budget",
                str(self.budget),
                f"at least max_model_len, {max_model_len} tokens, for the policy full",
            )
        sinks, recent = self.build().protected_tokens(self.budget)
        window = Window(budget=self.budget, stride=self.stride)
        window.check(block_size=block_size, protected_tokens=sinks + recent)
        if self.policy != "full" and self.budget < sinks + self.stride:
            raise InvalidArgumentError(
                "budget",
                str(self.budget),
                f"at least sinks + stride, {sinks} + {self.stride} tokens",
            )


FIELDS = tuple(field.name for field in fields(EvictionChoice))
REQUEST_FIELDS = tuple(name for name in FIELDS if name not in ("stride", "calibration"))


def parse_engine_choice(value: Any) -> EvictionChoice | None:
    """The engine's ``eviction`` object; None leaves the cache as it is."""
    if value is None:
        return None
    settings = _object(value)
    refuse_unknown("eviction", settings, FIELDS)
    if "budget" not in settings:
        raise InvalidArgumentError("budget", "absent", "a number of tokens")
    base = EvictionChoice(
        budget=integer(settings, "budget", 0, 1), stride=integer(settings, "stride", 128, 1)
    )
    return _parse(settings, base)


def parse_request_choice(value: Any, engine: EvictionChoice | None) -> EvictionChoice | None:
    """A request's ``eviction`` object over the engine's settings.

    A policy named anew starts from its own definition, not from the options of the default one.
    """
    if value is None:
        return engine
    if engine is None:
        raise InvalidArgumentError(
            "eviction", repr(value), "absent: this engine was started without eviction"
        )
    settings = _object(value)
    refuse_unknown("eviction", settings, REQUEST_FIELDS)
    budget = integer(settings, "budget", engine.budget, 1)
    if budget > engine.budget:
        raise InvalidArgumentError(
            "budget", str(budget), f"at most the engine's {engine.budget} tokens"
        )
    if engine.compress_prompt == "chunk" and settings.get("compress_prompt", "chunk") != "chunk":
        raise InvalidArgumentError(
            "compress_prompt",
            repr(settings["compress_prompt"]),
            '"chunk", as the engine admits requests by their budget',
        )
    base = replace(engine, budget=budget)
    if settings.get("policy", engine.policy) != engine.policy:
        base = EvictionChoice(
            budget=budget,
            stride=engine.stride,
            compress_prompt=engine.compress_prompt,
            calibration=engine.calibration,
            function=engine.function,
        )
    # Requests may come from anywhere: what is imported and called is the operator's to say.
    if settings.get("function", engine.function) != engine.function:
        raise InvalidArgumentError(
            "function", repr(settings["function"]), "left away: the engine's settings name it"
        )
    return _parse(settings, base)


def _parse(settings: dict[str, Any], base: EvictionChoice) -> EvictionChoice:
    policy = settings.get("policy", base.policy)
    known = [*policy_names(), FUNCTION]
    if policy not in known:
        raise InvalidArgumentError("policy", repr(policy), "one of " + ", ".join(known))
    compress = settings.get("compress_prompt", base.compress_prompt)
    if compress not in ("chunk", "end"):
        raise InvalidArgumentError("compress_prompt", repr(compress), '"chunk" or "end"')
    function = settings.get("function", base.function)
    if not callable(function):
        function = optional_text(settings, "function", function)
    return EvictionChoice(
        budget=base.budget,
        stride=base.stride,
        policy=policy,
        compress_prompt=compress,
        function=function,
        queries=optional_integer(settings, "queries", 1, base.queries),
        sinks=optional_integer(settings, "sinks", 0, base.sinks),
        recent=optional_integer(settings, "recent", 0, base.recent),
        group=optional_text(settings, "group", base.group),
        pooling=optional_text(settings, "pooling", base.pooling),
        pooling_kernel=optional_integer(settings, "pooling_kernel", 1, base.pooling_kernel),
        marker_queries=(
            boolean(settings, "marker_queries", True)
            if settings.get("marker_queries") is not None
            else base.marker_queries
        ),
        phase_quota=optional_number(settings, "phase_quota", base.phase_quota),
        redundancy=optional_number(settings, "redundancy", base.redundancy),
        safeguard=optional_number(settings, "safeguard", base.safeguard),
        steepness=optional_number(settings, "steepness", base.steepness),
        calibration=optional_text(settings, "calibration", base.calibration),
    )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgumentError("eviction", repr(value), "a JSON object")
    return value
