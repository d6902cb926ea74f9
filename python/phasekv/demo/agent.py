"""An agent's trajectory runs under several KV budgets beside the full cache, turn by turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.machine import describe_machine, machine_in_words
from phasekv.evaluation.server import Server
from phasekv.evaluation.server_replay import (
    PROCESSOR,
    Turn,
    TurnOutcome,
    assistant_turns,
    replay_turn,
)
from phasekv.evaluation.trajectories import (
    LabelledTokens,
    Trajectory,
    label_trajectory,
    load_trajectories,
)
from phasekv.phases import phase_names, token_vocabulary

FULL = "full"
BLOCK_SIZE = 32
_STEP_TOKENS = 512


@dataclass(frozen=True)
class AgentDemo:
    """The demo with its options.

    Attributes
    ----------
    model
        Folder of a Hugging Face model that speaks ChatML.
    trajectory
        A file of trajectories, or None for the one written for this project.
    index
        Which of the file's trajectories.
    policy, budgets, stride
        What is compared with the full cache.
    turns
        How many of the agent's turns at most.
    max_tokens
        Where the trajectory is cut.
    output
        Folder that receives ``agent.json``, ``agent.png`` and ``report.html``.
    say
        Called with a line of progress at a time.
    """

    model: Path
    trajectory: Path | None
    index: int
    policy: str
    budgets: tuple[int, ...]
    stride: int
    turns: int
    max_tokens: int
    output: Path
    say: Callable[[str], None] = print

    def run(self) -> dict[str, Any]:
        """Runs everything, writes the files and returns what ``agent.json`` holds."""
        from transformers import AutoTokenizer

        begin = time.perf_counter()
        trajectory = self._load()
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        labelled = label_trajectory(
            trajectory, tokenizer, token_vocabulary(tokenizer), self.max_tokens
        )
        tokens = labelled.tokens.tolist()
        turns = assistant_turns(tokens, tokenizer)[: self.turns]
        tokens = tokens[: turns[-1].end]
        wishes: dict[str, dict[str, Any]] = {FULL: {"policy": FULL}}
        for budget in self.budgets:
            wishes[f"{self.policy} {budget}"] = {"policy": self.policy, "budget": budget}
        self.say(f"starting the server ({machine_in_words()})")
        self.output.mkdir(parents=True, exist_ok=True)
        rows = []
        with self._server(len(tokens)) as server:
            # One token after a short prompt, so that no first use is timed.
            begin_at = min(64, turns[0].begin)
            replay_turn(server, tokens, Turn(begin_at, begin_at + 1), wishes[FULL], "warm-up")
            past: dict[str, dict[str, float]] = {}
            for number, turn in enumerate(turns):
                self._tell_turn(number, turn, len(turns), labelled)
                outcomes = {}
                for name, wish in wishes.items():
                    outcomes[name] = replay_turn(server, tokens, turn, wish, f"demo {name}")
                row = turn_row(turn, labelled, outcomes, past)
                past = {name: run["kept_by_phase"] for name, run in row["runs"].items()}
                rows.append(row)
                self._tell_runs(row)
        result = {
            "machine": describe_machine(),
            "model": self.model.name,
            "trajectory": {"source": trajectory.source, "id": trajectory.id},
            "policy": self.policy,
            "budgets": list(self.budgets),
            "stride": self.stride,
            "block_size": BLOCK_SIZE,
            "tokens": len(tokens),
            "phases": phase_runs(labelled.phases[: len(tokens)]),
            "seconds": time.perf_counter() - begin,
            "runs": {name: run_summary(rows, name) for name in wishes},
            "turns": rows,
        }
        self.say("")
        self.say(summary_table(result))
        self._write(result)
        return result

    def _load(self) -> Trajectory:
        if self.trajectory is not None:
            found = load_trajectories(self.trajectory)
        else:
            with as_file(files("phasekv.demo").joinpath("agent_trajectory.jsonl")) as own:
                found = load_trajectories(own)
        if not 0 <= self.index < len(found):
            raise InvalidArgumentError("index", str(self.index), f"in [0, {len(found)})")
        if self.turns < 1:
            raise InvalidArgumentError("turns", str(self.turns), "at least 1")
        return found[self.index]

    def _server(self, tokens: int) -> Server:
        longest = -(-(tokens + 1) // self.stride) * self.stride
        # The engine's budget is the limit of what requests may ask for, and the policy full needs
        # all of it.
        eviction = {"policy": FULL, "budget": longest, "stride": self.stride}
        return Server(
            self.model,
            {"eviction": eviction},
            [
                *("--dtype", "float32", "--enforce-eager"),
                *("--max-model-len", str(longest), "--block-size", str(BLOCK_SIZE)),
                *("--max-num-batched-tokens", str(_STEP_TOKENS), "--max-num-seqs", "1"),
                *("--logits-processors", PROCESSOR),
            ],
            self.output / "server.log",
        )

    def _tell_turn(self, number: int, turn: Turn, count: int, labelled: LabelledTokens) -> None:
        said = _count(labelled.phases[turn.begin : turn.end])
        parts = ", ".join(f"{name} {int(tokens)}" for name, tokens in said.items() if tokens)
        self.say("")
        self.say(
            f"[turn {number + 1}/{count}] {turn.end - turn.begin} tokens ({parts}) after "
            f"{turn.begin}"
        )

    def _tell_runs(self, row: dict[str, Any]) -> None:
        for name, run in row["runs"].items():
            kept = ", ".join(
                f"{phase} {run['kept_by_phase'][phase]:.0f}" for phase in phase_names()
            )
            line = (
                f"  {name:<22} {run['seconds']:6.1f} s  seen {run['tokens_seen']:5d}  "
                f"kept {run['tokens_kept']:5d} ({kept})  blocks {run['blocks_held']:3d}"
            )
            if name != FULL:
                line += (
                    f"  top-1 {run['top1']:4.0%}  NLL {run['nll'] - row['runs'][FULL]['nll']:+.3f}"
                )
            if run["tokens_resumed"] is not None:
                line += f"  resumed {run['tokens_resumed']}"
            self.say(line)

    def _write(self, result: dict[str, Any]) -> None:
        from phasekv.demo.agent_plot import agent_demo_figure
        from phasekv.demo.figure_files import save_png
        from phasekv.demo.report import write_report

        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        (self.output / "agent.json").write_text(text, encoding="utf-8")
        save_png(agent_demo_figure(result), self.output / "agent.png")
        write_report(self.output)
        self.say(f"wrote {self.output / 'agent.json'}, agent.png and report.html")


def turn_row(
    turn: Turn,
    labelled: LabelledTokens,
    outcomes: dict[str, TurnOutcome],
    past: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """One turn for ``agent.json``.

    Parameters
    ----------
    turn : Turn
        Of the trajectory.
    labelled : LabelledTokens
        The trajectory.
    outcomes : dict
        By run, among them the full one.
    past : dict
        By run, the tokens of each phase that were kept after the turn before; empty at first.
    """
    full = outcomes[FULL]
    runs = {}
    for name, outcome in outcomes.items():
        report = outcome.eviction
        seen, kept = report["tokens_seen"], report["tokens_kept"]
        runs[name] = {
            "seconds": outcome.seconds,
            "tokens_seen": seen,
            "tokens_kept": kept,
            "kept_by_phase": kept_by_phase(report, labelled.phases, past.get(name, {})),
            "blocks_held": -(-seen // BLOCK_SIZE) - (seen - kept) // BLOCK_SIZE,
            "compactions": report["compactions"],
            "tokens_resumed": outcome.session.get("resumed_tokens"),
            "nll": float(-outcome.logprobs.mean()),
            "logprob_difference": float(np.abs(outcome.logprobs - full.logprobs).mean()),
            "top1": float((outcome.likeliest == full.likeliest).mean()),
        }
    return {
        "begin": turn.begin,
        "end": turn.end,
        "said_by_phase": _count(labelled.phases[turn.begin : turn.end]),
        "seen_by_phase": _count(labelled.phases[: full.eviction["tokens_seen"]]),
        "runs": runs,
    }


def kept_by_phase(
    report: dict[str, Any], phases: npt.NDArray[np.uint8], before: dict[str, float]
) -> dict[str, float]:
    """Tokens of each phase that a request holds at its end, mean over layers and KV heads.

    Parameters
    ----------
    report : dict
        Its ``eviction`` object, whose own count is from the last event.
    phases : numpy.ndarray
        uint8 [tokens]: of the trajectory.
    before : dict
        The same for the session's turn before, for a turn without an event.
    """
    held = report["kept_by_phase"]
    if not held and report["tokens_kept"] < report["tokens_seen"]:
        held = before
    since = round(report["tokens_kept"] - sum(held.values()))
    seen = report["tokens_seen"]
    return {
        name: held.get(name, 0.0) + count
        for name, count in _count(phases[seen - since : seen]).items()
    }


def run_summary(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """A run over all turns; agreement is a mean over the agent's tokens."""
    runs = [row["runs"][name] for row in rows]
    lengths = [row["end"] - row["begin"] for row in rows]

    def mean(field: str) -> float:
        return float(np.average([run[field] for run in runs], weights=lengths))

    return {
        "seconds": sum(run["seconds"] for run in runs),
        "tokens_kept": runs[-1]["tokens_kept"],
        "most_blocks": max(run["blocks_held"] for run in runs),
        "compactions": sum(run["compactions"] for run in runs),
        "nll": mean("nll"),
        "logprob_difference": mean("logprob_difference"),
        "top1": mean("top1"),
    }


