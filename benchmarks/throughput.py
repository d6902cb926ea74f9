"""Output tokens per second of concurrent agent sessions: PhaseKV's eviction ÷ plain vLLM.

Sessions of several turns share a pool of KV blocks. The small pool holds about a third of what full
KV of all sessions takes, the large one all of it. Every engine runs in a process of its own, one
after the other: in a round plain vLLM and each policy with the small pool, then with the large one,
and a ratio is between runs of one round. In the small pool plain vLLM has its prefix cache, as by
default, and PhaseKV its sessions, which go on from the compacted window of the turn before
(``--no-resume`` computes every history anew). With the large pool all sessions have one turn, in
which nobody can reuse anything: the ratio is what the machinery costs and shorter windows save.

The model has SmolLM2-135M's layers with random weights: ``--layers`` of its 30, and about as large
a share of its vocabulary, so that layers, output layer and KV keep their proportions.

``overhead`` rows: the share of decoding that scoring keys and moving survivors take, with all
sessions decoding at once.

Example: python benchmarks/throughput.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from phasekv.evaluation.agent_sessions import (
    SessionPlan,
    SessionSizes,
    greedy,
    plan_sessions,
    run_sessions,
)
from phasekv.evaluation.environment import prepare_environment

PLAIN = "plain"
POOLS = ("small", "large")
SMALL_SHARE = 3
OVERHEAD_BUDGETS = (2048, 512)
# The tokens that SmolLM2 spells the markers with lie below.
LEAST_VOCABULARY = 20480


def main() -> None:
    """Runs the benchmark and writes its JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--prompt", type=int, nargs=2, default=[4000, 4600], help="first turn's")
    parser.add_argument("--answer", type=int, nargs=2, default=[128, 256])
    parser.add_argument("--result", type=int, nargs=2, default=[500, 900], help="a tool's result")
    parser.add_argument("--large-sessions", type=int, default=4, help="with the large pool")
    parser.add_argument("--policies", nargs="+", default=["agentkv"])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    parser.add_argument(
        "--no-resume", action="store_true", help="turns compute the whole history anew"
    )
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--overhead-policies", nargs="*", default=["agentkv", "phase_balanced"])
    parser.add_argument("--overhead-budgets", type=int, nargs="*", default=list(OVERHEAD_BUDGETS))
    parser.add_argument("--overhead-sessions", type=int, default=8)
    parser.add_argument("--overhead-tokens", type=int, default=256, help="decoded per session")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--engines", type=json.loads, default={}, help="JSON: further settings of every engine"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        job = json.loads(arguments.worker.read_text(encoding="utf-8"))
        arguments.json.write_text(json.dumps(run_job(job)), encoding="utf-8")
    else:
        run(arguments)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds; the JSON is written anew after each, and after the overheads."""
    from phasekv.evaluation.machine import describe_machine
    from phasekv.model_conversion import ensure_demo_model

    model = arguments.model if arguments.model is not None else ensure_demo_model()
    begin = time.perf_counter()
    settings = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("json", "worker", "model", "policies", "pools", "rounds")
    }
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "model": model.name,
        "settings": settings,
        "rounds": 0,
        "rows": [],
        "overhead": [],
    }

    def save() -> None:
        result["seconds"] = time.perf_counter() - begin
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    base = {**settings, "model": str(model)}
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for pool in arguments.pools:
            for policy in [PLAIN, *arguments.policies]:
                outcome = in_own_process(
                    {**base, "kind": "sessions", "policy": policy, "pool": pool}
                )
                runs.setdefault((policy, pool), []).append(outcome)
                print(
                    f"round {number + 1} {pool} {policy}: {outcome['tokens_per_s']:.2f} tokens/s, "
                    f"{outcome['preemptions']:g} preemptions, {outcome['seconds']:.0f} s",
                    flush=True,
                )
        result["rounds"] = number + 1
        result["rows"] = rows_of(runs, arguments.budget)
        save()
    for budget in arguments.overhead_budgets:
        for policy in arguments.overhead_policies:
            row = in_own_process({**base, "kind": "overhead", "policy": policy, "budget": budget})
            result["overhead"].append(row)
            print(f"overhead of {policy} at {budget}: {row['share']:.2%} of decoding", flush=True)
            save()
    return result


def in_own_process(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one engine in a new process and returns what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        task, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        task.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, __file__, "--worker", str(task), "--json", str(answer)]
        subprocess.run(command, check=True)
        outcome: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return outcome


def rows_of(runs: dict[tuple[str, str], list[dict[str, Any]]], budget: int) -> list[dict[str, Any]]:
    """A line per policy and pool: medians over rounds, ratios within rounds."""
    rows = []
    for (policy, pool), own in runs.items():
        ratios = [
            mine["tokens_per_s"] / plain["tokens_per_s"]
            for mine, plain in zip(own, runs[PLAIN, pool], strict=True)
        ]
        rates = [one["tokens_per_s"] for one in own]
        rows.append(
            {
                "policy": policy,
                "budget": None if policy == PLAIN else budget,
                "pool": pool,
                "throughput_ratio": statistics.median(ratios),
                "throughput_ratio_spread": [min(ratios), max(ratios)],
                "tokens_per_s": statistics.median(rates),
                "tokens_per_s_spread": [min(rates), max(rates)],
                "preemptions": statistics.median(one["preemptions"] for one in own),
                "seconds": statistics.median(one["seconds"] for one in own),
                "sessions": own[0]["sessions"],
                "turns": own[0]["turns"],
                "blocks": own[0]["blocks"],
                "full_blocks": own[0]["full_blocks"],
                "output_tokens": own[0]["output_tokens"],
                "prompt_tokens": own[0]["prompt_tokens"],
                "resumed_tokens": own[0]["resumed_tokens"],
            }
        )
    return rows


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """What one process measures."""
    prepare_environment()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "8"
    return run_pool(job) if job["kind"] == "sessions" else run_overhead(job)


def run_pool(job: dict[str, Any]) -> dict[str, Any]:
    """Sessions in a pool."""
    large = job["pool"] == "large"
    count = job["large_sessions"] if large else job["sessions"]
    sizes = SessionSizes(
        1 if large else job["turns"],
        tuple(job["prompt"]),
        tuple(job["answer"]),
        tuple(job["result"]),
    )
    plans = sessions_of(job, count, sizes)
    size = job["block_size"]
    full_blocks = sum(-(-plan.full_tokens // size) for plan in plans)
    # One block is vLLM's null block; a scheduler that looks ahead takes one more per session.
    longest = max(plan.full_tokens for plan in plans)
    small = max(full_blocks // SMALL_SHARE, longest // size + 1)
    blocks = (full_blocks + count if large else small) + 1
    llm = start_engine(job, longest, count, blocks, job["budget"])
    warm_up(llm)
    preempted = counter(llm, "vllm:num_preemptions")
    resume = job["policy"] != PLAIN and sizes.turns > 1 and not job["no_resume"]
    outcome = run_sessions(llm.llm_engine, plans, resume)
    return {
        "tokens_per_s": outcome.output_tokens / outcome.seconds,
        "seconds": outcome.seconds,
        "output_tokens": outcome.output_tokens,
        "prompt_tokens": outcome.prompt_tokens,
        "resumed_tokens": outcome.resumed_tokens,
        "preemptions": counter(llm, "vllm:num_preemptions") - preempted,
        "sessions": count,
        "turns": sizes.turns,
        "blocks": blocks,
        "full_blocks": full_blocks,
    }


def run_overhead(job: dict[str, Any]) -> dict[str, Any]:
    """Decoding of all sessions at once: what of its wall time goes into eviction."""
    from phasekv.vllm import active

    count, decoded = job["overhead_sessions"], job["overhead_tokens"]
    length = job["budget"] + 2 * job["stride"]
    sizes = SessionSizes(1, (length, length), (decoded, decoded), (1, 1))
    plans = sessions_of(job, count, sizes)
    blocks = count * -(-(length + decoded) // job["block_size"]) + count + 1
    llm = start_engine(job, length + decoded, count, blocks, job["budget"])
    warm_up(llm)
    engine = llm.llm_engine
    evictions = active.evictions()
    assert evictions is not None
    for number, plan in enumerate(plans):
        engine.add_request(str(number), {"prompt_token_ids": plan.prompt}, greedy(decoded, None))
    # Sessions that were prefilled first wait for the others with their decoding under way.
    running: set[str] = set()
    while len(running) < count:
        running |= {output.request_id for output in engine.step()}
    before, begin = evictions.seconds, time.perf_counter()
    tokens = 0
    while engine.has_unfinished_requests():
        tokens += len(engine.step())
    seconds = time.perf_counter() - begin
    collecting, scoring, compacting = (
        after - earlier for after, earlier in zip(evictions.seconds, before, strict=True)
    )
    return {
        "policy": job["policy"],
        "budget": job["budget"],
        "stride": job["stride"],
        "sessions": count,
        "decode_seconds": seconds,
        "decode_tokens": tokens,
        "collecting_seconds": collecting,
        "scoring_seconds": scoring,
        "compacting_seconds": compacting,
        "share": (scoring + compacting) / seconds,
        "share_with_collecting": (collecting + scoring + compacting) / seconds,
    }


def sessions_of(job: dict[str, Any], count: int, sizes: SessionSizes) -> list[SessionPlan]:
    """The same sessions for every engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens

    return plan_sessions(encode, shape_of(job)["vocab_size"], count, sizes)


