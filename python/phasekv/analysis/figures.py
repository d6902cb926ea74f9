"""What the analyses' figures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from phasekv.analysis.results import Floats

BLUE, ORANGE, GREEN, VIOLET, GRAY = "#0369a1", "#c2410c", "#047857", "#7c3aed", "#6b7280"


def new_figure(
    title: str, subject: str, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> tuple[Any, Any]:
    """A matplotlib figure whose heading names what is shown and on which model and data.

    Returns
    -------
    (Figure, numpy.ndarray)
        With its axes, [rows, columns].
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    figure.suptitle(f"{title}\n{subject}" if subject else title, fontsize=10)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def label_layers(axes: Any, label: str = "layer") -> None:
    """The x axis counts layers."""
    axes.set_xlabel(label)
    axes.xaxis.get_major_locator().set_params(integer=True)


def draw_spread(axes: Any, x: Floats, values: Floats, color: str, label: str) -> None:
    """The median over the last axis of ``values`` as a line, its quartiles as a band."""
    low, middle, high = np.nanpercentile(values, [25, 50, 75], axis=-1)
    axes.plot(x, middle, color=color, label=label, linewidth=1.5)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def save_figure(figure: Any, path: Path) -> None:
    """Writes PNG, SVG or PDF, by the path's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
