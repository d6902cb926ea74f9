"""Does the shift absorb what quantising the notes' keys and values changes? Measured on LoCoMo.

The questions, notes, prompts and measures of ``fidelity.py``; notes are kept exactly, in 4 bits and
in 2 bits (KIVI, groups of 32), and reused by each method at one recompute ratio. One model holds a
memory for each precision. A note is encoded once, after the prompts' common beginning, and what the
quantised memories hold is that very encoding, so that the methods differ in nothing else.

Beside it: the error of quantised keys, relative to the keys' own size, turned back to position 0
first, as the store does it, and as they were cached, rotated to their position.

Example: python benchmarks/quantized_fidelity.py --locomo locomo.json --json out.json

Only numbers are written: LoCoMo's text may not be distributed with this project.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from phasekv import _core
from phasekv.evaluation.comparison import Comparison, compare_settings, encode_notes
from phasekv.evaluation.engine import FULL_RECOMPUTE, Reply, ReuseSetting
from phasekv.evaluation.locomo import load_locomo
from phasekv.evaluation.machine import describe_machine
from phasekv.evaluation.prompts import MemoryPrompt, PromptBuilder
from phasekv.evaluation.question_choice import choose_questions
from phasekv.memory.keys import chunk_key
from phasekv.model_conversion import ensure_demo_model
from phasekv.quantization import Quantization, QuantizedRows
from phasekv.transformers import Chunk, ChunkMemory, Prefill

METHODS = ("full_reuse", "cacheblend", "agentkvshift", "phaseshift")
PAIRS = (("agentkvshift", "cacheblend"), ("phaseshift", "cacheblend"))
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class QuantizedSetting(ReuseSetting):
    """A method over notes of one precision; ``bits`` None: exact ones."""

    bits: int | None = None


class NoteMemories:
    """A model with a memory of the same notes for each precision; answers as ``MemoryEngine``."""

    def __init__(self, folder: Path, precisions: Sequence[int | None]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.memories = {
            bits: ChunkMemory(self._model, self.tokenizer, bits=bits)
            for bits in (None, *precisions)
        }
        self._chunks: dict[tuple[int, ...], dict[int | None, Chunk]] = {}
        self._prefilled: tuple[object, Prefill] | None = None

    def store(self, chunk: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """Encode once, and put the same keys and values into every memory."""
        exact = self.memories[None].encode(chunk, prefix)
        stored = self.memories[None].store.get(exact.key)
        assert stored is not None
        kept: dict[int | None, Chunk] = {None: exact}
        for bits, memory in self.memories.items():
            if bits is None:
                continue
            key = chunk_key(memory.identity, exact.tokens)
            memory.store.put(replace(stored, key=key))
            kept[bits] = Chunk(exact.tokens, key)
        self._chunks[exact.tokens] = kept

    def score(
        self, prompt: MemoryPrompt, answer: Sequence[int], setting: QuantizedSetting
    ) -> tuple[torch.Tensor, Reply]:
        """Log-probabilities that predict each token of the answer, float32 [answer, vocabulary]."""
        prefill = self._prefill(prompt, setting)
        given = torch.tensor([[prompt.token_ids[-1], *answer[:-1]]])
        with torch.no_grad():
            out = self._model(given, past_key_values=copy.deepcopy(prefill.past_key_values))
        return out.logits[0].log_softmax(-1), self._reply("", prefill, setting)

    def ask(self, prompt: MemoryPrompt, setting: QuantizedSetting, max_tokens: int) -> Reply:
        """Greedy answer of at most ``max_tokens`` tokens."""
        prefill = self._prefill(prompt, setting)
        inputs = {**prefill.inputs, "past_key_values": copy.deepcopy(prefill.past_key_values)}
        answer = self._model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        text = self.tokenizer.decode(answer[0, len(prompt.token_ids) :], skip_special_tokens=True)
        return self._reply(text, prefill, setting)

    def _reply(self, text: str, prefill: Prefill, setting: QuantizedSetting) -> Reply:
        return Reply(text, prefill.seconds, prefill.report if setting.reuses else None)

    def _prefill(self, prompt: MemoryPrompt, setting: QuantizedSetting) -> Prefill:
        """The last one again where it is the same: a question is scored and then asked."""
        wanted = (prompt.token_ids, setting.method, setting.ratio, setting.bits)
        if self._prefilled is None or self._prefilled[0] != wanted:
            parts: list[Sequence[int] | Chunk] = []
            at = 0
            for begin, end in prompt.chunks if setting.reuses else []:
                chunk = self._chunks[tuple(prompt.token_ids[begin:end])][setting.bits]
                parts += [prompt.token_ids[at:begin], chunk]
                at = end
            prefill = self.memories[setting.bits].prefill(
                [*parts, prompt.token_ids[at:]],
                method=setting.method,
                recompute_ratio=setting.ratio,
            )
            self._prefilled = (wanted, prefill)
        return self._prefilled[1]


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locomo", type=Path, required=True, help="LoCoMo's JSON file")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--notes", type=int, default=8, help="retrieved notes per question")
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--bits", type=int, nargs="+", choices=(2, 4), default=[4, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    result = run(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All questions by all methods over all precisions."""
    begin = time.perf_counter()
    tasks = load_locomo(arguments.locomo)
    asked = choose_questions(tasks, arguments.questions, arguments.notes)
    folder = arguments.model if arguments.model is not None else ensure_demo_model()
    engine = NoteMemories(folder, arguments.bits)
    builder = PromptBuilder(engine.tokenizer)
    notes = dict.fromkeys(note for question in asked for note in question.notes)
    tokens = encode_notes(engine, builder, notes, "prefix")  # type: ignore[arg-type]
    print(f"{len(notes)} notes, {tokens} tokens, {time.perf_counter() - begin:.0f} s", flush=True)
    settings = settings_of(arguments.methods, arguments.ratio, [None, *arguments.bits])
    comparison = Comparison()
    for turn, question in enumerate(asked):
        comparison.add(
            compare_settings(
                engine,  # type: ignore[arg-type]
                builder,
                question,
                settings,
                turn=turn,
                answer_tokens=dict.fromkeys(settings, ANSWER_TOKENS),
            )
        )
        seconds = time.perf_counter() - begin
        print(f"question {turn + 1}/{len(asked)}, {seconds:.0f} s", flush=True)
    return {
        "machine": describe_machine(),
        "model": folder.name,
        "data": {
            "file": arguments.locomo.name,
            "questions": len(asked),
            "retrieved_notes": arguments.notes,
            "notes": len(notes),
        },
        "seconds": time.perf_counter() - begin,
        "stores": [store_of(bits, memory) for bits, memory in engine.memories.items()],
        "key_errors": [key_errors(engine.memories[None], bits) for bits in arguments.bits],
        "rows": [row_of(label, setting, comparison) for label, setting in settings.items()],
        "differences": differences_of(settings, comparison),
    }