def shape_of(job: dict[str, Any]) -> dict[str, int]:
    """Layers, and the same share of the vocabulary in multiples of 64, as far as markers allow."""
    config = json.loads(Path(job["model"], "config.json").read_text(encoding="utf-8"))
    share = job["layers"] / config["num_hidden_layers"]
    return {
        "num_hidden_layers": job["layers"],
        "vocab_size": max(int(config["vocab_size"] * share) // 64 * 64, LEAST_VOCABULARY),
    }


def start_engine(job: dict[str, Any], longest: int, count: int, blocks: int, budget: int) -> Any:
    """vLLM in this process, with eviction unless the policy is plain vLLM."""
    from vllm import LLM

    plain = job["policy"] == PLAIN
    eviction = {"policy": job["policy"], "budget": budget, "stride": job["stride"]}
    ours = {"additional_config": {"phasekv": {"eviction": eviction, "store_on_use": False}}}
    settings = {
        "model": job["model"],
        "dtype": job["dtype"],
        "load_format": "dummy",
        "hf_overrides": shape_of(job),
        "enforce_eager": True,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": job["chunk"],
        "max_num_seqs": count,
        "block_size": job["block_size"],
        "num_gpu_blocks_override": blocks,
        "enable_prefix_caching": plain,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
        **job["engines"],
    }
    return LLM(**settings, **({} if plain else ours))


def warm_up(llm: Any) -> None:
    """One short request, whose tokens no session shares."""
    llm.generate([{"prompt_token_ids": [3] * 64}], greedy(8, None), use_tqdm=False)


def counter(llm: Any, name: str) -> float:
    """Value of one of vLLM's counters."""
    return float(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


if __name__ == "__main__":
    main()
