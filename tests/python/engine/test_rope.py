"""Our rotation against vLLM's own rotary modules, and the refusal of what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phasekv import UnsupportedError

HEAD_SIZE = 64
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
}


@pytest.fixture(autouse=True, scope="module")
def engine_configuration():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def module_of(parameters, neox=True, fraction=1.0, dtype=torch.float32):
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {**parameters, "partial_rotary_factor": fraction}
    return get_rope(HEAD_SIZE, 131072, neox, parameters, dtype)


def rope_from(parameters, module):
    from phasekv.reuse.rotation import rope_of
    from phasekv.vllm.rope import rope_parameters_of

    config = SimpleNamespace(rope_parameters=parameters)
    return rope_of(rope_parameters_of(config, module))


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_rotation_is_the_models(kind, neox, fraction, dtype):
    from phasekv.vllm.rope import check_rope

    module = module_of(ROPES[kind], neox, fraction, dtype)
    check_rope(rope_from(ROPES[kind], module), module, HEAD_SIZE, dtype)


@pytest.mark.parametrize(
    ("kind", "declared", "attributes"),
    [
        ("default", {}, {"base": 10000.0}),
        ("default", {}, {"rotary_dim": 32}),
        ("default", {}, {"is_neox_style": False}),
        ("linear", {"factor": 2.0}, {}),
        ("llama3", {"factor": 8.0}, {}),
        ("llama3", {"rope_type": "default"}, {}),
        ("yarn", {"original_max_position_embeddings": 4096}, {}),
    ],
    ids=str,
)
def test_a_wrong_declaration_is_refused(kind, declared, attributes):
    """LMCache#4666, VeloxQuant-MLX#148: wrong RoPE parameters garble keys without a sign."""
    from phasekv.vllm.rope import check_rope

    module = module_of(ROPES[kind])
    seen = SimpleNamespace(
        base=module.base, rotary_dim=module.rotary_dim, is_neox_style=module.is_neox_style
    )
    for name, value in attributes.items():
        setattr(seen, name, value)
    rope = rope_from({**ROPES[kind], **declared}, seen)
    with pytest.raises(UnsupportedError, match="rope"):
        check_rope(rope, module, HEAD_SIZE, torch.float32)


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope"),
        ({"rope_type": "longrope"}, "longrope"),
    ],
    ids=str,
)
def test_other_types_are_refused_by_name(parameters, name):
    from phasekv.vllm.rope import rope_parameters_of

    with pytest.raises(UnsupportedError, match=name):
        rope_parameters_of(SimpleNamespace(rope_parameters=parameters), None)
