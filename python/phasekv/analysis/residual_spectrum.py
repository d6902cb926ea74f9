"""How much of the residual of a reused chunk is one offset that its tokens share.

The residual of token i is r_i = fresh - cached, over all KV heads of a layer. AgentKVShift (arXiv
2607.21604, section 3.2) models it as r_i = mu + xi_i, an offset of the whole chunk and a small
fluctuation. The offset's share of the energy is n |mu|^2 / sum_i |r_i|^2 with mu the mean over the
chunk's n tokens; residuals without anything in common have a share of 1 / n on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phasekv.analysis.figures import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    draw_spread,
    label_layers,
    new_figure,
)
from phasekv.analysis.progress import progress
from phasekv.analysis.results import Floats
from phasekv.analysis.reused_prompt import KINDS, ReusedPrompt

COLORS = {"keys": BLUE, "keys, unrotated": GREEN, "values": ORANGE}


@dataclass(frozen=True)
class ResidualSpectrum:
    """What ``residual_spectrum`` finds.

    Attributes
    ----------
    kinds : tuple of str
        ``KINDS``.
    layers : numpy.ndarray
        ``[layers]``, from 1 on: at layer 0 a cached token moved is a fresh one.
    offset_share : numpy.ndarray
        ``[kinds, layers, chunks]`` in [0, 1].
    without_structure : numpy.ndarray
        ``[chunks]``: the share that residuals of independent directions would have, 1 / n.
    before, after : numpy.ndarray
        ``[kinds, layers, singular values]``: of the residual matrix ``[tokens, kv heads * head
        size]`` and of what subtracting its mean leaves, both over the norm of the former; mean over
        the chunks.
    """

    kinds: tuple[str, ...]
    layers: Floats
    offset_share: Floats
    without_structure: Floats
    before: Floats
    after: Floats


def residual_spectrum(
    prompts: Sequence[ReusedPrompt], *, singular_values: int = 16
) -> ResidualSpectrum:
    """Offset and singular values of the residuals of all chunks of some prompts.

    Parameters
    ----------
    prompts : sequence of ReusedPrompt
        From ``measure_prompt``.
    singular_values : int
        How many of the largest to keep; those that a short chunk does not have are 0.
    """
    layers = range(1, prompts[0].layers)
    chunks = [(prompt, chunk) for prompt in prompts for chunk in prompt.chunks]
    shares = np.zeros((len(KINDS), len(layers), len(chunks)))
    before = np.zeros((len(KINDS), len(layers), singular_values))
    after = np.zeros_like(before)
    for column, (prompt, chunk) in enumerate(progress(chunks, "chunks")):
        for row, kind in enumerate(KINDS):
            for index, layer in enumerate(layers):
                matrix = prompt.residuals(chunk, layer, kind).flatten(1)
                mean = matrix.mean(0)
                norm = matrix.norm()
                shares[row, index, column] = len(matrix) * mean.square().sum() / norm.square()
                for total, rows in ((before, matrix), (after, matrix - mean)):
                    found = torch.linalg.svdvals(rows)[:singular_values] / norm
                    total[row, index, : len(found)] += found.numpy() / len(chunks)
    return ResidualSpectrum(
        kinds=KINDS,
        layers=np.array(layers, dtype=np.float64),
        offset_share=shares,
        without_structure=np.array([1 / (chunk.end - chunk.begin) for _, chunk in chunks]),
        before=before,
        after=after,
    )


def plot_residual_spectrum(result: ResidualSpectrum, subject: str = "") -> Any:
    """The offset's share per layer, and the singular values of a layer in the middle.

    Parameters
    ----------
    result : ResidualSpectrum
        What is drawn.
    subject : str
        Model and data, for the heading.
    """
    figure, axes = new_figure(
        "Residuals of reused chunks (fresh - cached): how much is one shared offset?",
        subject,
        1,
        1 + len(result.kinds),
        (4.4 + 2.9 * len(result.kinds), 3.8),
        width_ratios=[1.5, *[1.0] * len(result.kinds)],
    )
    share, *spectra = axes[0]
    for row, kind in enumerate(result.kinds):
        draw_spread(share, result.layers, result.offset_share[row], COLORS[kind], kind)
    share.axhline(
        float(result.without_structure.mean()), color=GRAY, linestyle="--", label="nothing shared"
    )
    share.set_ylim(0, 1)
    label_layers(share)
    share.set_ylabel("share of the energy in the mean\n(1: a shift repairs all)")
    share.set_title("shared offset (median and quartiles over chunks)", fontsize=9)
    share.legend(fontsize=8)
    middle = len(result.layers) // 2
    rank = np.arange(1, result.before.shape[2] + 1)
    for row, (one, kind) in enumerate(zip(spectra, result.kinds, strict=True)):
        one.plot(rank, result.before[row, middle], color=COLORS[kind], marker="o", markersize=3)
        one.plot(
            rank,
            result.after[row, middle],
            color=COLORS[kind],
            marker="o",
            markersize=3,
            linestyle=":",
        )
        one.set_ylim(0, 1)
        one.set_xlabel("singular value, by rank")
        one.set_title(f"{kind}, layer {result.layers[middle]:g}", fontsize=9)
    spectra[0].set_ylabel("over the norm of all residuals")
    spectra[0].legend(["as they are", "mean subtracted"], fontsize=8)
    return figure
