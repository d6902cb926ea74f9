"""Whether the queries of an agent's phases point in different directions.

For each phase and KV head the queries of a span (all query heads of the group) are the rows of a
matrix; its first k right singular vectors V span the directions that matter to the phase. The
principal angles between two spans are arccos sigma_i(V_s^T V_t). AgentKV (arXiv 2609.14872) finds
them larger between phases than within one, and keeps queries of every phase for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phasekv.analysis.figures import BLUE, GRAY, GREEN, ORANGE, label_layers, new_figure
from phasekv.analysis.recording import record_attention
from phasekv.analysis.results import Floats
from phasekv.analysis.reused_prompt import rotated
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.trajectories import LabelledTokens
from phasekv.phases import phase_names
from phasekv.transformers.models import check_on_cpu, shape_of
from phasekv.transformers.rotation import rope_of_model

FRAMES = ("rotated", "unrotated")
"""Queries after RoPE, as they are scored; or turned back by their own position first."""


@dataclass(frozen=True)
class PhaseSubspaces:
    """What ``phase_subspaces`` finds.

    Attributes
    ----------
    phases : tuple of str
        Those with enough tokens.
    angles : numpy.ndarray
        ``[layers, kv heads, phases, phases]``, degrees in [0, 90]: the mean principal angle of two
        phases, over all pairs of their halves; of a phase and itself, that of its two halves.
    directions : int
        k.
    tokens : int
        Queries (per query head) in each half.
    frame : str
        One of ``FRAMES``.
    random : float
        Mean principal angle of random subspaces of k dimensions, in degrees.
    """

    phases: tuple[str, ...]
    angles: Floats
    directions: int
    tokens: int
    frame: str
    random: float

    @property
    def within(self) -> Floats:
        """``[layers, kv heads]``: mean angle of two halves of a phase, in degrees."""
        own: Floats = np.diagonal(self.angles, axis1=2, axis2=3).mean(-1)
        return own

    @property
    def between(self) -> Floats:
        """``[layers, kv heads]``: mean angle of two phases, in degrees."""
        pairs = ~np.eye(len(self.phases), dtype=np.bool_)
        other: Floats = self.angles[:, :, pairs].mean(-1)
        return other


@torch.no_grad()
def phase_subspaces(
    model: Any, labelled: LabelledTokens, *, directions: int = 5, frame: str = "unrotated"
) -> PhaseSubspaces:
    """Principal angles between the query subspaces of the phases of a trajectory.

    A phase's tokens (no markers) are cut in the middle of their order into two halves, and every
    half is thinned evenly to the same number, so that no angle is small for want of queries.

    Parameters
    ----------
    model : transformers model
        A decoder, as ``phasekv.transformers`` supports them.
    labelled : LabelledTokens
        The trajectory.
    directions : int
        k, at least 1.
    frame : str
        One of ``FRAMES``.

    Raises
    ------
    InvalidArgumentError
        For a bad frame or k, or with less than two phases of at least 2 k tokens.
    """
    if frame not in FRAMES:
        raise InvalidArgumentError("frame", repr(frame), "one of " + ", ".join(FRAMES))
    shape = shape_of(model)
    check_on_cpu(shape, "analyses run")
    if not 1 <= directions <= shape.head_size:
        raise InvalidArgumentError(
            "directions", str(directions), f"between 1 and {shape.head_size}"
        )
    halves = _halves(labelled, directions)
    rope = rope_of_model(model, shape) if frame == "unrotated" else None
    bases: list[torch.Tensor] = []  # per layer [kv heads, phases, 2, k, head size]

    def layer(_: int, query: torch.Tensor, __: torch.Tensor, ___: torch.Tensor) -> None:
        rows = query.transpose(0, 1).contiguous()
        if rope is not None:
            rows = rotated(rows, -torch.arange(len(rows)), rope)
        rows = rows.unflatten(1, (shape.kv_heads, -1)).double()
        spans = torch.stack([rows[half] for pair in halves.values() for half in pair])
        matrices = spans.permute(2, 0, 1, 3, 4).flatten(2, 3)
        _, _, right = torch.linalg.svd(matrices, full_matrices=False)
        bases.append(right[:, :, :directions].unflatten(1, (len(halves), 2)))

    with record_attention(model, layer):
        tokens = torch.from_numpy(labelled.tokens.astype(np.int64))[None]
        model(tokens, use_cache=False, logits_to_keep=1)
    return PhaseSubspaces(
        phases=tuple(halves),
        angles=np.stack([_mean_angles(one) for one in bases]),
        directions=directions,
        tokens=len(next(iter(halves.values()))[0]),
        frame=frame,
        random=_random_angle(shape.head_size, directions),
    )


def _halves(
    labelled: LabelledTokens, directions: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Positions of the two halves of each phase."""
    found = {}
    for phase in phase_names():
        positions = np.flatnonzero(labelled.content(phase))
        if len(positions) >= 2 * directions:
            found[phase] = np.array_split(positions, 2)
    if len(found) < 2:
        raise InvalidArgumentError(
            "trajectory",
            f"phases {sorted(found)}",
            f"two phases or more of at least {2 * directions} tokens",
        )
    count = min(len(half) for pair in found.values() for half in pair)
    thinned = {}
    for phase, pair in found.items():
        first, second = (
            torch.from_numpy(half[np.arange(count) * len(half) // count]) for half in pair
        )
        thinned[phase] = (first, second)
    return thinned


def _mean_angles(bases: torch.Tensor) -> Floats:
    """Of [kv heads, phases, 2, k, head size]: degrees [kv heads, phases, phases]."""
    phases = bases.shape[1]
    out = np.empty((bases.shape[0], phases, phases))
    for one in range(phases):
        for other in range(phases):
            pairs = [(0, 1)] if one == other else [(0, 0), (0, 1), (1, 0), (1, 1)]
            angles = [
                principal_angles(bases[:, one, first], bases[:, other, second]).mean(-1)
                for first, second in pairs
            ]
            out[:, one, other] = torch.stack(angles).mean(0).numpy()
    return out


def principal_angles(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Degrees ``[..., k]`` between orthonormal rows ``[..., k, dimensions]``, ascending."""
    cosines = torch.linalg.svdvals(first @ second.mT)
    return torch.rad2deg(cosines.clamp(max=1).arccos())


def _random_angle(dimensions: int, directions: int) -> float:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 200, dimensions, directions, generator=generator, dtype=torch.float64)
    first, second = torch.linalg.qr(draws).Q.mT
    return float(principal_angles(first, second).mean())


def plot_phase_subspaces(result: PhaseSubspaces, subject: str = "") -> Any:
    """Angles within and between phases per layer, each head a dot, and the matrix of phases.

    Parameters
    ----------
    result : PhaseSubspaces
        What is drawn.
    subject : str
        Model and data, for the heading.
    """
    figure, axes = new_figure(
        f"Subspaces of the phases' queries ({result.frame}, k = {result.directions}, "
        f"{result.tokens} tokens each): do phases ask in different directions?",
        subject,
        1,
        2,
        (11, 4),
        width_ratios=[1.8, 1.0],
    )
    left, right = axes[0]
    layers = np.arange(len(result.angles))
    for values, color, name in (
        (result.between, ORANGE, "between two phases"),
        (result.within, BLUE, "within a phase (its two halves)"),
    ):
        left.plot(layers, values, ".", color=color, alpha=0.35, markersize=4)
        left.plot(layers, values.mean(1), color=color, label=name)
    left.axhline(result.random, color=GRAY, linestyle="--", label="random subspaces")
    left.set_ylim(0, 90)
    label_layers(left, "layer (dots: KV heads)")
    left.set_ylabel("mean principal angle, degrees\n(0: the same subspace)")
    left.legend(fontsize=8, loc="lower right")
    mean = result.angles.mean((0, 1))
    right.imshow(mean, cmap="Oranges", vmin=0, vmax=90)
    right.grid(visible=False)
    for row in range(len(mean)):
        for column in range(len(mean)):
            right.text(column, row, f"{mean[row, column]:.0f}°", ha="center", va="center")
    right.set_xticks(range(len(mean)), result.phases)
    right.set_yticks(range(len(mean)), result.phases)
    larger = (result.between > result.within).mean()
    right.set_title(
        f"mean over layers and heads\n(between > within in {larger:.0%} of them)",
        fontsize=9,
        color=GREEN if larger > 0.5 else "black",
    )
    return figure
