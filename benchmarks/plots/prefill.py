"""Draws the result of ``benchmarks/prefill.py``: speedup of the first token by prompt length.

Example: python benchmarks/plots/prefill.py results/prefill.json results/prefill.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from phasekv.demo.memory_plot import COLORS


def main() -> None:
    """Reads the JSON, writes the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text(encoding="utf-8"))
    draw(result).savefig(arguments.picture, dpi=120)


def draw(result: dict[str, Any]) -> Figure:
    """One panel per nominal ratio; the dashed lines are the bounds from counted operations."""
    rows = result["rows"]
    ratios = sorted({row["ratio"] for row in rows if row["ratio"] > 0})
    figure = Figure(figsize=(4.2 * len(ratios), 3.8), layout="constrained")
    panels = figure.subplots(1, len(ratios), squeeze=False)[0]
    for panel, ratio in zip(panels, ratios, strict=True):
        chosen = [row for row in rows if row["ratio"] == ratio]
        for method in dict.fromkeys(row["method"] for row in chosen):
            line = sorted(
                (row for row in chosen if row["method"] == method), key=lambda row: row["tokens"]
            )
            tokens = [row["tokens"] for row in line]
            color = COLORS.get(method)
            panel.plot(tokens, [row["speedup"] for row in line], "o-", color=color, label=method)
            panel.plot(tokens, [row["bound"] for row in line], ":", color=color, linewidth=1)
        panel.set_title(f"nominal ratio {ratio:g}")
        panel.set_xlabel("prompt tokens")
        panel.set_xticks(sorted({row["tokens"] for row in rows}))
        panel.axhline(1.0, color="grey", linewidth=0.5)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("time to first token, plain vLLM / PhaseKV")
    panels[0].legend(fontsize=8)
    figure.suptitle("measured (solid) and bound from counted operations (dotted)", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
