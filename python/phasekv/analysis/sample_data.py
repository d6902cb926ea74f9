"""Prompts and trajectories to analyse: the demos' own, or a user's files."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from phasekv.analysis.progress import progress
from phasekv.analysis.reused_prompt import ReusedPrompt, measure_prompt
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.memory_notes import MemoryTask, load_memory_notes
from phasekv.evaluation.prompts import PromptBuilder
from phasekv.evaluation.trajectories import (
    LabelledTokens,
    Trajectory,
    label_trajectory,
    load_trajectories,
)
from phasekv.phases import token_vocabulary
from phasekv.transformers import ChunkMemory

ENCODINGS = ("prefix", "alone")
"""What a note is encoded after: the prompts' common beginning, which is dropped; or nothing."""


def load_notes(path: Path | None = None) -> MemoryTask:
    """Notes and questions of a JSON file; None: the memory demo's."""
    if path is not None:
        return load_memory_notes(path)
    with as_file(files("phasekv.demo").joinpath("memory_notes.json")) as sample:
        return load_memory_notes(sample)


def load_trajectory(path: Path | None = None, index: int = 0) -> Trajectory:
    """Trajectory ``index`` of a file of JSON lines; None: the agent demo's."""
    if path is None:
        with as_file(files("phasekv.demo").joinpath("agent_trajectory.jsonl")) as sample:
            found = load_trajectories(sample)
    else:
        found = load_trajectories(path)
    if not 0 <= index < len(found):
        raise InvalidArgumentError("index", str(index), f"one of {len(found)} trajectories")
    return found[index]


def measured_prompts(
    model: Any,
    tokenizer: Any,
    task: MemoryTask,
    *,
    questions: int = 4,
    notes: int = 8,
    encode: str = "prefix",
) -> list[ReusedPrompt]:
    """The prompts of some questions, each over its retrieved notes, prefilled in full.

    Parameters
    ----------
    model, tokenizer : transformers model and tokenizer
        As ``ChunkMemory`` takes them.
    task : MemoryTask
        Notes and questions.
    questions, notes : int
        How many questions, spread evenly over the task's, and notes retrieved for each.
    encode : str
        One of ``ENCODINGS``.
    """
    from phasekv.evaluation.question_choice import choose_questions

    if encode not in ENCODINGS:
        raise InvalidArgumentError("encode", repr(encode), "one of " + ", ".join(ENCODINGS))
    asked = choose_questions([task], questions, notes)
    builder = PromptBuilder(tokenizer)
    memory = ChunkMemory(model, tokenizer)
    prefix = builder.prefix if encode == "prefix" else []
    measured = []
    for one in progress(asked, "prompts"):
        prompt = builder.prompt(one.notes, one.question.question)
        chunks = [
            memory.encode(prompt.token_ids[begin:end], prefix) for begin, end in prompt.chunks
        ]
        end = prompt.chunks[-1][1]
        measured.append(measure_prompt(memory, [builder.prefix, *chunks, prompt.token_ids[end:]]))
    return measured


def labelled_trajectory(
    trajectory: Trajectory, tokenizer: Any, max_tokens: int = 4096
) -> LabelledTokens:
    """The trajectory's tokens with their phases, at most ``max_tokens``."""
    return label_trajectory(trajectory, tokenizer, token_vocabulary(tokenizer), max_tokens)