def phase_runs(phases: npt.NDArray[np.uint8]) -> list[list[Any]]:
    """Consecutive tokens of one phase as [phase, tokens] pairs."""
    runs: list[list[Any]] = []
    for phase in phases.tolist():
        name = phase_names()[phase]
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return runs


def summary_table(result: dict[str, Any]) -> str:
    """The runs as a text table."""
    lines = [
        f"{'run':<22} {'time':>8} {'kept':>6} {'blocks':>7} {'events':>7} {'top-1':>6} "
        f"{'NLL':>7} {'|difference|':>13}"
    ]
    for name, run in result["runs"].items():
        lines.append(
            f"{name:<22} {run['seconds']:6.1f} s {run['tokens_kept']:6d} {run['most_blocks']:7d} "
            f"{run['compactions']:7d} {run['top1']:6.0%} {run['nll']:7.3f} "
            f"{run['logprob_difference']:13.3f}"
        )
    lines.append(
        f"{result['tokens']} tokens, the agent's own ones forced. Kept: at the end. Blocks: most "
        "after a turn. Top-1: how often the likeliest\nnext token is the full run's. NLL: of the "
        "agent's recorded tokens, in nats. |difference|: of their log-probability from the full "
        "run's."
    )
    return "\n".join(lines)


def _count(phases: npt.NDArray[np.uint8]) -> dict[str, float]:
    counts = np.bincount(phases, minlength=len(phase_names()))
    return {name: float(count) for name, count in zip(phase_names(), counts, strict=True)}
