"""What reuse would use in a prompt, beside what a full prefill computes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phasekv import _core
from phasekv.analysis.recording import record_attention
from phasekv.errors import InvalidArgumentError
from phasekv.reuse.step import CHECK_LAYER
from phasekv.transformers import Chunk, ChunkMemory
from phasekv.transformers.models import check_on_cpu, shape_of

KINDS = ("keys", "keys, unrotated", "values")
"""Of residuals: of keys as they are cached, after RoPE; of keys turned back by their own position
first; of values."""


@dataclass(frozen=True)
class ReusedChunk:
    """A chunk in a prompt.

    Attributes
    ----------
    begin, end : int
        Its tokens in the prompt.
    keys, values : torch.Tensor
        ``[layers, tokens, kv heads, head size]`` as they were stored, keys moved to ``begin``.
    """

    begin: int
    end: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class ReusedPrompt:
    """A prompt with chunks, prefilled in full.

    Attributes
    ----------
    queries : torch.Tensor
        ``[layers, tokens, query heads, head size]`` after RoPE.
    keys, values : torch.Tensor
        ``[layers, tokens, kv heads, head size]``, keys after RoPE.
    chunks : tuple of ReusedChunk
        In the prompt's order.
    scale : float
        What multiplies q.k before the softmax.
    rope : phasekv._core.Rope
        The model's rotation.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    chunks: tuple[ReusedChunk, ...]
    scale: float
    rope: _core.Rope

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.keys.shape[0]

    def residuals(self, chunk: ReusedChunk, layer: int, kind: str) -> torch.Tensor:
        """Fresh minus cached, float64 ``[tokens, kv heads, head size]``; ``kind`` is of `KINDS`."""
        rows = slice(chunk.begin, chunk.end)
        if kind == "values":
            return self.values[layer, rows].double() - chunk.values[layer].double()
        fresh, cached = self.keys[layer, rows], chunk.keys[layer]
        if kind == "keys, unrotated":
            back = -torch.arange(chunk.begin, chunk.end)
            fresh, cached = rotated(fresh, back, self.rope), rotated(cached, back, self.rope)
        return fresh.double() - cached.double()

    def divergences(self, chunk: ReusedChunk) -> tuple[list[float], list[float]]:
        """How far keys and values of each token are from fresh at the check layer."""
        found = []
        for kind in ("keys", "values"):
            residuals = self.residuals(chunk, CHECK_LAYER, kind)
            found.append(residuals.flatten(1).norm(dim=1).tolist())
        return found[0], found[1]

    def select(
        self, method: _core.Method, ratio: float
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each chunk the method's flags bool and weights float64, all ``[tokens]``.

        They are: gets its fresh key, its fresh value; share of the keys' mean residual that is
        added, and of the values'.
        """
        lengths = [chunk.end - chunk.begin for chunk in self.chunks]
        keys: list[float] = []
        values: list[float] = []
        if method.check_layer:
            for chunk in self.chunks:
                key, value = self.divergences(chunk)
                keys, values = keys + key, values + value
        chosen = method.select(
            segments=[(length, 0, length) for length in lengths],
            key_divergence=keys,
            value_divergence=values,
            ratio=ratio,
        )
        flags = [torch.tensor(one, dtype=torch.bool) for one in chosen[:2]]
        weights = [
            torch.tensor(one, dtype=torch.float64) if one else torch.zeros(sum(lengths)).double()
            for one in chosen[2:]
        ]
        parts = [one.split(lengths) for one in (*flags, *weights)]
        return list(zip(*parts, strict=True))


@torch.no_grad()
def measure_prompt(
    memory: ChunkMemory, parts: Sequence[str | Sequence[int] | Chunk]
) -> ReusedPrompt:
    """Prefill a prompt in full, and move its chunks to where they stand in it.

    Parameters
    ----------
    memory : ChunkMemory
        Where the chunks were encoded.
    parts : sequence
        Texts, token ids and chunks, as ``ChunkMemory.prefill`` takes them.

    Raises
    ------
    InvalidArgumentError
        Without a chunk, for a chunk that is not stored, and for a prompt that ends with a chunk:
        something has to ask.
    """
    shape = shape_of(memory.model)
    check_on_cpu(shape, "analyses run")
    tokens, placed = memory.join(parts)
    if not placed or placed[-1][0] + len(placed[-1][1].tokens) == len(tokens):
        raise InvalidArgumentError("parts", f"{len(placed)} chunks", "chunks and text after them")
    layers: dict[str, list[torch.Tensor]] = {"queries": [], "keys": [], "values": []}

    def layer(_: int, *tensors: torch.Tensor) -> None:
        for kept, tensor in zip(layers.values(), tensors, strict=True):
            kept.append(tensor.transpose(0, 1).contiguous())

    with record_attention(memory.model, layer):
        memory.model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
    chunks = []
    for begin, chunk in placed:
        stored = memory.store.get(chunk.key)
        if stored is None:
            raise InvalidArgumentError("parts", chunk.key, "chunks that this memory has encoded")
        count = len(chunk.tokens)
        deltas = torch.full((count,), begin - stored.position)
        if stored.quantization is not None:  # its keys have no rotation yet
            deltas = torch.arange(begin, begin + count)
        cached = [stored.rows(index, 0, count) for index in range(stored.keys.shape[0])]
        keys = torch.stack([rotated(rows, deltas, memory.rope) for rows, _ in cached])
        values = torch.stack([rows for _, rows in cached])
        chunks.append(ReusedChunk(begin, begin + count, keys, values))
    stacked = {name: torch.stack(kept) for name, kept in layers.items()}
    return ReusedPrompt(**stacked, chunks=tuple(chunks), scale=shape.scale, rope=memory.rope)


def rotated(rows: torch.Tensor, deltas: torch.Tensor, rope: _core.Rope) -> torch.Tensor:
    """Rows ``[tokens, heads, head size]`` moved by ``deltas`` positions, int64 ``[tokens]``."""
    out = torch.empty_like(rows)
    _core.rotate_keys(keys=rows, deltas=deltas, rope=rope, out=out)
    return out
