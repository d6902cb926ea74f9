"""The agent demo's page of the report."""

from __future__ import annotations

from html import escape
from typing import Any

from phasekv.demo.agent_plot import PHASE_COLORS, agent_demo_figure
from phasekv.demo.figure_files import svg_element

TITLE = "An agent under a KV budget"


def agent_page(result: dict[str, Any]) -> str:
    """The body of the page for ``result``, the content of ``agent.json``."""
    turns = "".join(_turn(number, turn) for number, turn in enumerate(result["turns"], start=1))
    return f"""<h1>{TITLE}</h1>
<p class="about">{_about(result)}</p>
{_summary(result)}
{svg_element(agent_demo_figure(result))}
<h2>What the columns say</h2>
<p>Time: from request to response, all turns. Kept: tokens held at the end, per layer and KV head.
Blocks: the most that were held after a turn. Events: times that keys were scored and evicted.
Top-1: how often the most likely next token is the full run's, while the agent's recorded tokens are
given. NLL: negative log-likelihood of these tokens, in nats. Difference: mean absolute difference
of their log-probabilities from the full run's. The dashed line of the plot is a cache that keeps
everything.</p>
<h2>Turns</h2>
{turns}
"""


def _about(result: dict[str, Any]) -> str:
    machine = result["machine"]
    trajectory = result["trajectory"]
    return escape(
        f"{result['model']} in vLLM's OpenAI server on {machine['processor']} "
        f"({machine['cores']} cores, {machine['instruction_set']}). Trajectory "
        f"{trajectory['id']} ({trajectory['source']}): {result['tokens']} tokens in "
        f"{len(result['turns'])} turns. Events at every {result['stride']} tokens; blocks of "
        f"{result['block_size']} tokens."
    )


def _summary(result: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td class='method'>{escape(name)}</td><td>{run['seconds']:.1f} s</td>"
        f"<td>{run['tokens_kept']}</td><td>{run['most_blocks']}</td><td>{run['compactions']}</td>"
        f"<td>{run['top1']:.0%}</td><td>{run['nll']:.3f}</td>"
        f"<td>{run['logprob_difference']:.3f}</td></tr>"
        for name, run in result["runs"].items()
    )
    return _table(("Run", "Time", "Kept", "Blocks", "Events", "Top-1", "NLL", "Difference"), rows)


def _turn(number: int, turn: dict[str, Any]) -> str:
    said = ", ".join(f"{phase} {n:.0f}" for phase, n in turn["said_by_phase"].items() if n)
    rows = "".join(
        f"<tr><td class='method'>{escape(name)}</td><td>{run['seconds']:.1f} s</td>"
        f"<td>{run['tokens_seen']}</td><td>{run['tokens_kept']}</td>"
        + "".join(f"<td>{run['kept_by_phase'][phase]:.0f}</td>" for phase in PHASE_COLORS)
        + f"<td>{run['blocks_held']}</td><td>{_or_dash(run['tokens_resumed'])}</td>"
        f"<td>{run['top1']:.0%}</td><td>{run['nll']:.3f}</td></tr>"
        for name, run in turn["runs"].items()
    )
    heads = ("Run", "Time", "Seen", "Kept", *PHASE_COLORS, "Blocks", "Resumed", "Top-1", "NLL")
    return (
        f"<details open><summary>Turn {number}: {turn['end'] - turn['begin']} tokens "
        f"<span class='gold'>({said})</span></summary>{_table(heads, rows)}</details>\n"
    )


def _table(heads: tuple[str, ...], rows: str) -> str:
    cells = "".join(f"<th>{_head(head)}</th>" for head in heads)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"


def _head(head: str) -> str:
    if head not in PHASE_COLORS:
        return head
    return f"<span class='dot' style='background:{PHASE_COLORS[head]}'></span>{head}"


def _or_dash(value: int | None) -> str:
    return "&ndash;" if value is None else str(value)
