"""An agent with memory notes answers questions by every reuse method, side by side."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from phasekv.evaluation.comparison import (
    AskedQuestion,
    Comparison,
    Outcome,
    compare_settings,
    encode_notes,
)
from phasekv.evaluation.engine import FULL_RECOMPUTE, MemoryEngine, ReuseSetting
from phasekv.evaluation.locomo import load_locomo
from phasekv.evaluation.machine import describe_machine, machine_in_words
from phasekv.evaluation.memory_notes import MemoryTask, load_memory_notes
from phasekv.evaluation.prompts import PromptBuilder
from phasekv.evaluation.question_choice import choose_questions

METHODS = (FULL_RECOMPUTE, "full_reuse", "cacheblend", "agentkvshift", "phaseshift")
_ANSWER_WIDTH = 60


@dataclass(frozen=True)
class MemoryDemo:
    """The demo with its options.

    Attributes
    ----------
    model
        Folder of a Hugging Face model.
    locomo
        LoCoMo's file, or None for the sample notes written for this project.
    questions, notes
        How many questions, and how many retrieved notes each.
    ratio
        The recompute ratio r of every method that has one.
    encode
        ``prefix`` or ``alone``: what a note is encoded after.
    answer_tokens
        Longest answer, in tokens.
    output
        Folder that receives ``demo.json``, ``demo.png`` and ``report.html``.
    say
        Called with a line of progress at a time.
    """

    model: Path
    locomo: Path | None
    questions: int
    notes: int
    ratio: float
    encode: str
    answer_tokens: int
    output: Path
    say: Callable[[str], None] = print

    def run(self) -> dict[str, Any]:
        """Runs everything, writes the files and returns what ``demo.json`` holds."""
        begin = time.perf_counter()
        tasks = self._tasks()
        asked = choose_questions(tasks, self.questions, self.notes)
        self.say(f"starting the engine ({machine_in_words()})")
        engine = MemoryEngine(self.model)
        builder = PromptBuilder(engine.tokenizer)
        encoded = self._encode(engine, builder, tasks, asked)
        comparison = Comparison()
        rows = []
        settings = {method: ReuseSetting(method, self.ratio) for method in METHODS}
        self._warm_up(engine, builder, asked[0], settings)
        for turn, question in enumerate(asked):
            outcomes = compare_settings(
                engine,
                builder,
                question,
                settings,
                turn=turn,
                answer_tokens=dict.fromkeys(METHODS, self.answer_tokens),
            )
            comparison.add(outcomes)
            rows.append(question_row(question, outcomes))
            self._tell_question(turn, question, outcomes)
        result = {
            "machine": describe_machine(),
            "model": self.model.name,
            "data": self.locomo.name if self.locomo is not None else "sample notes",
            "retrieved_notes": self.notes,
            "ratio": self.ratio,
            "encode": self.encode,
            **encoded,
            "seconds": time.perf_counter() - begin,
            "methods": {
                method: {**comparison.summary(method), "speedup": comparison.speedup(method)}
                for method in METHODS
            },
            "questions": rows,
        }
        self._tell_summary(result)
        self._write(result)
        return result

    def _tasks(self) -> list[MemoryTask]:
        if self.locomo is not None:
            return load_locomo(self.locomo)
        with as_file(files("phasekv.demo").joinpath("memory_notes.json")) as sample:
            return [load_memory_notes(sample)]

    def _encode(
        self,
        engine: MemoryEngine,
        builder: PromptBuilder,
        tasks: Sequence[MemoryTask],
        asked: Sequence[AskedQuestion],
    ) -> dict[str, Any]:
        """Encodes each note that some question needs, once."""
        needed = dict.fromkeys(note for question in asked for note in question.notes)
        total = sum(len(task.notes) for task in tasks)
        self.say(f"encoding {len(needed)} of the agent's {total} notes, each one once")
        begin = time.perf_counter()
        tokens = encode_notes(engine, builder, needed, self.encode)
        seconds = time.perf_counter() - begin
        self.say(f"  {tokens} tokens in {seconds:.1f} s")
        return {
            "notes": total,
            "encoded_notes": len(needed),
            "encoded_tokens": tokens,
            "encode_seconds": seconds,
        }

    def _warm_up(
        self,
        engine: MemoryEngine,
        builder: PromptBuilder,
        asked: AskedQuestion,
        settings: dict[str, ReuseSetting],
    ) -> None:
        """One short prompt per setting, so that no first use is timed."""
        prompt = builder.prompt(asked.notes[:1], asked.question.question)
        for setting in settings.values():
            engine.ask(prompt, setting, 1)

    def _tell_question(self, turn: int, asked: AskedQuestion, outcomes: dict[str, Outcome]) -> None:
        self.say("")
        self.say(
            f"[{turn + 1}/{self.questions}] {asked.question.question}"
            f"  (gold: {asked.question.answer})"
        )
        for method, outcome in outcomes.items():
            seconds = sum(outcome.first_token_seconds) / len(outcome.first_token_seconds)
            answer = textwrap.shorten(outcome.answer or "", _ANSWER_WIDTH, placeholder="…")
            self.say(
                f"  {method:<15} {seconds:6.2f} s {outcome.tokens_computed:6.0f} tokens  "
                f"KL {outcome.kl.mean():6.3f}  top-1 {outcome.top1.mean():4.0%}  {answer}"
            )

    def _tell_summary(self, result: dict[str, Any]) -> None:
        self.say("")
        self.say(summary_table(result))

    def _write(self, result: dict[str, Any]) -> None:
        from phasekv.demo.figure_files import save_png
        from phasekv.demo.memory_plot import memory_demo_figure
        from phasekv.demo.report import write_report

        self.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (self.output / "demo.json").write_text(text, encoding="utf-8")
        save_png(memory_demo_figure(result), self.output / "demo.png")
        write_report(self.output)
        self.say(f"wrote {self.output / 'demo.json'}, demo.png and report.html")


def question_row(asked: AskedQuestion, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """One question for ``demo.json``."""
    return {
        "question": asked.question.question,
        "gold": asked.question.answer,
        "category": asked.question.category,
        "notes": [note.id for note in asked.notes],
        "evidence_recall": asked.evidence_recall,
        "methods": {
            method: {
                "answer": outcome.answer,
                "f1": outcome.f1,
                "first_token_seconds": list(outcome.first_token_seconds),
                "tokens_computed": outcome.tokens_computed,
                "prompt_tokens": outcome.prompt_tokens,
                "charged_ratio": outcome.charged_ratio,
                "kl": outcome.kl.tolist(),
                "top1": outcome.top1.tolist(),
                "nll": outcome.nll.tolist(),
                "chunks_found": outcome.chunks_found,
                "chunks_missed": outcome.chunks_missed,
            }
            for method, outcome in outcomes.items()
        },
    }


def summary_table(result: dict[str, Any]) -> str:
    """The means per method as a text table."""
    lines = [
        f"{'method':<15} {'first token':>11} {'speedup':>8} {'tokens':>7} {'charged':>8} "
        f"{'KL [95 %]':>20} {'top-1':>6} {'NLL':>6} {'F1':>5}"
    ]
    for method, row in result["methods"].items():
        kl = row["kl"]
        lines.append(
            f"{method:<15} {row['first_token_seconds']:9.2f} s {row['speedup']:7.2f}x "
            f"{row['tokens_computed']:7.0f} {row['charged_ratio']:8.3f} "
            f"{kl['mean']:6.3f} [{kl['low']:.3f}, {kl['high']:.3f}] "
            f"{row['top1']['mean']:6.0%} {row['nll']['mean']:6.2f} {row['f1']['mean']:5.2f}"
        )
    lines.append(
        "First token: median. Speedup: over full recompute, median over the questions. Tokens: "
        "rows computed, mean over the layers.\n"
        "Charged: recomputed share of the reused notes. KL, top-1: against full recompute, where "
        "the gold answer is given. NLL: of the gold answer."
    )
    return "\n".join(lines)
