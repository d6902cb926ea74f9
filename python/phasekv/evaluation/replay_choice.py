"""Chooses which trajectories are replayed, how long, and which of their rows are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.evaluation.trajectories import LabelledTokens, Trajectory, label_trajectory
from phasekv.phases import TokenVocabulary

SCORED_PHASES = ("think", "act")
"""Phases whose tokens are predicted and compared: what the model itself would have written."""


@dataclass(frozen=True)
class ChosenTrajectory:
    """A trajectory's tokens, cut after the last that is compared.

    Attributes
    ----------
    file : str
        Where it stands.
    source, id : str
        What it is called there.
    labelled : LabelledTokens
        Its tokens.
    cut : int
        The limit, in tokens, at which it was cut before.
    """

    file: str
    source: str
    id: str
    labelled: LabelledTokens
    cut: int

    def rows(self, begin: int = 0) -> npt.NDArray[np.int64]:
        """Ascending positions from ``begin`` on whose next token is compared."""
        wanted = _scored(self.labelled)
        found: npt.NDArray[np.int64] = np.flatnonzero(wanted[1:]).astype(np.int64)
        return found[found >= begin]

    def phase_at(self, rows: npt.NDArray[np.int64], phase: str) -> npt.NDArray[np.bool_]:
        """Whether the token after each of ``rows`` is of ``phase``."""
        return self.labelled.content(phase)[rows + 1]


def choose_trajectories(
    files: Sequence[tuple[str, Sequence[Trajectory]]],
    tokenizer: Any,
    vocabulary: TokenVocabulary,
    *,
    count: int,
    max_tokens: Sequence[int],
    min_tokens: int,
    min_rows: int,
    first_row: int,
) -> list[ChosenTrajectory]:
    """The first ``count`` that qualify, taken from the files in turn.

    A trajectory is cut at a limit and then after its last think or act token, since what follows
    would be computed for nothing.

    Parameters
    ----------
    files : sequence of (name, trajectories)
        Where to choose from.
    tokenizer, vocabulary : Any, TokenVocabulary
        As ``label_trajectory`` takes them.
    count : int
        Most trajectories to choose.
    max_tokens : sequence of int
        Limits in tokens; the trajectories chosen take them in turn.
    min_tokens : int
        A cut trajectory is at least this long.
    min_rows : int
        And has at least this many tokens to compare after position ``first_row``.
    first_row : int
        First position that the smallest budget changes.
    """
    chosen: list[ChosenTrajectory] = []
    in_turn = zip_longest(*([(name, one) for one in trajectories] for name, trajectories in files))
    for entry in (entry for group in in_turn for entry in group if entry is not None):
        if len(chosen) == count:
            break
        name, trajectory = entry
        cut = max_tokens[len(chosen) % len(max_tokens)]
        labelled = label_trajectory(trajectory, tokenizer, vocabulary, cut)
        scored = np.flatnonzero(_scored(labelled))
        length = int(scored[-1]) + 1 if len(scored) else 0
        candidate = ChosenTrajectory(
            name, trajectory.source, trajectory.id, _first(labelled, length), cut
        )
        if length >= min_tokens and len(candidate.rows(first_row)) >= min_rows:
            chosen.append(candidate)
    return chosen


def _scored(labelled: LabelledTokens) -> npt.NDArray[np.bool_]:
    wanted = np.zeros(len(labelled.tokens), dtype=np.bool_)
    for phase in SCORED_PHASES:
        wanted |= labelled.content(phase)
    return wanted


def _first(labelled: LabelledTokens, length: int) -> LabelledTokens:
    return replace(
        labelled,
        tokens=labelled.tokens[:length],
        phases=labelled.phases[:length],
        is_marker=labelled.is_marker[:length],
    )
