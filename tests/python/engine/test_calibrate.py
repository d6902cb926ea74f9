"""Calibration measured in the engine, beside transformers in float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import load_model_in_float64, random_tokens

from commands import run_checked
from phasekv.calibration import load_calibration
from phasekv.errors import UnsupportedError
from phasekv.vllm.calibrate import QueryRecorder

pytestmark = pytest.mark.engine


@torch.no_grad()
def expected_means(folder, pieces):
    """Mean query and mean norm of each pair, layer and head; queries as they enter RoPE."""
    model = load_model_in_float64(folder)
    taken = [[] for _ in model.model.layers]

    def keep(index):
        return lambda module, args, output: taken[index].append(output.detach())

    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        getattr(attention, "q_norm", attention.q_proj).register_forward_hook(keep(index))
    for piece in pieces:
        model(torch.tensor([piece]))
    means, norms = [], []
    dim = model.config.head_dim
    for outputs in taken:
        shape = (-1, model.config.num_attention_heads, dim)
        rows = torch.cat([output.reshape(shape) for output in outputs])
        numbers = torch.complex(rows[..., : dim // 2], rows[..., dim // 2 :])
        means.append(torch.view_as_real(numbers.mean(0)))
        norms.append(numbers.abs().mean(0))
    return torch.stack(means), torch.stack(norms)


@pytest.mark.parametrize(
    ("family", "rope", "magnitude"),
    [
        ("llama", "default", 1.0),
        ("qwen3", "default", 1.0),
        ("qwen3_moe", "llama3", 1.0),
        ("qwen2", "yarn", 1.1386294),
    ],
)
def test_means_are_those_of_transformers(model_folder, tmp_path, family, rope, magnitude):
    folder, out, tokens = model_folder(family, rope), tmp_path / "out", random_tokens(230, 1)
    program = Path(__file__).with_name("measure_queries.py")
    run_checked(sys.executable, program, folder, out, json.dumps(tokens), "100")
    calibration = load_calibration(str(out))
    # The last piece is shorter.
    means, norms = expected_means(folder, [tokens[:100], tokens[100:200], tokens[200:]])
    assert calibration.tokens == 230
    assert calibration.identity.num_layers == len(means)
    assert calibration.magnitude == pytest.approx(magnitude)
    scale = float(norms.abs().max())
    torch.testing.assert_close(calibration.mean_query.double(), means, atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(calibration.mean_norm.double(), norms, atol=1e-5 * scale, rtol=0)
    assert calibration.frequencies[0] == pytest.approx(1.0)


def test_a_model_of_another_build_is_refused():
    with pytest.raises(UnsupportedError, match="Linear"):
        QueryRecorder(torch.nn.Linear(2, 2), 2)


@pytest.mark.slow
def test_the_command_measures_the_demo_model(demo_model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The harbour bridge opens at nine, and closes when the last boat is home. " * 9)
    out = tmp_path / "smollm2.safetensors"
    words = ["--max-tokens", "90", "--context", "40", "--dtype", "float32"]
    command = [sys.executable, "-m", "phasekv.cli", "calibrate", demo_model]
    said = run_checked(*command, "--text", text, "--out", out, *words)
    calibration = load_calibration(str(out))
    assert calibration.tokens == 90
    assert calibration.mean_query.shape == (30, 9, 32, 2)
    assert 0.0 < calibration.concentration < 1.0
    assert bool((calibration.mean_query.norm(dim=-1) <= calibration.mean_norm * 1.0001).all())
    assert "30 layers of 9 query heads" in said
