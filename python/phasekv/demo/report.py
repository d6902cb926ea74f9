"""Writes the demos' results as one HTML file that needs nothing else, a page for each demo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phasekv.demo import agent_page, memory_page

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
p.about { color: #4b5563; margin-top: 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
th { font-weight: 600; color: #4b5563; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.method { white-space: nowrap; font-weight: 600; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em; }
.range { color: #6b7280; font-size: .85em; }
svg { width: 100%; height: auto; margin-top: 1rem; }
details { border-bottom: 1px solid #e5e7eb; padding: .4rem 0; }
summary { cursor: pointer; }
summary .gold { color: #6b7280; }
nav a { margin-right: 1.5rem; }
section + section { margin-top: 4rem; }
"""


# A page's name, the file of its result, its title and what makes it.
_PAGES: tuple[tuple[str, str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("memory", "demo.json", memory_page.TITLE, memory_page.memory_page),
    ("agent", "agent.json", agent_page.TITLE, agent_page.agent_page),
)


def write_report(folder: Path) -> None:
    """Writes ``report.html`` for the results of demos that are in the folder."""
    results = {
        name: json.loads((folder / file).read_text(encoding="utf-8"))
        for name, file, _, _ in _PAGES
        if (folder / file).exists()
    }
    (folder / "report.html").write_text(report_html(results), encoding="utf-8")


def report_html(results: dict[str, dict[str, Any]]) -> str:
    """The report as text; ``results`` by the demo's name."""
    pages = [(name, title, make) for name, _, title, make in _PAGES if name in results]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in pages)
    navigation = f"<nav>{links}</nav>" if len(pages) > 1 else ""
    body = "".join(
        f'<section id="{name}">\n{make(results[name])}</section>\n' for name, _, make in pages
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>PhaseKV: demo</title>
<style>{_STYLE}</style>
</head>
<body>
{navigation}
{body}</body>
</html>
"""
