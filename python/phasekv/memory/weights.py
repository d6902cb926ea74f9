"""Tells one model's weights from another's without reading them."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path


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
