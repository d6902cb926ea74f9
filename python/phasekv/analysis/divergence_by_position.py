"""Which tokens of a chunk diverge, and where each method's probes fall.

At the check layer the divergence of a token is the distance of its fresh key (or value) from the
cached one, over all KV heads. Divided by its mean in the chunk it compares across chunks: 1 is
average. EPIC (arXiv 2410.15332) recomputes the head of each chunk because a chunk encoded alone
takes its first tokens for an attention sink; whether that is where tokens diverge shows here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasekv import _core
from phasekv.analysis.figures import BLUE, ORANGE, draw_spread, new_figure
from phasekv.analysis.results import Floats
from phasekv.analysis.reused_prompt import ReusedPrompt


@dataclass(frozen=True)
class DivergenceByPosition:
    """What ``divergence_by_position`` finds.

    Attributes
    ----------
    key, value : numpy.ndarray
        ``[positions, chunks]``: the divergence of keys and values over its mean in the chunk; NaN
        past a chunk's end.
    methods : tuple of str
        Names.
    probes : numpy.ndarray
        ``[methods, positions]``: the share of the chunks that have a position which recompute it.
    ratio : float
        Nominal recompute ratio.
    """

    key: Floats
    value: Floats
    methods: tuple[str, ...]
    probes: Floats
    ratio: float


def divergence_by_position(
    prompts: Sequence[ReusedPrompt], methods: Mapping[str, _core.Method], ratio: float = 0.1
) -> DivergenceByPosition:
    """Divergence at the check layer of all chunks of some prompts, and the methods' probes.

    Parameters
    ----------
    prompts : sequence of ReusedPrompt
        From ``measure_prompt``.
    methods : mapping of str to Method
        Under the names by which they are told apart.
    ratio : float
        Nominal recompute ratio r in [0, 1].
    """
    lengths = [chunk.end - chunk.begin for prompt in prompts for chunk in prompt.chunks]
    divergence = np.full((2, max(lengths), len(lengths)), np.nan)
    probes = np.full((len(methods), max(lengths), len(lengths)), np.nan)
    column = 0
    for prompt in prompts:
        chosen = [prompt.select(method, ratio) for method in methods.values()]
        for index, chunk in enumerate(prompt.chunks):
            length = lengths[column]
            for row, values in enumerate(prompt.divergences(chunk)):
                divergence[row, :length, column] = np.array(values) / np.mean(values)
            for row, parts in enumerate(chosen):
                key_probe, value_probe, _, _ = parts[index]
                probes[row, :length, column] = (key_probe | value_probe).numpy()
            column += 1
    return DivergenceByPosition(
        key=divergence[0],
        value=divergence[1],
        methods=tuple(methods),
        probes=np.nanmean(probes, axis=2),
        ratio=ratio,
    )


def plot_divergence_by_position(result: DivergenceByPosition, subject: str = "") -> Any:
    """Divergence over the position in the chunk, above where the probes fall.

    Parameters
    ----------
    result : DivergenceByPosition
        What is drawn.
    subject : str
        Model and data, for the heading.
    """
    figure, axes = new_figure(
        "Where in a reused chunk tokens diverge, and which tokens each method recomputes",
        subject,
        2,
        1,
        (10, 6),
        sharex=True,
        height_ratios=[1.0, 0.3 + 0.12 * len(result.methods)],
    )
    above, below = axes[:, 0]
    # A median of few chunks says little.
    enough = np.isfinite(result.key).sum(1) >= max(1, result.key.shape[1] // 4)
    positions = np.flatnonzero(enough).astype(np.float64)
    draw_spread(above, positions, result.key[enough], BLUE, "keys")
    draw_spread(above, positions, result.value[enough], ORANGE, "values")
    above.axhline(1, color="black", linewidth=0.6)
    above.set_ylabel("divergence at the check layer\n(1: the chunk's mean)")
    above.set_ylim(bottom=0)
    above.legend(fontsize=8, title="median and quartiles over chunks", title_fontsize=8)
    image = below.imshow(
        result.probes[:, enough], aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="none"
    )
    below.grid(visible=False)
    below.set_yticks(range(len(result.methods)), result.methods)
    below.set_xlabel("position of the token in its chunk")
    figure.colorbar(
        image, ax=below, label=f"share of chunks that\nrecompute it, r = {result.ratio:g}"
    )
    return figure
