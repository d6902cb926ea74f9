"""How close each eviction policy stays to full KV on recorded agent trajectories.

A trajectory is replayed token by token as it stands (teacher forcing), prefilled in chunks as long
as the stride, so that its window is compressed on the way as in decoding. At every think and act
token after the first eviction the next-token distributions are compared with those under full KV,
computed in the same chunks: KL divergence, top-1 agreement and negative log-likelihood.

The JSON is written after each trajectory; ``--resume`` completes it with what is missing, also with
further policies, budgets and trajectories. Distributions differ by rounding only where no token was
evicted yet, so those positions count at no budget. ``future_attention`` is the share of the full
run's attention, by the phase of the query, that falls on keys which the policy had kept.

Example: python benchmarks/eviction_fidelity.py --data data/*.jsonl --max-tokens 2560 --json o.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from phasekv._core import Policy, policy_names
from phasekv.evaluation.future_attention import AttentionRecorder, HeldRecorder, kept_share
from phasekv.evaluation.json_file import read_json
from phasekv.evaluation.machine import describe_machine
from phasekv.evaluation.replay import FULL, PolicySetting, ReplayEngine, first_evicted_row
from phasekv.evaluation.replay_choice import (
    SCORED_PHASES,
    ChosenTrajectory,
    choose_trajectories,
)
from phasekv.evaluation.replay_comparison import (
    differences_from,
    find_run,
    score_rows,
    summary_rows,
    summed,
)
from phasekv.evaluation.trajectories import load_trajectories
from phasekv.model_conversion import ensure_demo_model
from phasekv.phases import choose_table, token_vocabulary

REFERENCE = "agentkv"
NEEDS_CALIBRATION = "triattention"

VARIANTS = {
    "agentkv, no marker queries": PolicySetting("agentkv", {"marker_queries": False}),
    "agentkv, recent 64": PolicySetting("agentkv", {"recent": 64}),
    "agentkv, no marker queries, recent 64, mean, no pooling": PolicySetting(
        "agentkv", {"marker_queries": False, "recent": 64, "group": "mean", "pooling": "none"}
    ),
    "agentkv, 4 sinks": PolicySetting("agentkv", {"sinks": 4}),
    "agentkv, phase quota 0.5": PolicySetting("agentkv", {"phase_quota": 0.5}),
    "phase_balanced, no marker queries": PolicySetting("phase_balanced", {"marker_queries": False}),
}
"""Options that a policy's own definition leaves otherwise."""