def settings_of(
    methods: Sequence[str], ratio: float, precisions: Sequence[int | None]
) -> dict[str, QuantizedSetting]:
    """Every method over every precision, and full recompute, by label."""
    settings = {FULL_RECOMPUTE: QuantizedSetting(FULL_RECOMPUTE)}
    for method in methods:
        for bits in precisions:
            r = 0.0 if method == "full_reuse" else ratio
            settings[label_of(method, bits)] = QuantizedSetting(method, r, bits=bits)
    return settings


def label_of(method: str, bits: int | None) -> str:
    """Of a setting."""
    return f"{method}, {'exact' if bits is None else f'{bits} bits'}"


def store_of(bits: int | None, memory: ChunkMemory) -> dict[str, Any]:
    """Measured bytes of a memory, beside what the formula says of its keys and values alone."""
    shape, chunks = memory.identity, memory.store.statistics()
    tokens = sum(len(chunk.tokens) for chunk in chunks_of(memory))
    elements = 2 * tokens * shape.num_layers * shape.num_kv_heads * shape.head_size
    per_element = 32 if bits is None else Quantization(bits).bits_per_element
    return {
        "bits": bits,
        "chunks": chunks.chunks,
        "tokens": tokens,
        "bytes": chunks.bytes,
        "bytes_by_formula": elements * per_element / 8,
    }


def chunks_of(memory: ChunkMemory) -> list[Any]:
    """All chunks in memory, as the store keeps them."""
    return list(memory.store._chunks.values())


def key_errors(memory: ChunkMemory, bits: int) -> dict[str, Any]:
    """RMS error of quantised keys over their RMS, as cached and turned back to position 0."""
    squares = {"cached": 0.0, "unrotated": 0.0, "keys": 0.0}
    for chunk in chunks_of(memory):
        positions = torch.arange(chunk.position, chunk.position + len(chunk.tokens))
        for keys in chunk.keys:
            turned = torch.empty_like(keys)
            _core.rotate_keys(keys=keys, deltas=-positions, rope=memory.rope, out=turned)
            squares["keys"] += float(keys.double().square().sum())
            for name, rows in (("cached", keys), ("unrotated", turned)):
                kept = torch.empty_like(rows)
                QuantizedRows.of(rows, Quantization(bits), "tokens").read(0, kept)
                squares[name] += float((kept - rows).double().square().sum())
    return {
        "bits": bits,
        **{name: (squares[name] / squares["keys"]) ** 0.5 for name in ("cached", "unrotated")},
    }


def row_of(label: str, setting: QuantizedSetting, comparison: Comparison) -> dict[str, Any]:
    """One setting's line of the JSON. Times are left out: they are not what this is about."""
    summary = comparison.summary(label)
    del summary["first_token_seconds"]
    return {"method": setting.method, "bits": setting.bits, "ratio": setting.ratio, **summary}


def differences_of(
    settings: dict[str, QuantizedSetting], comparison: Comparison
) -> list[dict[str, Any]]:
    """Each method quantised minus exact, and methods against each other, question by question."""
    pairs = [
        (label, label_of(setting.method, None))
        for label, setting in settings.items()
        if setting.bits is not None
    ]
    for first, second in PAIRS:
        pairs += [
            (label, label_of(second, setting.bits))
            for label, setting in settings.items()
            if setting.method == first and label_of(second, setting.bits) in settings
        ]
    return [
        {
            "first": first,
            "second": second,
            **{
                metric: comparison.difference(metric, first, second).as_dict()
                for metric in ("kl", "nll", "top1")
            },
        }
        for first, second in pairs
    ]


if __name__ == "__main__":
    main()
