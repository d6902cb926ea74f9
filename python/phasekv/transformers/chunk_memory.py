"""Notes that are encoded once and reused in later prompts, without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from phasekv import _core
from phasekv._core import Method
from phasekv.errors import InvalidArgumentError
from phasekv.memory.chunk import StoredChunk
from phasekv.memory.chunk_quantizer import ChunkQuantizer
from phasekv.memory.disk import DiskTier
from phasekv.memory.keys import ChunkKey, ModelIdentity, chunk_key, int32_tokens
from phasekv.memory.store import ChunkStore
from phasekv.memory.weights import identity_of_weights, weights_fingerprint
from phasekv.quantization import Quantization
from phasekv.reuse.cached_rows import CachedRows, CachedSegment
from phasekv.reuse.choice import MethodChoice, parse_choice
from phasekv.reuse.function_method import FunctionMethod
from phasekv.reuse.report import RequestReport
from phasekv.reuse.rotation import rope_on
from phasekv.reuse.step import Batch, ReuseStep
from phasekv.reuse.stream import wait_for
from phasekv.transformers.models import ModelShape, check_same_device, device_of, shape_of
from phasekv.transformers.paged_blocks import PagedBlocks
from phasekv.transformers.prefill_step import check_family, dynamic_cache, run_prompt
from phasekv.transformers.question_attention import QuestionAttention
from phasekv.transformers.rotation import rope_of_model

GIBIBYTE = 1 << 30
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Chunk:
    """A note's place in the store: its tokens and their key."""

    tokens: tuple[int, ...]
    key: ChunkKey


