"""What a loaded model's chunks and sessions are tagged with, the same in every engine."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from phasekv.memory.keys import ModelIdentity
from phasekv.transformers_versions import declared_rotation


def identity_of_weights(
    weights: str,
    text_config: Any,
    *,
    dtype: Any,
    num_kv_heads: int,
    head_size: int,
    tensor_parallel_size: int = 1,
) -> ModelIdentity:
    """The identity of a model.

    Parameters
    ----------
    weights : str
        From ``weights_fingerprint``.
    text_config : transformers config
        Of the language model.
    dtype : torch.dtype
        Of the KV cache.
    num_kv_heads, head_size, tensor_parallel_size : int
        As in ``ModelIdentity``.
    """
    return ModelIdentity(
        model=weights,
        dtype=str(dtype).removeprefix("torch."),
        rope=json.dumps(declared_rotation(text_config), sort_keys=True, default=str),
        num_layers=text_config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        tensor_parallel_size=tensor_parallel_size,
    )


def weights_fingerprint(model: str, revision: str | None, quantization: str | None) -> str:
    """Name and revision; for a folder also its files' names, sizes and times of change.

    Parameters
    ----------
    model : str
        Name at the model hub, or a folder.
    revision, quantization : str or None
        What else the weights depend on.
    """
    digest = blake2b(digest_size=16)
    folder = Path(model)
    parts = [model, str(revision), str(quantization)]
    if folder.is_dir():
        parts[0] = os.path.realpath(folder)
        for file in sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")):
            status = file.stat()
            parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
        configuration = folder / "config.json"
        if configuration.exists():
            parts.append(configuration.read_text())
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "little"))
        digest.update(part.encode())
    return f"{model}@{digest.hexdigest()}"
