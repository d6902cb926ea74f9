"""Draws the result of ``benchmarks/throughput.py``: throughput, and what eviction costs.

Example: python benchmarks/plots/throughput.py results/throughput.json results/throughput.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PARTS = {
    "scoring_seconds": ("scoring", "#0369a1"),
    "compacting_seconds": ("compaction", "#c2410c"),
    "collecting_seconds": ("collecting queries", "#9ca3af"),
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
    """Ratios to plain vLLM with their range over rounds, and shares of decoding time."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_ratios(left, result["rows"])
    draw_overhead(right, result["overhead"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    settings, machine = result["settings"], result["machine"]
    figure.suptitle(
        f"{settings['sessions']} sessions of {settings['turns']} turns, "
        f"{settings['layers']} layers of {result['model']}, rounds: {result['rounds']}\n"
        f"{machine['processor']}, {machine['cores']} cores",
        fontsize=10,
    )
    return figure


def draw_ratios(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A bar per policy and pool."""
    heights = [row["throughput_ratio"] for row in rows]
    ranges = [row["throughput_ratio_spread"] for row in rows]
    bars = axes.bar(
        [f"{row['policy'].replace('_', chr(10))}\n{row['pool']} pool" for row in rows],
        heights,
        yerr=[
            [height - low for height, (low, _) in zip(heights, ranges, strict=True)],
            [high - height for height, (_, high) in zip(heights, ranges, strict=True)],
        ],
        capsize=3,
        color=["#6b7280" if row["budget"] is None else "#047857" for row in rows],
    )
    axes.bar_label(
        bars, [f"{height:.2f}" for height in heights], label_type="center", color="white"
    )
    axes.set_ylabel("output tokens/s ÷ plain vLLM")
    axes.axhline(1.0, color="#111827", linewidth=0.6)
    axes.tick_params(axis="x", labelsize=8)


def draw_overhead(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A stacked bar per policy and budget."""
    names = [f"{row['policy']}\nB = {row['budget']}" for row in rows]
    bottom = [0.0] * len(rows)
    for field, (label, color) in PARTS.items():
        shares = [100 * row[field] / row["decode_seconds"] for row in rows]
        axes.bar(names, shares, bottom=bottom, color=color, label=label)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    axes.set_ylabel("% of decoding time")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
