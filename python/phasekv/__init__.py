"""KV-cache reuse and eviction for LLM agents, inside vLLM."""

from importlib.metadata import version

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
