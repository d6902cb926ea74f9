"""``phasekv analyze``: what reuse and eviction do inside a model, as numbers and a figure."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.environment import prepare_environment
from phasekv.model_conversion import ensure_demo_model

RESIDUALS, ERROR_BOUND, DIVERGENCE = "residuals", "error-bound", "divergence"
SUBSPACES, COVERAGE = "subspaces", "coverage"

HEAD = 8
"""Tokens of a note that are told apart in words, where an attention sink would be."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand and its own subcommands."""
    parser = commands.add_parser(
        "analyze",
        help="look at residuals, queries and attention inside a model",
        description="Runs an analysis of docs/analyses.md on a transformers model in float32. "
        "Without files it takes the demos' notes and trajectory.",
        allow_abbrev=False,
    )
    analyses = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS")
    _add_notes(analyses, RESIDUALS, "how much of the residual of reused notes is one shared offset")
    bound = _add_notes(analyses, ERROR_BOUND, "attention's error over reused notes, and its bound")
    bound.add_argument("--method", default="agentkvshift", help="default: %(default)s")
    divergence = _add_notes(
        analyses, DIVERGENCE, "which tokens of a reused note diverge, and where probes fall"
    )
    divergence.add_argument(
        "--methods",
        nargs="+",
        default=["agentkvshift", "phaseshift", "cacheblend", "epic"],
        help="reuse methods (default: agentkvshift phaseshift cacheblend epic)",
    )
    for one in (bound, divergence):
        one.add_argument(
            "--ratio", type=float, default=0.1, help="recompute ratio r (default: %(default)s)"
        )
    subspaces = _add_trajectory(
        analyses, SUBSPACES, "principal angles between the queries of an agent's phases"
    )
    subspaces.add_argument(
        "--directions", type=int, default=5, help="of each subspace, k (default: %(default)s)"
    )
    subspaces.add_argument(
        "--frame",
        choices=("rotated", "unrotated"),
        default="unrotated",
        help="queries after RoPE, or turned back by their own position (default: %(default)s)",
    )
    coverage = _add_trajectory(
        analyses, COVERAGE, "future attention that eviction policies keep, by phase"
    )
    coverage.add_argument(
        "--policies",
        nargs="+",
        default=["agentkv_recency", "agentkv"],
        help="eviction policies (default: agentkv_recency agentkv)",
    )
    coverage.add_argument(
        "--budget", type=int, default=512, help="in tokens (default: %(default)s)"
    )
    coverage.add_argument(
        "--stride", type=int, default=128, help="tokens from event to event (default: %(default)s)"
    )


