"""Draws the agent demo's result from its JSON."""

from __future__ import annotations

from typing import Any

PHASE_COLORS = {"think": "#7c3aed", "act": "#c2410c", "tool": "#0369a1", "others": "#6b7280"}


def agent_demo_figure(result: dict[str, Any]) -> Any:
    """Tokens kept by phase after each turn, one row per run, under the trajectory's phases.

    Parameters
    ----------
    result
        The content of ``agent.json``.

    Returns
    -------
    Figure
        Of matplotlib, not yet laid out.
    """
    from matplotlib.figure import Figure

    runs = list(result["runs"])
    figure = Figure(figsize=(10, 1.0 + 1.5 * len(runs)), layout="constrained")
    strip, *rows = figure.subplots(
        1 + len(runs), 1, sharex=True, height_ratios=[0.35, *[1.0] * len(runs)]
    )
    _draw_trajectory(strip, result)
    for axes, name in zip(rows, runs, strict=True):
        _draw_run(axes, result, name)
    rows[-1].set_xlabel("tokens seen")
    figure.suptitle(
        f"{result['model']}, tokens kept after each turn\n{result['machine']['processor']}, "
        f"{result['machine']['cores']} cores",
        fontsize=10,
    )
    return figure


def _draw_trajectory(axes: Any, result: dict[str, Any]) -> None:
    begin = 0
    labelled: set[str] = set()
    for phase, tokens in result["phases"]:
        label = None if phase in labelled else phase
        labelled.add(phase)
        axes.barh(0, tokens, left=begin, color=PHASE_COLORS[phase], label=label)
        begin += tokens
    axes.set_xlim(0, begin)
    axes.set_yticks([])
    axes.set_ylabel("phase", rotation=0, ha="right", va="center")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, frameon=False, fontsize="small"
    )


def _draw_run(axes: Any, result: dict[str, Any], name: str) -> None:
    turns = [turn["runs"][name] for turn in result["turns"]]
    seen = [turn["tokens_seen"] for turn in turns]
    width = 0.018 * result["tokens"]
    bottoms = [0.0] * len(turns)
    for phase, color in PHASE_COLORS.items():
        heights = [turn["kept_by_phase"][phase] for turn in turns]
        axes.bar(seen, heights, width, bottom=bottoms, color=color)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.plot([0, *seen], [0, *seen], color="#9ca3af", linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.15 * max(bottoms))
    axes.set_ylabel("tokens kept")
    axes.set_title(name, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
