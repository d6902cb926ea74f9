"""Compares replays under eviction with the replay under full KV, and sums up over trajectories.

A trajectory's scores are means and counts only: they are what the JSON of a run holds, so that a
run can be taken up again and summarised at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from phasekv.evaluation.bootstrap import Estimate, bootstrap_mean, paired_difference
from phasekv.evaluation.divergence import kl_divergence, negative_log_likelihood, top1_agreement

METRICS = ("kl", "nll", "top1")
_ROWS_AT_ONCE = 128

Floats = npt.NDArray[np.float64]
RowScores = dict[str, Floats]


def score_rows(
    log_probs: Callable[[torch.Tensor], torch.Tensor],
    full: torch.Tensor,
    others: Mapping[str, torch.Tensor],
    next_tokens: npt.NDArray[np.int32],
) -> dict[str, RowScores]:
    """Scores of every row of every replay.

    The distributions are made anew from hidden states, a few rows at a time: those of a whole
    trajectory would not fit into memory.

    Parameters
    ----------
    log_probs : callable
        From hidden states ``[rows, hidden size]`` to log-probabilities ``[rows, vocabulary]``.
    full : torch.Tensor
        ``[rows, hidden size]`` under full KV.
    others : mapping of str to torch.Tensor
        The same rows of each replay.
    next_tokens : numpy.ndarray
        ``[rows]``: what follows each row.

    Returns
    -------
    dict
        For each replay ``kl`` (full ‖ replay) and ``nll`` of the next token, in nats, and ``top1``,
        1 where the most likely token is that of full KV: each ``[rows]``.
    """
    parts: dict[str, list[RowScores]] = {label: [] for label in others}
    for begin in range(0, len(full), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        tokens = next_tokens[rows].tolist()
        expected = log_probs(full[rows]).numpy()
        for label, hidden in others.items():
            own = log_probs(hidden[rows]).numpy()
            parts[label].append(
                {
                    "kl": kl_divergence(expected, own),
                    "nll": negative_log_likelihood(own, tokens),
                    "top1": top1_agreement(expected, own).astype(np.float64),
                }
            )
    return {
        label: {metric: np.concatenate([part[metric] for part in own]) for metric in METRICS}
        for label, own in parts.items()
    }


def summed(scores: RowScores, chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Count and means over the chosen rows, for JSON."""
    count = int(chosen.sum())
    result: dict[str, Any] = {"rows": count}
    if count:
        result.update({metric: float(scores[metric][chosen].mean()) for metric in METRICS})
    return result


def find_run(trajectory: Mapping[str, Any], setting: str, budget: int) -> Mapping[str, Any] | None:
    """A trajectory's run of a setting at a budget; None if it has none."""
    for run in trajectory["runs"]:
        if (run["setting"], run["budget"]) == (setting, budget):
            found: Mapping[str, Any] = run
            return found
    return None


def summary_rows(
    trajectories: Sequence[Mapping[str, Any]], settings: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One line per setting and budget over the trajectories that have it."""
    rows = []
    for setting, description in settings.items():
        for budget in _budgets(trajectories):
            runs = [
                run
                for trajectory in trajectories
                if (run := find_run(trajectory, setting, budget)) is not None
                and run["all"]["rows"] > 0
            ]
            if not runs:
                continue
            row = {
                "setting": setting,
                **description,
                "budget": budget,
                "trajectories": len(runs),
                "positions": sum(run["all"]["rows"] for run in runs),
            }
            for metric in METRICS:
                row[metric] = bootstrap_mean(_groups(runs, "all", metric)).as_dict()
            for phase in ("think", "act"):
                groups = _groups(runs, phase, "kl")
                row[f"kl_{phase}"] = bootstrap_mean(groups).as_dict() if groups else None
            row["future_attention"] = _mean_shares(runs)
            rows.append(row)
    return rows


def differences_from(
    reference: str,
    trajectories: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Every setting minus ``reference`` at equal budgets, paired by trajectory."""
    lines: list[dict[str, Any]] = []
    for setting in settings:
        for budget in _budgets(trajectories):
            pairs = [
                (own, other)
                for trajectory in trajectories
                if (own := find_run(trajectory, setting, budget)) is not None
                and (other := find_run(trajectory, reference, budget)) is not None
                and own["all"]["rows"] > 0
            ]
            if setting == reference or not pairs:
                continue
            line: dict[str, Any] = {
                "first": setting,
                "second": reference,
                "budget": budget,
                "trajectories": len(pairs),
                "closer": sum(own["all"]["kl"] < other["all"]["kl"] for own, other in pairs),
            }
            for metric in METRICS:
                line[metric] = _paired(pairs, metric).as_dict()
            lines.append(line)
    return lines


def _paired(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], metric: str) -> Estimate:
    return paired_difference(
        _groups([own for own, _ in pairs], "all", metric),
        _groups([other for _, other in pairs], "all", metric),
    )


def _groups(runs: Sequence[Mapping[str, Any]], phase: str, metric: str) -> list[Floats]:
    """A trajectory's mean as often as it has rows: the bootstrap needs but sums and counts."""
    return [
        np.full(run[phase]["rows"], run[phase][metric]) for run in runs if run[phase]["rows"] > 0
    ]


def _mean_shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over trajectories of the future attention kept, by the phase of the query."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for phase, share in (run.get("future_attention") or {}).items():
            if share is not None:
                values.setdefault(phase, []).append(share)
    return {phase: float(np.mean(shares)) for phase, shares in values.items()}


def _budgets(trajectories: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({run["budget"] for trajectory in trajectories for run in trajectory["runs"]})