def _add(
    analyses: argparse._SubParsersAction[argparse.ArgumentParser], name: str, tells: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = analyses.add_parser(
        name, help=tells, description=f"{tells[0].upper()}{tells[1:]}.", allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    parser.add_argument("--json", type=Path, help="file to write the arrays to")
    parser.add_argument("--plot", type=Path, help="file to draw to: .png, .svg or .pdf")
    parser.set_defaults(run=run)
    return parser


def _add_notes(
    analyses: argparse._SubParsersAction[argparse.ArgumentParser], name: str, tells: str
) -> argparse.ArgumentParser:
    parser = _add(analyses, name, tells)
    parser.add_argument(
        "--notes", type=Path, help="JSON file of notes and questions (default: the demo's)"
    )
    parser.add_argument(
        "--questions", type=int, default=4, help="prompts to look at (default: %(default)s)"
    )
    parser.add_argument(
        "--retrieved", type=int, default=8, help="notes in each (default: %(default)s)"
    )
    parser.add_argument(
        "--encode",
        choices=("prefix", "alone"),
        default="prefix",
        help="encode a note after the prompts' common beginning, which is then dropped, or alone "
        "(default: %(default)s)",
    )
    return parser


def _add_trajectory(
    analyses: argparse._SubParsersAction[argparse.ArgumentParser], name: str, tells: str
) -> argparse.ArgumentParser:
    parser = _add(analyses, name, tells)
    parser.add_argument(
        "--trajectory",
        type=Path,
        help="file with a trajectory as a JSON object on each line (default: the demo's)",
    )
    parser.add_argument(
        "--index", type=int, default=0, help="which of the file's (default: the first, 0)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        help="where the trajectory is cut (default: %(default)s)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs one analysis; returns the exit status."""
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise InvalidArgumentError("output", str(path), "a file in a folder that exists")
    prepare_environment()
    begin = time.perf_counter()
    result, plot, subject = _analyze(arguments)
    from phasekv.analysis.figures import save_figure
    from phasekv.analysis.results import to_json
    from phasekv.evaluation.machine import describe_machine

    values = to_json(result)
    report = {
        "analysis": arguments.analysis,
        "subject": subject,
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("command", "analysis", "run", "json", "plot", "engine_arguments")
        },
        "machine": describe_machine(),
        "seconds": time.perf_counter() - begin,
        "result": values,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
        print(f"wrote {arguments.json}")
    if arguments.plot is not None:
        save_figure(plot(result, subject), arguments.plot)
        print(f"wrote {arguments.plot}")
    print(f"{arguments.analysis}: {subject}")
    for line in in_words(result):
        print(f"  {line}")
    return 0


def _analyze(arguments: argparse.Namespace) -> tuple[Any, Callable[[Any, str], Any], str]:
    """The result, the function that draws it, and model and data in words."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from phasekv import analysis
    from phasekv.methods import Method

    folder = ensure_demo_model(report=print) if arguments.model is None else arguments.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if arguments.analysis in (SUBSPACES, COVERAGE):
        trajectory = analysis.load_trajectory(arguments.trajectory, arguments.index)
        labelled = analysis.labelled_trajectory(trajectory, tokenizer, arguments.max_tokens)
        subject = f"{folder.name}, trajectory {trajectory.id}, {len(labelled.tokens)} tokens"
        if arguments.analysis == SUBSPACES:
            subspaces = analysis.phase_subspaces(
                model, labelled, directions=arguments.directions, frame=arguments.frame
            )
            return subspaces, analysis.plot_phase_subspaces, subject
        coverage = analysis.attention_coverage(
            model,
            labelled,
            {name: {"policy": name} for name in arguments.policies},
            budget=arguments.budget,
            stride=arguments.stride,
            tokenizer=tokenizer,
        )
        return coverage, analysis.plot_attention_coverage, subject
    task = analysis.load_notes(arguments.notes)
    prompts = analysis.measured_prompts(
        model,
        tokenizer,
        task,
        questions=arguments.questions,
        notes=arguments.retrieved,
        encode=arguments.encode,
    )
    encoded = "alone" if arguments.encode == "alone" else "after a prefix that is dropped"
    subject = (
        f"{folder.name}, {task.name}: {arguments.questions} prompts of {arguments.retrieved} notes "
        f"encoded {encoded}"
    )
    if arguments.analysis == RESIDUALS:
        spectrum = analysis.residual_spectrum(prompts)
        return spectrum, analysis.plot_residual_spectrum, subject
    if arguments.analysis == ERROR_BOUND:
        bound = analysis.attention_error_bound(prompts, Method(arguments.method), arguments.ratio)
        return bound, analysis.plot_attention_error_bound, subject
    divergence = analysis.divergence_by_position(
        prompts, {name: Method(name) for name in arguments.methods}, arguments.ratio
    )
    return divergence, analysis.plot_divergence_by_position, subject


def in_words(result: Any) -> list[str]:
    """The gist of a result, in a line for each of its parts."""
    from phasekv import analysis
    from phasekv.analysis.attention_error_bound import PARTS

    if isinstance(result, analysis.ResidualSpectrum):
        return [
            f"{kind}: {share.mean():.0%} of the energy is the shared offset (mean over layers and "
            f"chunks; {result.without_structure.mean():.0%} if nothing were shared)"
            for kind, share in zip(result.kinds, result.offset_share, strict=True)
        ]
    if isinstance(result, analysis.AttentionErrorBound):
        parts = ", ".join(
            f"{part.mean():.3f} {name}" for part, name in zip(result.parts, PARTS, strict=True)
        )
        return [
            f"error {result.measured.mean():.4f} of the output with {result.method}, "
            f"{result.uncorrected.mean():.4f} uncorrected (mean over layers)",
            f"bound {result.parts.sum(0).mean():.3f} = {parts}",
            f"largest error over its bound: {result.tightest:.3f}",
        ]
    if isinstance(result, analysis.DivergenceByPosition):
        return _divergence_in_words(result)
    if isinstance(result, analysis.PhaseSubspaces):
        return [
            f"within a phase {result.within.mean():.1f}°, between phases "
            f"{result.between.mean():.1f}°, random subspaces {result.random:.1f}°",
            f"between > within in {(result.between > result.within).mean():.0%} of the heads",
        ]
    return [
        f"{policy} keeps {everything[-1]:.3f} of all attention; of that to earlier keys, by phase, "
        + ", ".join(
            f"{share:.3f} {phase}"
            for phase, share in zip(result.phases, shares, strict=True)
            if share == share
        )
        for policy, shares, everything in zip(
            result.policies, result.by_key, result.by_query, strict=True
        )
    ]


def _divergence_in_words(result: Any) -> list[str]:
    import numpy as np

    head = slice(0, HEAD)
    counts = np.isfinite(result.key).sum(1)
    key, value = (np.nanmean(one[head]) for one in (result.key, result.value))
    lines = [
        f"the first {HEAD} tokens of a note, {counts[head].sum() / counts.sum():.0%} of all, "
        f"diverge {key:.2f} times as far as the note's mean in their keys, {value:.2f} times in "
        "their values"
    ]
    for name, probes in zip(result.methods, result.probes, strict=True):
        recomputed = probes * counts
        if recomputed.sum() > 0:
            share = recomputed[head].sum() / recomputed.sum()
            lines.append(f"{name}: {share:.0%} of its probes are among them")
    return lines
