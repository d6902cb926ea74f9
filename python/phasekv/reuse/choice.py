"""Which reuse method, at which ratio, with which switches; validated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from phasekv._core import Method, method_names
from phasekv.errors import InvalidArgumentError
from phasekv.fields import optional_integer, optional_text


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