@dataclass(frozen=True)
class Prefill:
    """A prompt whose keys and values are there.

    Attributes
    ----------
    input_ids : torch.Tensor
        int64 [1, tokens].
    past_key_values : DynamicCache
        Of all tokens but the last, which ``generate`` runs.
    report : dict
        As vLLM's responses have it: chunks found and missed, tokens reused, probes, charged ratio.
    seconds : float
        Wall time of the prefill.
    """

    input_ids: torch.Tensor
    past_key_values: DynamicCache
    report: dict[str, object]
    seconds: float

    @property
    def inputs(self) -> dict[str, Any]:
        """For ``model.generate(**prefill.inputs)``, once: it extends the cache."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": torch.ones_like(self.input_ids),
            "past_key_values": self.past_key_values,
        }


class ChunkMemory:
    """A model's memory of encoded notes; on disk it is the one that vLLM's workers use.

    Parameters
    ----------
    model : transformers model
        A llama, mistral, qwen2, qwen3 or qwen3-moe model on the CPU or a CUDA device. Chunks are
        kept in the memory of the CPU.
    tokenizer : transformers tokenizer or None
        Its tokenizer; None where all parts are token ids.
    store_bytes : int
        Memory for chunks.
    directory : Path or str or None
        Where chunks are also kept on disk; None: only in memory.
    bits : int or None
        Chunks are quantised to so many bits, 2 or 4; None: they are kept exactly.

    Raises
    ------
    UnsupportedError
        For another model, or a rotary embedding that is not exactly as expected.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        store_bytes: int = GIBIBYTE,
        directory: Path | str | None = None,
        bits: int | None = None,
    ) -> None:
        quantization = None if bits is None else Quantization(bits)
        self._shape = shape_of(model)
        check_family(model)
        self._model = model
        self._tokenizer = tokenizer
        rope = rope_of_model(model, self._shape)
        self._rope = rope_on(rope, self._shape.device)
        self.identity = identity_of(model, self._shape).quantized(quantization)
        disk = None if directory is None else DiskTier(str(directory), self.identity, rank=0)
        quantizer = None
        if quantization is not None:  # of chunks, which are on the CPU
            quantizer = ChunkQuantizer(quantization, rope)
        self.store = ChunkStore(store_bytes, disk, quantizer=quantizer)

    @property
    def model(self) -> Any:
        """Whose memory it is."""
        return self._model

    @property
    def rope(self) -> _core.Rope:
        """The model's rotation, for keys where the model is."""
        return self._rope

    @torch.no_grad()
    def encode(
        self, note: str | Sequence[int], prefix: str | Sequence[int] = "", salt: str = ""
    ) -> Chunk:
        """Encode a note, unless it is stored already.

        Parameters
        ----------
        note : str or sequence of int
            Text, or token ids.
        prefix : str or sequence of int
            What the note is encoded after; it is dropped then. It gives the note an attention sink.
        salt : str
            Keeps those who do not share chunks apart (vLLM's ``cache_salt``).
        """
        self._check_device()
        tokens, before = self._tokens(note), self._tokens(prefix)
        if not tokens:
            raise InvalidArgumentError("note", repr(note), "at least one token")
        chunk = Chunk(tuple(tokens), chunk_key(self.identity, tokens, salt))
        if self.store.get(chunk.key) is not None:
            return chunk
        out = self._model.model(self._on_device([before + tokens]), use_cache=True)
        layers = out.past_key_values.layers
        keys, values = (
            torch.stack([getattr(layer, name)[0, :, len(before) :] for layer in layers])
            .transpose(1, 2)
            .contiguous()
            .cpu()
            for name in ("keys", "values")
        )
        stored = StoredChunk(chunk.key, int32_tokens(tokens), len(before), keys, values)
        self.store.put(stored)
        return chunk

    def prefill(
        self,
        parts: Sequence[str | Sequence[int] | Chunk],
        *,
        method: str = "agentkvshift",
        recompute_ratio: float = 0.1,
        **switches: Any,
    ) -> Prefill:
        """Fill a cache for a prompt of texts and chunks.

        Parameters
        ----------
        parts : sequence
            Texts (tokenized as they stand, without special tokens of the tokenizer's own), token
            ids, and chunks of this memory.
        method : str
            One of ``docs/reuse.md``.
        recompute_ratio : float
            r in [0, 1]: the share of a chunk's tokens that become probes.
        switches
            The method's own: ``frame``, ``weight``, ``probes``, ``boundary_tokens``, ``function``.

        Raises
        ------
        InvalidArgumentError
            For a bad method, ratio or switch, a prompt of less than two tokens, and one without a
            question for a method that looks at it.
        """
        settings = {"method": method, "ratio": recompute_ratio, **switches}
        choice = parse_choice(settings, MethodChoice())
        self._check_device()
        started = time.perf_counter()
        tokens, chunks = self.join(parts)
        if len(tokens) < 2:
            raise InvalidArgumentError("parts", f"{len(tokens)} tokens", "at least two tokens")
        blocks = PagedBlocks(
            self._shape.layers,
            self._shape.kv_heads,
            _BLOCK_SIZE,
            self._shape.head_size,
            self._shape.dtype,
            self._shape.device,
        )
        chosen = choice.build()
        table = self._on_device(blocks.allocate(-(-len(tokens) // _BLOCK_SIZE))).to(torch.int32)
        computed = len(tokens) - 1
        report = RequestReport(layers=self._shape.layers)
        segments = self._segments(chunks, computed, report)
        begin = 0
        attention: list[float] = []
        if chosen.needs_attention and segments:
            context = chunks[-1][0] + len(chunks[-1][1].tokens)
            attention, charged = self._question_attention(tokens, segments, context, blocks, table)
            # What stands before the chunks is exact now and does not run again.
            begin = segments[0].begin
            report.charged += charged
        batch = _batch_of(begin, computed, table)
        cached = []
        if segments and choice.method != "full_recompute":
            cached = [self._cached_rows(chosen, choice.ratio, segments, batch, attention)]
        step = ReuseStep(batch, cached, lambda squared: squared)
        run_prompt(self._model, self._on_device(tokens[begin:computed]), step, blocks)
        for rows in cached:
            report.cached_tokens += len(rows.rows)
            report.probes += int(rows.probe.sum())
            report.charged += step.charge(rows, self._shape.layers)
            report.failure = rows.failure
        input_ids = self._on_device([tokens])
        cache = dynamic_cache(blocks, _batch_of(0, computed, table).slots)
        wait_for(self._shape.device)
        seconds = time.perf_counter() - started
        return Prefill(input_ids, cache, report.as_response(choice), seconds)

    def join(
        self, parts: Sequence[str | Sequence[int] | Chunk]
    ) -> tuple[list[int], list[tuple[int, Chunk]]]:
        """The tokens of a prompt's parts, and where each of its chunks begins."""
        tokens: list[int] = []
        chunks: list[tuple[int, Chunk]] = []
        for part in parts:
            if isinstance(part, Chunk):
                chunks.append((len(tokens), part))
                tokens += part.tokens
            else:
                tokens += self._tokens(part)
        return tokens, chunks

    def _check_device(self) -> None:
        """The model may have been moved since."""
        check_same_device(device_of(self._model), self._shape.device)

    def _on_device(self, integers: Sequence[int] | Sequence[list[int]]) -> torch.Tensor:
        """int64."""
        return torch.tensor(integers, device=self._shape.device)

    def _tokens(self, part: str | Sequence[int]) -> list[int]:
        if isinstance(part, str):
            if not part:
                return []
            if self._tokenizer is None:
                raise InvalidArgumentError("tokenizer", "None", "one, where parts are texts")
            encoded: list[int] = self._tokenizer.encode(part, add_special_tokens=False)
            return encoded
        listed: list[int] = int32_tokens(part).tolist()
        known = self._model.get_input_embeddings().num_embeddings
        if listed and max(listed) >= known:
            raise InvalidArgumentError("tokens", str(max(listed)), f"below {known}, as the model's")
        return listed

    def _segments(
        self, chunks: list[tuple[int, Chunk]], computed: int, report: RequestReport
    ) -> list[CachedSegment]:
        """What of the chunks is stored and among the prompt's ``computed`` first tokens."""
        segments = []
        for begin, chunk in chunks:
            edges = (begin, begin + len(chunk.tokens))
            stored = self.store.get(chunk.key)
            if stored is None:
                report.missed[edges] = "not stored"
                continue
            report.found[edges] = chunk.key
            tokens = min(edges[1], computed) - begin
            if tokens > 0:
                segments.append(CachedSegment(stored, begin, tokens, 0, len(chunk.tokens)))
        return segments

    def _question_attention(
        self,
        tokens: list[int],
        segments: list[CachedSegment],
        context: int,
        blocks: PagedBlocks,
        table: torch.Tensor,
    ) -> tuple[list[float], int]:
        """Run all that is not cached over the moved chunks, before the prompt's own pass.

        Returns
        -------
        (list of float, int)
            For each cached token the attention that the question, all tokens from ``context`` on,
            pays to it; and the (layer, token) pairs that run again afterwards.
        """
        if context >= len(tokens):
            raise InvalidArgumentError("parts", "a chunk at the end", "a question after the chunks")
        batch = _batch_of(0, len(tokens), table)
        rows = self._cached_rows(Method("full_reuse"), 0.0, segments, batch, [])
        step = ReuseStep(batch, [rows], lambda squared: squared)
        question = QuestionAttention(step, context, self._shape.kv_heads)
        run_prompt(self._model, self._on_device(tokens), step, blocks, question)
        twice = int((step.entered >= segments[0].begin).sum())
        return question.mean[rows.rows].tolist(), self._shape.layers * twice

    def _cached_rows(
        self,
        method: Method | FunctionMethod,
        ratio: float,
        segments: list[CachedSegment],
        batch: Batch,
        attention: list[float],
    ) -> CachedRows:
        device = self._shape.device
        positions = torch.cat(
            [torch.arange(s.begin, s.begin + s.tokens, device=device) for s in segments]
        )
        rows = positions - batch.positions[0]
        slots = batch.slots[rows]
        return CachedRows("prompt", method, ratio, segments, rows, slots, self._rope, attention)


def identity_of(model: Any, shape: ModelShape) -> ModelIdentity:
    """The model, as everything that is kept of it is tagged; the same as in vLLM."""
    return identity_of_weights(
        weights_fingerprint(model.config._name_or_path, None, None),
        model.config.get_text_config(decoder=True),
        dtype=shape.dtype,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
    )


def _batch_of(begin: int, end: int, table: torch.Tensor) -> Batch:
    """Tokens [begin, end) of a prompt in the blocks of ``table``."""
    device = table.device
    positions = torch.arange(begin, end, device=device)
    return Batch(
        slots=table[positions // _BLOCK_SIZE].to(torch.int64) * _BLOCK_SIZE
        + positions % _BLOCK_SIZE,
        positions=positions,
        requests=torch.zeros(end - begin, dtype=torch.int32, device=device),
        block_table=table[None],
        first_held=torch.zeros(1, dtype=torch.int64, device=device),
    )
