"""What ``phasekv calibrate`` measures of a model's queries, for the policy triattention.

TriAttention (arXiv 2604.04921) scores keys by a model's mean query before RoPE, taken from a text
of any kind. The file is a safetensors file that says which model it belongs to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from phasekv import _core
from phasekv.errors import InvalidArgumentError
from phasekv.memory.keys import ModelIdentity

FORMAT = "phasekv calibration"
VERSION = 1
"""Changes whenever a file's meaning does; files of another version are refused."""

_TENSORS = ("mean_query", "mean_norm", "frequencies")
# Statistics do not depend on how the cache is stored or spread over ranks.
_COMPARED = ("rope", "num_layers", "num_kv_heads", "head_size")


@dataclass(frozen=True)
class Calibration:
    """Statistics of one model's queries before RoPE, whose dimensions are taken in pairs.

    Parameters
    ----------
    identity : ModelIdentity
        The model they were measured on.
    pairing : str
        "neox" or "interleaved": which dimensions RoPE turns together.
    magnitude : float
        Amplitude that RoPE gives to keys (YaRN); 1 otherwise.
    tokens : int
        How many were measured.
    mean_query : torch.Tensor
        float32 [layers, query heads, pairs, 2]: mean of each pair, as (real, imaginary).
    mean_norm : torch.Tensor
        float32 [layers, query heads, pairs]: mean of each pair's norm.
    frequencies : torch.Tensor
        float64 [pairs]: of RoPE, in radians per position.
    """

    identity: ModelIdentity
    pairing: str
    magnitude: float
    tokens: int
    mean_query: torch.Tensor
    mean_norm: torch.Tensor
    frequencies: torch.Tensor

    @property
    def query_heads(self) -> int:
        """Query heads that it covers."""
        return int(self.mean_query.shape[1])

    @property
    def concentration(self) -> float:
        """How far queries agree with their mean: mean of abs(mean query) / mean norm, in [0, 1]."""
        lengths = self.mean_query.norm(dim=-1)
        return float((lengths / self.mean_norm.clamp(min=1e-12)).mean())

    @cached_property
    def statistics(self) -> _core.TriattentionStatistics:
        """What the policy takes."""
        rope = _core.Rope(self.frequencies.tolist(), 2 * len(self.frequencies), self.pairing)
        return _core.TriattentionStatistics(
            model=self.identity.model,
            rope=rope,
            magnitude=self.magnitude,
            mean_query=self.mean_query.contiguous(),
            mean_norm=self.mean_norm.contiguous(),
        )

    def of_heads(self, begin: int, end: int) -> Calibration:
        """The query heads [begin, end), which one rank of several holds."""
        return replace(
            self,
            mean_query=self.mean_query[:, begin:end].contiguous(),
            mean_norm=self.mean_norm[:, begin:end].contiguous(),
        )

    def check_model(self, identity: ModelIdentity, query_heads: int) -> None:
        """Raise ``InvalidArgumentError`` unless it was measured on this very model."""
        # The name before the fingerprint may be another path of the same folder.
        if _fingerprint(self.identity.model) != _fingerprint(identity.model):
            raise InvalidArgumentError(
                "calibration.model", self.identity.model, f"the engine's model, {identity.model}"
            )
        for name in _COMPARED:
            mine, expected = getattr(self.identity, name), getattr(identity, name)
            if mine != expected:
                raise InvalidArgumentError(
                    f"calibration.{name}", str(mine), f"the engine's, {expected}"
                )
        if self.query_heads != query_heads:
            raise InvalidArgumentError(
                "calibration.query_heads", str(self.query_heads), f"the engine's, {query_heads}"
            )

    def save(self, path: Path) -> None:
        """Write the file; one that is there is replaced in one step."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "identity": json.dumps(asdict(self.identity)),
            "pairing": self.pairing,
            "magnitude": repr(self.magnitude),
            "tokens": str(self.tokens),
        }
        metadata["digest"] = _digest(tensors, metadata)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata=metadata)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def load_calibration(path: str) -> Calibration:
    """Read a file of ``phasekv calibrate``; an unchanged one is read once.

    Raises
    ------
    InvalidArgumentError
        If it is missing, damaged, of another version or no such file: the error names the field.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise InvalidArgumentError(
            "calibration", path, f"a file of `phasekv calibrate` ({error.strerror})"
        ) from error
    return _load(path, status.st_mtime_ns, status.st_size)


def load_statistics(path: str) -> _core.TriattentionStatistics:
    """What the policy takes of a file, for all query heads; errors as in ``load_calibration``."""
    return load_calibration(path).statistics


@lru_cache(maxsize=4)
def _load(path: str, time_of_change: int, size: int) -> Calibration:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InvalidArgumentError(
                    "calibration.format", repr(metadata.get("format")), repr(FORMAT)
                )
            if metadata.get("version") != str(VERSION):
                raise InvalidArgumentError(
                    "calibration.version", repr(metadata.get("version")), repr(str(VERSION))
                )
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(
            "calibration", path, f"a whole file of `phasekv calibrate` ({error})"
        ) from error
    if metadata.get("digest") != _digest(tensors, metadata):
        raise InvalidArgumentError(
            "calibration.digest", repr(metadata.get("digest")), "the digest of the file's content"
        )
    return Calibration(
        identity=ModelIdentity(**json.loads(metadata["identity"])),
        pairing=metadata["pairing"],
        magnitude=float(metadata["magnitude"]),
        tokens=int(metadata["tokens"]),
        **tensors,
    )


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Of everything that was written; what was damaged afterwards has another one."""
    digest = blake2b(digest_size=16)
    for name, value in sorted(metadata.items()):
        if name != "digest":
            _add(digest, name.encode())
            _add(digest, value.encode())
    for name in _TENSORS:
        tensor = tensors[name]
        _add(digest, f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        _add(digest, tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _fingerprint(model: str) -> str:
    return model.rpartition("@")[2]
