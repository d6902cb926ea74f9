"""Writes the demos' figures. Equal results give equal files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any


def save_png(figure: Any, path: Path) -> None:
    """Writes a matplotlib figure to ``path``."""
    _fix_layout(figure)
    figure.savefig(path, format="png", dpi=150)


def svg_element(figure: Any) -> str:
    """A matplotlib figure as an SVG element, to be put into a page."""
    from matplotlib import rc_context

    _fix_layout(figure)
    buffer = io.BytesIO()
    # No date, and no random names inside.
    with rc_context({"svg.hashsalt": "phasekv"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue().decode("utf-8")
    return text[text.index("<svg") :]


def _fix_layout(figure: Any) -> None:
    """Lays the figure out once and rounds where its axes are.

    The solver takes its variables in the order of their addresses, so the last bits of what it
    finds differ from run to run, and the names inside an SVG are made from them.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position([round(edge, 6) for edge in axes.get_position().bounds])
