"""Equal figures give equal files, whatever lies where in memory."""

import random
from pathlib import Path
from typing import Any

import kiwisolver
from matplotlib.figure import Figure

from phasekv.demo.figure_files import save_png, svg_element


def _figure() -> Figure:
    """As the demos': axes below each other that share an axis, bars, a heading."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    strip, *rows = figure.subplots(4, 1, sharex=True, height_ratios=[0.35, 1, 1, 1])
    strip.barh(0, 4096)
    for count, axes in enumerate(rows):
        axes.bar([900, 1800, 2500, 4000], [700 + count, 311, 512, 97], 70)
        axes.set_ylabel("tokens kept")
        axes.set_title(f"run {count}", loc="left")
    figure.suptitle("two\nlines")
    return figure


def _scatter_memory(generator: random.Random) -> list[Any]:
    """Variables of matplotlib's layout get addresses in another order after this."""
    held = [kiwisolver.Variable(str(count)) for count in range(2000)]
    generator.shuffle(held)
    del held[generator.randrange(1000) :]
    return held


def test_equal_figures_give_equal_files() -> None:
    generator = random.Random(1)
    elements = set()
    for _ in range(12):
        held = _scatter_memory(generator)
        elements.add(svg_element(_figure()))
        del held
    assert len(elements) == 1
    assert "<dc:date>" not in elements.pop()


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    save_png(_figure(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
