"""Answers the same questions by several reuse methods and compares them with full recompute."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.evaluation.answer_f1 import locomo_f1
from phasekv.evaluation.bootstrap import Estimate, bootstrap_mean, paired_difference
from phasekv.evaluation.divergence import (
    kl_divergence,
    negative_log_likelihood,
    top1_agreement,
)
from phasekv.evaluation.engine import FULL_RECOMPUTE, MemoryEngine, ReuseSetting
from phasekv.evaluation.memory_notes import MemoryNote, Question
from phasekv.evaluation.prompts import MemoryPrompt, PromptBuilder
from phasekv.evaluation.transformers_engine import TransformersEngine

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AskedQuestion:
    """A question with the notes that were retrieved for it, best first."""

    question: Question
    notes: tuple[MemoryNote, ...]

    @property
    def evidence_recall(self) -> float:
        """The share of the evidence among the retrieved notes; 1 if the question names none."""
        wanted = set(self.question.evidence)
        if not wanted:
            return 1.0
        return len(wanted & {note.id for note in self.notes}) / len(wanted)


@dataclass(frozen=True)
class Outcome:
    """What one setting did with one question.

    Attributes
    ----------
    kl, nll
        Per token of the gold answer, in nats: KL(full recompute ‖ setting) of the distribution
        that predicts it, and its negative log-likelihood.
    top1
        Per token: 1 where the most likely token is the one of full recompute, else 0.
    first_token_seconds
        Each time to first token that was measured.
    tokens_computed
        Rows computed, averaged over the layers.
    prompt_tokens
        Length of the prompt with the gold answer at its end.
    charged_ratio
        Recomputed share of the reused notes, over all layers; 1 for full recompute.
    answer, f1
        The generated answer and its LoCoMo score; None where none was asked for.
    """

    kl: Floats
    nll: Floats
    top1: Floats
    first_token_seconds: tuple[float, ...]
    tokens_computed: float
    prompt_tokens: int
    charged_ratio: float
    chunks_found: int
    chunks_missed: int
    answer: str | None = None
    f1: float | None = None


@dataclass
class Comparison:
    """The outcomes of several settings, by label, question by question."""

    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def add(self, row: Mapping[str, Outcome]) -> None:
        """Appends one question's outcomes."""
        for label, outcome in row.items():
            self.outcomes.setdefault(label, []).append(outcome)

    def summary(self, label: str) -> dict[str, Any]:
        """Means over the questions, with bootstrap intervals where they are compared."""
        rows = self.outcomes[label]
        answered = [row.f1 for row in rows if row.f1 is not None]
        return {
            "questions": len(rows),
            "positions": sum(row.kl.size for row in rows),
            "kl": bootstrap_mean([row.kl for row in rows]).as_dict(),
            "top1": bootstrap_mean([row.top1 for row in rows]).as_dict(),
            "nll": bootstrap_mean([row.nll for row in rows]).as_dict(),
            "f1": bootstrap_mean(answered).as_dict() if answered else None,
            "charged_ratio": statistics.fmean(row.charged_ratio for row in rows),
            "tokens_computed": statistics.fmean(row.tokens_computed for row in rows),
            "prompt_tokens": statistics.fmean(row.prompt_tokens for row in rows),
            "first_token_seconds": statistics.median(
                seconds for row in rows for seconds in row.first_token_seconds
            ),
            "chunks_found": sum(row.chunks_found for row in rows),
            "chunks_missed": sum(row.chunks_missed for row in rows),
        }

    def difference(self, metric: str, first: str, second: str) -> Estimate:
        """Mean of ``first`` minus ``second`` in ``kl``, ``nll`` or ``top1``, paired."""
        return paired_difference(
            [getattr(row, metric) for row in self.outcomes[first]],
            [getattr(row, metric) for row in self.outcomes[second]],
        )

    def speedup(self, label: str) -> float:
        """Median over the questions of full recompute's time to first token ÷ this setting's."""
        pairs = zip(self.outcomes[FULL_RECOMPUTE], self.outcomes[label], strict=True)
        return statistics.median(
            statistics.fmean(full.first_token_seconds) / statistics.fmean(own.first_token_seconds)
            for full, own in pairs
        )


def encode_notes(
    engine: MemoryEngine | TransformersEngine,
    builder: PromptBuilder,
    notes: Iterable[MemoryNote],
    encode: str,
) -> int:
    """Stores each note once; returns how many tokens that computed.

    ``encode`` is ``alone``, or ``prefix``: after the common beginning of all prompts, whose keys
    and values are dropped again.
    """
    prefix = builder.prefix if encode == "prefix" else []
    computed = 0
    for note in notes:
        tokens = builder.note(note)
        engine.store(tokens, prefix)
        computed += len(prefix) + len(tokens)
    return computed


def compare_settings(
    engine: MemoryEngine | TransformersEngine,
    builder: PromptBuilder,
    asked: AskedQuestion,
    settings: Mapping[str, ReuseSetting],
    *,
    turn: int,
    answer_tokens: Mapping[str, int],
) -> dict[str, Outcome]:
    """Runs every setting on one question.

    Parameters
    ----------
    settings
        By label; ``full_recompute`` must be one of them.
    turn
        Number of the question. The settings run in an order that turns with it, so that a drift
        of the machine's speed does not favour one of them.
    answer_tokens
        By label, the longest answer to generate; a label that is missing generates none.
    """
    prompt = builder.prompt(asked.notes, asked.question.question)
    gold = builder.tokens(asked.question.answer)
    labels = list(settings)
    shift = turn % len(labels)
    distributions: dict[str, Floats] = {}
    times: dict[str, list[float]] = {label: [] for label in labels}
    reports: dict[str, dict[str, Any] | None] = {}
    answers: dict[str, str] = {}
    for label in labels[shift:] + labels[:shift]:
        log_probs, reply = engine.score(prompt, gold, settings[label])
        distributions[label] = log_probs.numpy().astype(np.float64)
        times[label].append(reply.first_token_seconds)
        reports[label] = reply.report
        if label in answer_tokens:
            reply = engine.ask(prompt, settings[label], answer_tokens[label])
            times[label].append(reply.first_token_seconds)
            answers[label] = reply.text.strip()
    full = distributions[FULL_RECOMPUTE]
    forced = prompt.followed_by(gold)
    return {
        label: _outcome(
            asked.question,
            gold,
            full,
            distributions[label],
            times[label],
            forced,
            reports[label],
            answers.get(label),
        )
        for label in labels
    }


def _outcome(
    question: Question,
    gold: Sequence[int],
    full: Floats,
    own: Floats,
    times: Sequence[float],
    prompt: MemoryPrompt,
    report: Mapping[str, Any] | None,
    answer: str | None,
) -> Outcome:
    tokens = len(prompt.token_ids)
    charged = 1.0
    computed = float(tokens)
    if report is not None and report["tokens_found"]:
        charged = float(report["charged_ratio"])
        computed = tokens - (1.0 - charged) * report["tokens_found"]
    return Outcome(
        kl=kl_divergence(full, own),
        nll=negative_log_likelihood(own, gold),
        top1=top1_agreement(full, own).astype(np.float64),
        first_token_seconds=tuple(times),
        tokens_computed=computed,
        prompt_tokens=tokens,
        charged_ratio=charged,
        chunks_found=report["chunks_found"] if report is not None else 0,
        chunks_missed=report["chunks_missed"] if report is not None else 0,
        answer=answer,
        f1=None if answer is None else locomo_f1(answer, question.answer, question.category),
    )
