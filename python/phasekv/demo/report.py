"""Writes the memory demo's result as one HTML page that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from phasekv.demo.plot import COLORS, memory_demo_svg

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
"""


def write_report(result: dict[str, Any], path: Path) -> None:
    """Writes the page for ``result``, the content of ``demo.json``."""
    path.write_text(report_html(result), encoding="utf-8")


def report_html(result: dict[str, Any]) -> str:
    """The page as text."""
    questions = "".join(_question(row) for row in result["questions"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>PhaseKV: memory demo</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>An agent's memory notes, encoded once and reused</h1>
<p class="about">{_about(result)}</p>
{_summary(result)}
{memory_demo_svg(result)}
<h2>What the columns say</h2>
<p>First token: median time from the request to its first token. Speedup: full recompute's time over
this one's, the median over the questions. Tokens: rows computed for a prompt, averaged over the
layers. Charged: the share of the reused notes that was computed again. KL: the divergence of the
next-token distributions from those of full recompute while the gold answer is given, in nats, with
a 95&nbsp;% bootstrap interval. Top-1: how often the most likely token is the same. NLL: negative
log-likelihood of the gold answer per token, in nats. F1: LoCoMo's score of the generated answer; a
model this small answers badly whatever the method, so KL and NLL are what to compare by.</p>
<h2>Questions</h2>
{questions}
</body>
</html>
"""


def _about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return escape(
        f"{result['model']} in vLLM on {machine['processor']} ({machine['cores']} cores, "
        f"{machine['instruction_set']}). {len(result['questions'])} questions, each over "
        f"{result['retrieved_notes']} of {result['notes']} notes ({result['data']}); "
        f"recompute ratio r = {result['ratio']}; notes encoded "
        + (
            "after the prompts' common beginning, which was dropped."
            if result["encode"] == "prefix"
            else "alone."
        )
    )


def _summary(result: dict[str, Any]) -> str:
    rows = []
    for method, row in result["methods"].items():
        kl = row["kl"]
        interval = f"[{kl['low']:.3f}, {kl['high']:.3f}]"
        rows.append(
            f"<tr>{_method(method)}<td>{row['first_token_seconds']:.2f} s</td>"
            f"<td>{row['speedup']:.2f}&times;</td><td>{row['tokens_computed']:.0f}</td>"
            f"<td>{row['charged_ratio']:.3f}</td>"
            f"<td>{kl['mean']:.3f} <span class='range'>{interval}</span></td>"
            f"<td>{row['top1']['mean']:.0%}</td><td>{row['nll']['mean']:.2f}</td>"
            f"<td>{row['f1']['mean']:.2f}</td></tr>"
        )
    heads = ("First token", "Speedup", "Tokens", "Charged", "KL", "Top-1", "NLL", "F1")
    return (
        "<table><thead><tr><th>Method</th>"
        + "".join(f"<th>{head}</th>" for head in heads)
        + "</tr></thead><tbody>"
        + "".join(rows)
        + "</tbody></table>"
    )


def _question(row: dict[str, Any]) -> str:
    body = "".join(
        f"<tr>{_method(method)}<td class='text'>{escape(outcome['answer'] or '')}</td>"
        f"<td>{_mean(outcome['first_token_seconds']):.2f} s</td>"
        f"<td>{outcome['tokens_computed']:.0f}</td><td>{_mean(outcome['kl']):.3f}</td>"
        f"<td>{_mean(outcome['top1']):.0%}</td></tr>"
        for method, outcome in row["methods"].items()
    )
    return (
        f"<details open><summary>{escape(row['question'])} "
        f"<span class='gold'>({escape(row['gold'])})</span></summary>"
        "<table><thead><tr><th>Method</th><th class='text'>Answer</th><th>First token</th>"
        f"<th>Tokens</th><th>KL</th><th>Top-1</th></tr></thead><tbody>{body}</tbody></table>"
        "</details>\n"
    )


def _method(name: str) -> str:
    dot = f"<span class='dot' style='background:{COLORS[name]}'></span>"
    return f"<td class='method'>{dot}{escape(name)}</td>"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
