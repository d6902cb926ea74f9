"""Tiny random models of every supported family, saved as Hugging Face folders.

Weights are drawn wide (0.15 and more): with vLLM's dummy weights attention is uniform and an error
in the keys cannot be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 512
LAYERS = 4

COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}

ROPE_TYPES: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


def make_model(folder: Path, family: str, rope: str = "default", **changes: object) -> Path:
    """Save a tiny random model and return its folder.

    Parameters
    ----------
    folder : Path
        Is created.
    family : str
        Key of ``FAMILIES``, a transformers ``model_type``.
    rope : str
        Key of ``ROPE_TYPES``.
    **changes
        Further fields of its configuration.
    """
    declared = ROPE_TYPES[rope]
    scaling = {name: value for name, value in declared.items() if name != "rope_theta"}
    settings = {
        **COMMON,
        **FAMILIES[family],
        # As files of transformers 4 have it, which version 5 reads too.
        "rope_theta": declared["rope_theta"],
        "rope_scaling": None if rope == "default" else scaling,
        **changes,
    }
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def load_model_in_float64(folder: Path | str) -> Any:
    """The model, every expert of a mixture computed for itself, as transformers 4 does anyway."""
    named = {} if transformers.__version__.startswith("4.") else {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named)
    return model.double().eval()


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids that are not special, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