def _is_compared(policy: str) -> bool:
    """Whether vLLM runs it, and it evicts anything."""
    return policy == NEEDS_CALIBRATION or (policy != FULL and not Policy(policy).is_ragged)


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="trajectory files")
    parser.add_argument("--trajectories", type=int, default=20)
    parser.add_argument(
        "--max-tokens",
        type=int,
        nargs="+",
        default=[8000],
        help="where trajectories are cut; several limits are taken in turn",
    )
    parser.add_argument("--min-tokens", type=int, default=1920, help="shortest trajectory")
    parser.add_argument("--min-rows", type=int, default=16, help="fewest compared positions")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument(
        "--policies", nargs="+", default=[name for name in policy_names() if _is_compared(name)]
    )
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--variant-budgets", type=int, nargs="*", default=[512], help="budgets of the variants"
    )
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--calibration", type=Path, help="file of `phasekv calibrate`")
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--minutes", type=float, help="begin no trajectory that would end later")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON already holds")
    parser.add_argument("--json", type=Path, required=True)
    run(parser.parse_args())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All trajectories, one after the other, in one engine."""
    begin = time.perf_counter()
    model = arguments.model if arguments.model is not None else ensure_demo_model()
    engine = ReplayEngine(
        model,
        max_tokens=max(arguments.max_tokens),
        stride=arguments.stride,
        block_size=arguments.block_size,
        calibration=arguments.calibration,
    )
    vocabulary = token_vocabulary(engine.tokenizer)
    chosen = choose_trajectories(
        [(path.name, load_trajectories(path)) for path in arguments.data],
        engine.tokenizer,
        vocabulary,
        count=arguments.trajectories,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        min_rows=arguments.min_rows,
        first_row=first_evicted_row(min(arguments.budgets), arguments.stride),
    )
    settings = settings_of(arguments)
    result = resumed(arguments) if arguments.resume and arguments.json.exists() else {}
    old_settings = result.get("settings", {})
    result = {
        "machine": describe_machine(),
        "model": model.name,
        "stride": arguments.stride,
        "block_size": arguments.block_size,
        "phases": choose_table(vocabulary, engine.tokenizer.chat_template).table.name,
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count(),
        "seconds": result.get("seconds", 0.0),
        "settings": old_settings | {name: described(one) for name, one in settings.items()},
        "trajectories": result.get("trajectories", []),
    }
    before = result["seconds"]
    work = Progress(sum(cost_of(one, settings, arguments, result) for one in chosen))
    print(
        f"{len(chosen)} trajectories, {sum(len(one.labelled.tokens) for one in chosen)} tokens, "
        f"{work.left} tokens to run",
        flush=True,
    )
    for number, one in enumerate(chosen, start=1):
        cost = cost_of(one, settings, arguments, result)
        if cost == 0:
            continue
        if arguments.minutes is not None and work.ends_after(60 * arguments.minutes, cost):
            print(f"{arguments.minutes:g} minutes are not enough for the next trajectory")
            break
        measure(engine, one, settings, arguments, entry_of(result, one))
        work.done(cost)
        result["seconds"] = before + time.perf_counter() - begin
        write(arguments.json, result)
        print(f"trajectory {number}/{len(chosen)} ({one.file} {one.id}): {work}", flush=True)
    return result


def settings_of(arguments: argparse.Namespace) -> dict[str, tuple[PolicySetting, list[int]]]:
    """By name, what is run besides full KV, and at which budgets."""
    settings = {}
    for policy in dict.fromkeys([REFERENCE, *arguments.policies]):
        if policy == NEEDS_CALIBRATION and arguments.calibration is None:
            print(f"{policy} is left out: it needs --calibration", flush=True)
            continue
        settings[policy] = (PolicySetting(policy), arguments.budgets)
    for name in arguments.variants:
        settings[name] = (VARIANTS[name], arguments.variant_budgets)
    return settings


def described(setting: tuple[PolicySetting, list[int]]) -> dict[str, Any]:
    """A setting for JSON."""
    return {"policy": setting[0].policy, "options": dict(setting[0].options)}


def resumed(arguments: argparse.Namespace) -> dict[str, Any]:
    """What an earlier run left."""
    result: dict[str, Any] = read_json(arguments.json, "json")
    for name in ("stride", "block_size"):
        if result[name] != getattr(arguments, name):
            raise SystemExit(f"{arguments.json} was made with {name} {result[name]}")
    return result


def entry_of(result: dict[str, Any], one: ChosenTrajectory) -> dict[str, Any]:
    """The JSON object of a trajectory; a new one if it is not there yet."""
    tokens = len(one.labelled.tokens)
    key = {"file": one.file, "source": one.source, "id": one.id, "tokens": tokens}
    for known in result["trajectories"]:
        if all(known[name] == value for name, value in key.items()):
            found: dict[str, Any] = known
            return found
    rows = one.rows()
    entry = {
        **key,
        "cut": one.cut,
        **{f"{phase}_tokens": int(one.phase_at(rows, phase).sum()) for phase in SCORED_PHASES},
        "runs": [],
    }
    result["trajectories"].append(entry)
    return entry


def missing(
    one: ChosenTrajectory,
    settings: dict[str, tuple[PolicySetting, list[int]]],
    stride: int,
    entry: dict[str, Any],
) -> list[tuple[str, int]]:
    """Settings and budgets that have something to compare and were not run yet."""
    return [
        (name, budget)
        for name, (_, budgets) in settings.items()
        for budget in budgets
        if len(one.rows(first_evicted_row(budget, stride)))
        and find_run(entry, name, budget) is None
    ]


def cost_of(
    one: ChosenTrajectory,
    settings: dict[str, tuple[PolicySetting, list[int]]],
    arguments: argparse.Namespace,
    result: dict[str, Any],
) -> int:
    """Tokens to run for a trajectory, that of full KV included."""
    probe = {"trajectories": list(result["trajectories"])}
    runs = len(missing(one, settings, arguments.stride, entry_of(probe, one)))
    return (runs + 1) * len(one.labelled.tokens) if runs else 0


def measure(
    engine: ReplayEngine,
    one: ChosenTrajectory,
    settings: dict[str, tuple[PolicySetting, list[int]]],
    arguments: argparse.Namespace,
    entry: dict[str, Any],
) -> None:
    """Runs what is missing of a trajectory and puts it into its JSON object."""
    todo = missing(one, settings, arguments.stride, entry)
    firsts = {budget: first_evicted_row(budget, arguments.stride) for _, budget in todo}
    rows = one.rows(min(firsts.values()))
    tokens = one.labelled.tokens
    attention = AttentionRecorder(one.labelled.phases, engine.scale)
    full = engine.replay(tokens.tolist(), rows.tolist(), PolicySetting(FULL), observer=attention)
    replays, shares = {}, {}
    for key in todo:
        kept = HeldRecorder()
        replays[key] = engine.replay(
            tokens.tolist(), rows.tolist(), settings[key[0]][0], key[1], observer=kept
        )
        shares[key] = kept_share(attention.steps, kept.held)
    hidden = {f"{name}@{budget}": replays[name, budget].hidden for name, budget in todo}
    scores = score_rows(
        engine.log_probs, full.hidden, {FULL: full.hidden, **hidden}, tokens[rows + 1]
    )
    for budget, first in firsts.items():
        names = [name for name, other in todo if other == budget]
        if find_run(entry, FULL, budget) is None:
            names.insert(0, FULL)
        for name in names:
            replay = full if name == FULL else replays[name, budget]
            own = scores[FULL if name == FULL else f"{name}@{budget}"]
            counted = rows >= first
            entry["runs"].append(
                {
                    "setting": name,
                    "budget": budget,
                    "all": summed(own, counted),
                    **{
                        phase: summed(own, counted & one.phase_at(rows, phase))
                        for phase in SCORED_PHASES
                    },
                    "tokens_kept": replay.report["tokens_kept"],
                    "kept_by_phase": replay.report["kept_by_phase"],
                    "future_attention": None if name == FULL else shares[name, budget],
                    "seconds": replay.seconds,
                }
            )


class Progress:
    """How much is done and when the rest will be."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._begin = time.perf_counter()
        self._done = 0

    def done(self, tokens: int) -> None:
        """So many tokens more were run."""
        self._done += tokens
        self.left -= tokens

    def ends_after(self, seconds: float, tokens: int) -> bool:
        """Whether ``tokens`` more would take until after ``seconds`` from the beginning."""
        spent = time.perf_counter() - self._begin
        if self._done == 0:
            return spent > seconds
        return spent * (1 + tokens / self._done) > seconds

    def __str__(self) -> str:
        spent = time.perf_counter() - self._begin
        rate = self._done / spent
        return f"{spent / 60:.1f} min, {rate:.0f} tokens/s, {self.left / rate / 60:.1f} min left"


def write(path: Path, result: dict[str, Any]) -> None:
    """Sums up what there is and replaces the JSON."""
    full = {FULL: {"policy": FULL, "options": {}}}
    settings = full | result["settings"]
    summary = {
        "rows": summary_rows(result["trajectories"], settings),
        "differences": differences_from(REFERENCE, result["trajectories"], result["settings"]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result | summary, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
