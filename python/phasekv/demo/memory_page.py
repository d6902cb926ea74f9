"""The memory demo's page of the report."""

from __future__ import annotations

from html import escape
from typing import Any

from phasekv.demo.figure_files import svg_element
from phasekv.demo.memory_plot import COLORS, memory_demo_figure

TITLE = "An agent's memory notes, encoded once and reused"


def memory_page(result: dict[str, Any]) -> str:
    """The body of the page for ``result``, the content of ``demo.json``."""
    questions = "".join(_question(row) for row in result["questions"])
    return f"""<h1>{TITLE}</h1>
<p class="about">{_about(result)}</p>
{_summary(result)}
{svg_element(memory_demo_figure(result))}
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
