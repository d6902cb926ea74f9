"""How close each reuse method stays to full recompute on LoCoMo, a benchmark of conversations.

Each question is asked over the notes that BM25 retrieves for it. Notes are turns of the
conversation in A-Mem's layout. They were encoded once, alone or after the prompts' common
beginning, which is then dropped. The gold answer is given token by token, and the next-token
distributions there are compared with those of full recompute: KL divergence, top-1 agreement, and
the answer's negative log-likelihood. F1 is that of a greedy answer of 24 tokens, at one ratio and
for one way of encoding, because a model this small answers too badly for it to tell methods apart.

Example: python benchmarks/fidelity.py --locomo locomo.json --questions 40 --json out.json

With ``--engine transformers`` the same runs without vLLM, also for the method prophetkv.

Only numbers are written: LoCoMo's text may not be distributed with this project.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from phasekv.evaluation.comparison import (
    AskedQuestion,
    Comparison,
    compare_settings,
    encode_notes,
)
from phasekv.evaluation.engine import FULL_RECOMPUTE, MemoryEngine, ReuseSetting
from phasekv.evaluation.locomo import load_locomo
from phasekv.evaluation.machine import describe_machine
from phasekv.evaluation.prompts import PromptBuilder
from phasekv.evaluation.question_choice import choose_questions
from phasekv.evaluation.transformers_engine import TransformersEngine
from phasekv.model_conversion import ensure_demo_model

METHODS = ("cacheblend", "epic", "agentkvshift", "phaseshift")
ENCODINGS = ("alone", "prefix")
# EPIC is a baseline for orientation; these of the ratios are enough.
EPIC_RATIOS = (0.1, 0.3)
PAIRS = (
    ("phaseshift", "agentkvshift"),
    ("phaseshift", "cacheblend"),
    ("agentkvshift", "cacheblend"),
)
ANSWER_TOKENS = 24


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locomo", type=Path, required=True, help="LoCoMo's JSON file")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--notes", type=int, default=8, help="retrieved notes per question")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3, 0.5])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--encode", nargs="+", choices=ENCODINGS, default=list(ENCODINGS))
    parser.add_argument("--answer-ratio", type=float, default=0.1, help="where F1 is measured")
    parser.add_argument(
        "--answer-encode", choices=ENCODINGS, default="prefix", help="where F1 is measured"
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    result = run(arguments)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All encodings, one after the other, in one engine."""
    begin = time.perf_counter()
    tasks = load_locomo(arguments.locomo)
    asked = choose_questions(tasks, arguments.questions, arguments.notes)
    model = arguments.model if arguments.model is not None else ensure_demo_model()
    in_transformers = arguments.engine == "transformers"
    engine = TransformersEngine(model) if in_transformers else MemoryEngine(model)
    builder = PromptBuilder(engine.tokenizer)
    settings = settings_of(arguments.methods, arguments.ratios)
    rows: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for encode in arguments.encode:
        answered = (
            [label for label in settings if settings[label].ratio in (0.0, arguments.answer_ratio)]
            if encode == arguments.answer_encode
            else []
        )
        comparison = compare(engine, builder, asked, settings, encode, answered)
        rows += [row_of(encode, label, settings[label], comparison) for label in settings]
        differences += differences_of(encode, settings, comparison)
    return {
        "machine": describe_machine(),
        "model": model.name,
        "engine": arguments.engine,
        "data": {
            "file": arguments.locomo.name,
            "conversations": len(tasks),
            "questions": len(asked),
            "retrieved_notes": arguments.notes,
            "evidence_recall": sum(question.evidence_recall for question in asked) / len(asked),
        },
        "seconds": time.perf_counter() - begin,
        "rows": rows,
        "differences": differences,
    }


def settings_of(methods: list[str], ratios: list[float]) -> dict[str, ReuseSetting]:
    """Every method at every ratio, and the two that have none, by label."""
    settings = {
        FULL_RECOMPUTE: ReuseSetting(FULL_RECOMPUTE),
        "full_reuse": ReuseSetting("full_reuse"),
    }
    for method in methods:
        for ratio in ratios if method != "epic" else sorted(set(ratios) & set(EPIC_RATIOS)):
            settings[f"{method}@{ratio}"] = ReuseSetting(method, ratio)
    return settings


def compare(
    engine: MemoryEngine | TransformersEngine,
    builder: PromptBuilder,
    asked: list[AskedQuestion],
    settings: dict[str, ReuseSetting],
    encode: str,
    answered: list[str],
) -> Comparison:
    """Encodes the notes, asks every question by every setting; ``answered`` get an F1."""
    notes = dict.fromkeys(note for question in asked for note in question.notes)
    begin = time.perf_counter()
    tokens = encode_notes(engine, builder, notes, encode)
    seconds = time.perf_counter() - begin
    print(f"{encode}: {len(notes)} notes encoded, {tokens} tokens in {seconds:.0f} s", flush=True)
    comparison = Comparison()
    for turn, question in enumerate(asked):
        comparison.add(
            compare_settings(
                engine,
                builder,
                question,
                settings,
                turn=turn,
                answer_tokens=dict.fromkeys(answered, ANSWER_TOKENS),
            )
        )
        seconds = time.perf_counter() - begin
        print(f"{encode}: question {turn + 1}/{len(asked)}, {seconds:.0f} s", flush=True)
    return comparison


def row_of(
    encode: str, label: str, setting: ReuseSetting, comparison: Comparison
) -> dict[str, Any]:
    """One setting's line of the JSON. Times are left out: ``prefill.py`` measures them."""
    summary = comparison.summary(label)
    del summary["first_token_seconds"]
    return {"encode": encode, "method": setting.method, "ratio": setting.ratio, **summary}


def differences_of(
    encode: str, settings: dict[str, ReuseSetting], comparison: Comparison
) -> list[dict[str, Any]]:
    """The methods against each other at equal ratios, question by question."""
    lines = []
    for first, second in PAIRS:
        for label, setting in settings.items():
            other = f"{second}@{setting.ratio}"
            if setting.method != first or other not in settings:
                continue
            lines.append(
                {
                    "encode": encode,
                    "first": first,
                    "second": second,
                    "ratio": setting.ratio,
                    **{
                        metric: comparison.difference(metric, label, other).as_dict()
                        for metric in ("kl", "nll", "top1")
                    },
                }
            )
    return lines


if __name__ == "__main__":
    main()
