"""Offset shares and singular values against numpy, and on residuals that are known."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from phasekv.analysis import from_json, plot_residual_spectrum, residual_spectrum, to_json
from phasekv.analysis.residual_spectrum import ResidualSpectrum
from phasekv.analysis.reused_prompt import KINDS


def test_equals_numpy(measured, exact):
    result = residual_spectrum([measured], singular_values=5)
    assert result.kinds == KINDS
    assert result.layers.tolist() == [1, 2, 3]
    for row, kind in enumerate(KINDS):
        for layer in (1, 2, 3):
            before, after = [], []
            for note in range(3):
                matrix = exact.residuals(note, kind)[layer].reshape(len(exact.span(note)), -1)
                energy = (matrix**2).sum()
                mean = matrix.mean(0)
                share = len(matrix) * (mean**2).sum() / energy
                assert result.offset_share[row, layer - 1, note] == pytest.approx(share, rel=1e-3)
                for found, rows in ((before, matrix), (after, matrix - mean)):
                    squares = np.linalg.eigvalsh(rows.T @ rows)[::-1][:5]
                    found.append(np.sqrt(squares / energy))
            np.testing.assert_allclose(result.before[row, layer - 1], np.mean(before, 0), rtol=1e-3)
            np.testing.assert_allclose(result.after[row, layer - 1], np.mean(after, 0), rtol=1e-3)
    np.testing.assert_allclose(result.without_structure, [1 / 57, 1 / 96, 1 / 33])


def test_one_offset_is_all_there_is(measured):
    """Values that differ from fresh ones by one vector: a shift would repair them exactly."""
    (first, *_) = measured.chunks
    offset = torch.arange(64.0).view(2, 32) / 10
    shifted = replace(first, values=measured.values[:, first.begin : first.end] - offset)
    result = residual_spectrum([replace(measured, chunks=(shifted,))])
    assert result.offset_share[2] == pytest.approx(1, abs=1e-6)
    assert result.before[2, :, 0] == pytest.approx(1, abs=1e-6)
    assert result.before[2, :, 1:].max() < 1e-5
    assert result.after[2].max() < 1e-5


def test_json_and_figure(measured):
    result = residual_spectrum([measured])
    again = from_json(ResidualSpectrum, to_json(result))
    assert again.kinds == result.kinds
    np.testing.assert_allclose(again.before, result.before, rtol=1e-5)
    figure = plot_residual_spectrum(again, "a model, some notes")
    assert "a model, some notes" in figure.get_suptitle()
    for axes in figure.axes:
        assert axes.get_xlabel()
    figure.savefig(io.BytesIO(), format="png")
