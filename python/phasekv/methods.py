"""Reuse methods by name, for researchers.

A method says which cached tokens are computed again, and what the others get.

``Method(name, frame=..., weight=..., probes=..., boundary_tokens=...)`` builds one;
``Method.select(segments=..., key_divergence=..., value_divergence=..., ratio=...)`` chooses tokens,
with ``attention=...`` where ``Method.needs_attention``. ``FunctionMethod`` is one that a Python
function decides for. ``docs/methods`` has a page on every method, ``docs/adding_a_method.md`` tells
how to write one.
"""

from phasekv._core import Method, method_names
from phasekv.reuse.function_method import FunctionMethod

__all__ = ["FunctionMethod", "Method", "method_names"]
