"""KV-cache reuse and eviction for LLM agents, inside vLLM."""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from phasekv.errors import (
    Error,
    InvalidArgumentError,
    MissingCapabilityError,
    UnsupportedError,
)

__version__ = version("phasekv")

__all__ = [
    "Error",
    "InvalidArgumentError",
    "MissingCapabilityError",
    "UnsupportedError",
    "__version__",
]


def __getattr__(name: str) -> ModuleType:
    """What imports transformers, only when it is asked for."""
    if name in ("analysis", "transformers"):
        return import_module(f"phasekv.{name}")
    raise AttributeError(f"module 'phasekv' has no attribute {name!r}")
