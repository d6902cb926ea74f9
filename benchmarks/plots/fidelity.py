"""Draws the result of ``benchmarks/fidelity.py``: distance from full recompute against its cost.

Example: python benchmarks/plots/fidelity.py results/fidelity.json results/fidelity.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from phasekv.demo.memory_plot import COLORS, FULL_RECOMPUTE

TITLES = {
    "alone": "notes encoded alone",
    "prefix": "notes encoded after a prefix that is dropped",
}


def main() -> None:
    """Reads the JSON, writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text(encoding="utf-8"))
    draw(result).savefig(arguments.picture, dpi=150)


def draw(result: dict[str, Any]) -> Figure:
    """KL over the charged ratio (above) and NLL of the gold answer (below), per encoding."""
    encodings = list(dict.fromkeys(row["encode"] for row in result["rows"]))
    figure = Figure(figsize=(5.2 * len(encodings), 7.6), layout="constrained")
    grid = figure.subplots(2, len(encodings), squeeze=False, sharex=True, sharey="row")
    for column, encode in enumerate(encodings):
        rows = [row for row in result["rows"] if row["encode"] == encode]
        upper, lower = grid[0][column], grid[1][column]
        draw_metric(upper, rows, "kl")
        draw_metric(lower, rows, "nll")
        full = next(row for row in rows if row["method"] == FULL_RECOMPUTE)
        lower.axhline(
            full["nll"]["mean"], color=COLORS[FULL_RECOMPUTE], linestyle="--", label=FULL_RECOMPUTE
        )
        upper.set_title(TITLES[encode])
        lower.set_xlabel("charged ratio (recomputed share of the notes)")
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
    grid[0][0].set_ylabel("KL(full recompute ‖ method), nats")
    grid[1][0].set_ylabel("NLL of the gold answer, nats per token")
    grid[1][0].legend(fontsize=8)
    data, machine = result["data"], result["machine"]
    figure.suptitle(
        f"{result['model']}, LoCoMo: {data['questions']} questions over {data['retrieved_notes']} "
        f"notes each, 95 % bootstrap intervals\n{machine['processor']}, {machine['cores']} cores",
        fontsize=10,
    )
    return figure


def draw_metric(axes: Axes, rows: list[dict[str, Any]], metric: str) -> None:
    """One line per method, in order of the charged ratio."""
    methods = dict.fromkeys(row["method"] for row in rows if row["method"] != FULL_RECOMPUTE)
    for method in methods:
        points = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: row["charged_ratio"]
        )
        values = [point[metric]["mean"] for point in points]
        axes.errorbar(
            [point["charged_ratio"] for point in points],
            values,
            yerr=[
                [value - point[metric]["low"] for value, point in zip(values, points, strict=True)],
                [
                    point[metric]["high"] - value
                    for value, point in zip(values, points, strict=True)
                ],
            ],
            label=method,
            color=COLORS[method],
            marker="o",
            markersize=4,
            linewidth=1.5,
            elinewidth=0.8,
            capsize=2,
        )


if __name__ == "__main__":
    main()
