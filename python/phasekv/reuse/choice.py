"""Which reuse method, at which ratio, with which switches; validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from phasekv._core import Method, method_names
from phasekv.errors import InvalidArgumentError
from phasekv.fields import load_function, optional_integer, optional_text
from phasekv.reuse.function_method import FUNCTION, FunctionMethod


@dataclass(frozen=True)
class MethodChoice:
    """A reuse method with its nominal recompute ratio and switches.

    Attributes
    ----------
    method : str
        One of ``phasekv.methods.method_names()``, or "function".
    ratio : float
        Nominal recompute ratio r in [0, 1]: the share of a chunk's tokens that become probes.
    frame, weight, probes : str or None
        Switches of the shift methods; None is the method's own definition
        (``docs/reuse.md`` lists them).
    boundary_tokens : int or None
        EPIC only: tokens recomputed at the head of every chunk, instead of ``ratio``.
    function : str, callable or None
        The Python function of the method "function", as "module:name" or itself.
    """

    method: str = "agentkvshift"
    ratio: float = 0.1
    frame: str | None = None
    weight: str | None = None
    probes: str | None = None
    boundary_tokens: int | None = None
    function: str | Callable[..., Any] | None = None

    def build(self) -> Method | FunctionMethod:
        """The method itself. Raises ``InvalidArgumentError`` naming the field that is wrong."""
        if self.method == FUNCTION:
            for name in ("weight", "probes", "boundary_tokens"):
                if getattr(self, name) is not None:
                    raise InvalidArgumentError(name, FUNCTION, "an option that this method has")
            function = self.function if callable(self.function) else load_function(self.function)
            return FunctionMethod(function, self.frame or "rotated")
        return Method(
            self.method,
            frame=self.frame,
            weight=self.weight,
            probes=self.probes,
            boundary_tokens=self.boundary_tokens,
        )


METHOD_FIELDS = tuple(field.name for field in fields(MethodChoice))


def parse_choice(settings: dict[str, Any], defaults: MethodChoice) -> MethodChoice:
    """The method, ratio and switches in ``settings``; what is absent comes from ``defaults``.

    A method named anew starts from its own definition, not from the switches of the default one.
    """
    method = settings.get("method", defaults.method)
    known = [*method_names(), FUNCTION]
    if not isinstance(method, str) or method not in known:
        raise InvalidArgumentError("method", repr(method), "one of " + ", ".join(known))
    inherited = defaults if method == defaults.method else MethodChoice()
    ratio = settings.get("ratio", defaults.ratio)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise InvalidArgumentError("ratio", repr(ratio), "a recompute ratio in [0, 1]")
    function = settings.get("function", defaults.function)
    if not callable(function):
        function = optional_text(settings, "function", function)
    choice = MethodChoice(
        method=method,
        ratio=float(ratio),
        frame=optional_text(settings, "frame", inherited.frame),
        weight=optional_text(settings, "weight", inherited.weight),
        probes=optional_text(settings, "probes", inherited.probes),
        boundary_tokens=optional_integer(settings, "boundary_tokens", 0, inherited.boundary_tokens),
        function=function,
    )
    choice.build()
    return choice
