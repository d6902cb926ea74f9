"""Writes ``docs/api.md`` from the docstrings of the public modules.

Example: python docs/make_api.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import phasekv

PAGE = Path(__file__).resolve().parent / "api.md"
STUB = Path(phasekv.__file__).resolve().parent / "_core.pyi"

MODULES = (
    "phasekv",
    "phasekv.transformers",
    "phasekv.analysis",
    "phasekv.methods",
    "phasekv.reuse.choice",
    "phasekv.eviction",
    "phasekv.phases",
    "phasekv.memory",
)

BEGINNING = """# API reference

What notebooks and scripts use, by module; made from the docstrings by `docs/make_api.py`. The C++
API is documented in its headers, `include/phasekv/`.
"""

SECTION = re.compile(r"^(?P<name>[A-Z][A-Za-z ]+)\n-{3,}\n", re.MULTILINE)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [BEGINNING]
    parts += [module_text(importlib.import_module(name)) for name in MODULES]
    return "\n".join(parts)


def module_text(module: Any) -> str:
    """A module's section: its own docstring, and all that it makes public."""
    lines = [f"## `{module.__name__}`", "", prose(inspect.getdoc(module) or ""), ""]
    for name in public_names(module):
        value = getattr(module, name)
        if inspect.isclass(value):
            lines += class_lines(name, value)
        elif callable(value):
            lines += [f"### `{name}{signature_of(value, name)}`", "", described(value), ""]
    return "\n".join(lines)


def public_names(module: Any) -> list[str]:
    """What ``__all__`` lists; without one, the module's own public classes and functions."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def class_lines(name: str, kind: Any) -> list[str]:
    """A class, its methods and its properties."""
    constructor = signature_of(kind, name)
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    after = f" ({', '.join(bases)})" if bases and issubclass(kind, Exception) else ""
    lines = [f"### `{name}{constructor}`{after}", "", described(kind), ""]
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        doc = inspect.getdoc(value)
        if isinstance(value, property) and doc:
            lines += [f"**`{name}.{member}`** {prose(doc)}", ""]
        elif inspect.isroutine(value) and (doc or in_stub(name, member)):
            lines += [f"**`{name}.{member}{signature_of(value, name, member)}`**", ""]
            lines += [described(value), ""] if doc else []
    return lines


def signature_of(value: Any, name: str, member: str | None = None) -> str:
    """Parameters and their defaults; what C++ binds is looked up in the stub."""
    node = stub_node(name, member)
    if node is not None and value.__module__ in ("phasekv._core", None):
        arguments = node.args
        for one in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs):
            one.annotation = None
        arguments.args = [one for one in arguments.args if one.arg != "self"]
        return f"({ast.unparse(arguments)})"
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in found.parameters.values()
        if one.name not in ("self", "cls")
    ]
    return str(inspect.Signature(parameters))


def in_stub(name: str, member: str) -> bool:
    """Whether the stub of the C++ module has this method."""
    return stub_node(name, member) is not None


def stub_node(name: str, member: str | None) -> ast.FunctionDef | None:
    """The definition of a function, a class's constructor or a method in the stub."""
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name and member is None:
            return node
        if isinstance(node, ast.ClassDef) and node.name == name:
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and one.name == (member or "__init__"):
                    return one
    return None


def described(value: Any) -> str:
    """A docstring in Markdown, its numpydoc sections as lists."""
    text = inspect.getdoc(value) or ""
    if getattr(value, "__module__", "") in ("phasekv._core", None):
        # pybind11 puts the C++ signature first.
        text = re.sub(r"\A\w+\(.*?\n\n", "", text + "\n\n", flags=re.DOTALL).strip()
    first, *rest = SECTION.split(text)
    parts = [prose(first)]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        parts += [f"*{title}*", entries(body)]
    return "\n\n".join(part for part in parts if part)


def entries(body: str) -> str:
    """``name : type`` lines, each with its indented text, as a list."""
    found: list[tuple[str, list[str]]] = []
    for line in body.strip("\n").splitlines():
        if line and not line.startswith(" "):
            found.append((line, []))
        elif found:
            found[-1][1].append(line.strip())
    lines = []
    for head, text in found:
        name, _, kind = head.partition(" : ")
        after = " ".join(text).strip()
        kind = f" ({kind})" if kind else ""
        lines.append(prose(f"- ``{name}``{kind}: {after}" if after else f"- ``{name}``{kind}"))
    return "\n".join(lines)


def prose(text: str) -> str:
    """A docstring's paragraphs, its double backticks single."""
    return text.strip().replace("``", "`")


if __name__ == "__main__":
    main()
