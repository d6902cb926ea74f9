"""Divergence and probes by position against numpy."""

import io

import numpy as np

from phasekv.analysis import divergence_by_position, plot_divergence_by_position
from phasekv.methods import Method


def test_equals_numpy(measured, exact):
    methods = {"head": Method("epic", boundary_tokens=2), "shift": Method("agentkvshift")}
    result = divergence_by_position([measured, measured], methods, 0.25)
    assert result.key.shape == result.value.shape == (96, 6)
    taken = np.zeros((2, 96))
    chunks = np.zeros(96)
    for note, length in enumerate((57, 96, 33)):
        chunks[:length] += 1
        taken[0, :2] += 1
        chosen = set()
        for kind, found in (("keys", result.key), ("values", result.value)):
            distance = np.linalg.norm(exact.residuals(note, kind)[1].reshape(length, -1), axis=1)
            for column in (note, note + 3):
                np.testing.assert_allclose(
                    found[:length, column], distance / distance.mean(), rtol=1e-3
                )
                assert np.isnan(found[length:, column]).all()
            chosen |= set(np.argsort(-distance)[: int(np.ceil(0.25 * length))])
        taken[1, list(chosen)] += 1
    assert result.methods == ("head", "shift")
    np.testing.assert_allclose(result.probes, taken / chunks)


def test_figure(measured):
    result = divergence_by_position([measured], {"epic": Method("epic")}, 0.1)
    figure = plot_divergence_by_position(result, "a model")
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["epic"]
    figure.savefig(io.BytesIO(), format="png")
