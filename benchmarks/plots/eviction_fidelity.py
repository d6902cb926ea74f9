"""Draws the result of ``benchmarks/eviction_fidelity.py``: distance from full KV by budget.

Example: python benchmarks/plots/eviction_fidelity.py results/eviction_fidelity.json picture.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

FULL = "full"
REFERENCE = "agentkv"
COLORS = {
    "agentkv": "#0369a1",
    "agentkv_recency": "#7dd3fc",
    "h2o": "#b58900",
    "phase_balanced": "#047857",
    "r_kv": "#7c3aed",
    "snapkv": "#c2410c",
    "streaming_llm": "#6b7280",
    "triattention": "#be185d",
}
OTHER_COLOR = "#111827"


def main() -> None:
    """Reads the JSON, writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text(encoding="utf-8"))
    draw(result).savefig(arguments.picture, dpi=150)


def draw(result: dict[str, Any]) -> Figure:
    """KL by budget for the policies as they are; below, differences from AgentKV per budget."""
    budgets = sorted({line["budget"] for line in result["differences"]})
    most = max((len(lines_at(result, budget)) for budget in budgets), default=1)
    figure = Figure(
        figsize=(5.2 * max(len(budgets), 2), 4.4 + 1.2 + 0.3 * most), layout="constrained"
    )
    upper, lower = figure.subfigures(2, 1, height_ratios=[4.4, 1.2 + 0.3 * most])
    left, right = upper.subplots(1, 2)
    draw_budgets(left, result, "kl", "KL(full KV ‖ policy), nats")
    left.set_yscale("log")
    left.legend(fontsize=8)
    draw_budgets(right, result, "top1", "same most likely token as full KV")
    for panel, budget in zip(
        lower.subplots(1, len(budgets), squeeze=False)[0], budgets, strict=True
    ):
        lines = lines_at(result, budget)
        draw_differences(panel, lines)
        count = max(line["trajectories"] for line in lines)
        panel.set_title(f"B = {budget}, {count} trajectories")
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, think and act tokens, "
        f"Δ = {result['stride']}, 95 % bootstrap intervals\n"
        f"{machine['processor']}, {machine['cores']} cores",
        fontsize=10,
    )
    return figure


def lines_at(result: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    """The differences at a budget, the closest to full KV first."""
    lines = [line for line in result["differences"] if line["budget"] == budget]
    return sorted(lines, key=lambda line: float(line["kl"]["mean"]))


def draw_budgets(axes: Axes, result: dict[str, Any], metric: str, label: str) -> None:
    """One line per policy without options; only points where budgets have other trajectories."""
    plain = [row for row in result["rows"] if not row["options"] and row["policy"] != FULL]
    budgets = sorted({row["budget"] for row in plain})
    for policy in dict.fromkeys(row["policy"] for row in plain):
        rows = sorted(
            (row for row in plain if row["policy"] == policy), key=lambda row: int(row["budget"])
        )
        axes.plot(
            [budgets.index(row["budget"]) for row in rows],
            [row[metric]["mean"] for row in rows],
            "o-" if len({row["trajectories"] for row in rows}) == 1 else "o",
            markersize=4,
            color=COLORS.get(policy, OTHER_COLOR),
            label=policy,
        )
    axes.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
    axes.set_xlabel("budget B in tokens")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def draw_differences(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """Mean and interval of each setting's KL minus AgentKV's."""
    for height, line in enumerate(lines):
        interval = line["kl"]
        axes.errorbar(
            [interval["mean"]],
            [height],
            xerr=[[interval["mean"] - interval["low"]], [interval["high"] - interval["mean"]]],
            fmt="o",
            markersize=4,
            capsize=2,
            color=COLORS.get(line["first"], OTHER_COLOR),
        )
    axes.set_yticks(range(len(lines)), [line["first"] for line in lines], fontsize=8)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=5)
    axes.axvline(0.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"KL minus that of {REFERENCE}, nats (left is closer)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="x")


if __name__ == "__main__":
    main()
