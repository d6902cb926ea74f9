"""The exceptions of PhaseKV. The C++ core's errors arrive as these same classes."""

from __future__ import annotations


class Error(Exception):
    """Base of all errors of PhaseKV.

    Parameters
    ----------
    argument : str
        Name of the argument, field or feature that is at fault.
    value : str
        What was passed, as text.
    reason : str
        What would have been right.
    """

    def __init__(self, argument: str, value: str, reason: str) -> None:
        super().__init__(argument, value, reason)
        self.argument = argument
        self.value = value
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.argument} = {self.value}: expected {self.reason}"


class InvalidArgumentError(Error, ValueError):
    """A bad value."""


class UnsupportedError(Error, NotImplementedError):
    """A model, layout or engine feature that PhaseKV refuses to be combined with."""

    def __str__(self) -> str:
        return f"{self.argument} = {self.value} is not supported: {self.reason}"


class MissingCapabilityError(Error, RuntimeError):
    """Something that was asked for and that the machine or the build lacks."""

    def __str__(self) -> str:
        return f"{self.argument} = {self.value} is not available: {self.reason}"
