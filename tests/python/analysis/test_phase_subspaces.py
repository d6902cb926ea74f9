"""Principal angles against numpy's SVD on the reference's queries, and on planes that are known."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import random_tokens

from phasekv.analysis import phase_subspaces, plot_phase_subspaces
from phasekv.analysis.phase_subspaces import principal_angles
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.trajectories import LabelledTokens
from phasekv.phases import phase_names

COUNT, DIRECTIONS = 240, 3


@pytest.fixture(scope="module")
def labelled():
    """Phases 0, 1 and 3 in turns of unequal length, with a marker at each change."""
    order = np.arange(COUNT)
    phases = np.array([0, 0, 1, 3, 3, 3])[order // 8 % 6].astype(np.uint8)
    return LabelledTokens(np.array(random_tokens(COUNT, 7), np.int32), phases, order % 8 == 0)


def test_known_planes():
    angle = np.deg2rad([20.0, 65.0])
    axes = torch.eye(4, dtype=torch.float64)
    first = axes[:2]
    second = torch.stack(
        [
            np.cos(angle[0]) * axes[0] + np.sin(angle[0]) * axes[2],
            np.cos(angle[1]) * axes[1] + np.sin(angle[1]) * axes[3],
        ]
    )
    assert principal_angles(first, second).tolist() == pytest.approx([20, 65])
    assert principal_angles(first, first).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert principal_angles(first, axes[2:]).tolist() == pytest.approx([90, 90])


@pytest.mark.parametrize("frame", ["rotated", "unrotated"])
def test_equals_numpy(tiny_model, exact_queries, exact, labelled, frame):
    result = phase_subspaces(tiny_model, labelled, directions=DIRECTIONS, frame=frame)
    names = phase_names()
    assert result.phases == (names[0], names[1], names[3])
    queries = exact_queries(labelled.tokens.tolist())
    if frame == "rotated":
        queries = exact.rotate(queries, np.arange(COUNT))
    spans = {}
    for phase in (0, 1, 3):
        own = np.flatnonzero((labelled.phases == phase) & ~labelled.is_marker)
        middle = -(-len(own) // 2)
        spans[phase] = (own[:middle], own[middle:])
    count = min(len(half) for pair in spans.values() for half in pair)
    assert result.tokens == count == 17

    def basis(layer, head, half):
        thinned = half[[i * len(half) // count for i in range(count)]]
        matrix = queries[layer, thinned, 2 * head : 2 * head + 2].reshape(-1, 32)
        return np.linalg.svd(matrix, full_matrices=False)[2][:DIRECTIONS]

    for layer in range(4):
        for head in range(2):
            for row, one in enumerate((0, 1, 3)):
                for column, other in enumerate((0, 1, 3)):
                    angles = []
                    for i, first in enumerate(spans[one]):
                        for j, second in enumerate(spans[other]):
                            if one == other and i >= j:
                                continue
                            product = basis(layer, head, first) @ basis(layer, head, second).T
                            cosines = np.linalg.svd(product)[1].clip(max=1)
                            angles.append(np.rad2deg(np.arccos(cosines)).mean())
                    found = result.angles[layer, head, row, column]
                    assert found == pytest.approx(np.mean(angles), abs=0.05)
    assert result.within.shape == result.between.shape == (4, 2)
    assert result.within[1, 1] == pytest.approx(np.trace(result.angles[1, 1]) / 3)
    others = result.angles[1, 1].sum() - np.trace(result.angles[1, 1])
    assert result.between[1, 1] == pytest.approx(others / 6)
    assert 60 < result.random < 90


def test_figure_and_refusals(tiny_model, labelled):
    result = phase_subspaces(tiny_model, labelled)
    figure = plot_phase_subspaces(result, "a model")
    assert "degrees" in figure.axes[0].get_ylabel()
    figure.savefig(io.BytesIO(), format="png")
    with pytest.raises(InvalidArgumentError, match="frame"):
        phase_subspaces(tiny_model, labelled, frame="sideways")
    one_phase = replace(labelled, phases=np.zeros(COUNT, np.uint8))
    with pytest.raises(InvalidArgumentError, match="phases"):
        phase_subspaces(tiny_model, one_phase)
    for directions in (0, 33):
        with pytest.raises(InvalidArgumentError, match="directions"):
            phase_subspaces(tiny_model, labelled, directions=directions)
