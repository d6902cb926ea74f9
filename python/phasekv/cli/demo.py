"""``phasekv demo``: shows what PhaseKV does, with a real model in the real engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from phasekv.evaluation.environment import prepare_environment
from phasekv.model_conversion import ensure_demo_model


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand and its own subcommands."""
    parser = commands.add_parser("demo", help="show what PhaseKV does", allow_abbrev=False)
    demos = parser.add_subparsers(dest="demo", required=True, metavar="DEMO")
    memory = demos.add_parser(
        "memory",
        help="an agent answers questions from memory notes that were encoded once",
        description="An agent encodes each of its memory notes once. Then it answers questions, "
        "each over several retrieved notes, by every reuse method and by full recompute.",
        allow_abbrev=False,
    )
    memory.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    memory.add_argument(
        "--locomo", type=Path, help="LoCoMo's JSON file, instead of the notes that come along"
    )
    memory.add_argument(
        "--questions", type=int, default=10, help="how many to answer (default: %(default)s)"
    )
    memory.add_argument(
        "--notes", type=int, default=8, help="retrieved for each question (default: %(default)s)"
    )
    memory.add_argument(
        "--ratio", type=float, default=0.1, help="recompute ratio r (default: %(default)s)"
    )
    memory.add_argument(
        "--encode",
        choices=("prefix", "alone"),
        default="prefix",
        help="encode a note after the prompts' common beginning, which is then dropped, or alone "
        "(default: %(default)s)",
    )
    memory.add_argument(
        "--answer-tokens", type=int, default=24, help="longest answer (default: %(default)s)"
    )
    memory.add_argument(
        "--output",
        type=Path,
        default=Path("build/demo"),
        help="folder for demo.json, the plot and the report (default: %(default)s)",
    )
    memory.set_defaults(run=run_memory)
    _add_agent(demos)


def _add_agent(demos: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    agent = demos.add_parser(
        "agent",
        help="an agent's trajectory under KV budgets, beside the full cache",
        description="Replays a tool-using agent's trajectory through the OpenAI server, turn by "
        "turn: once with the full KV cache, then under each budget. The agent's words are given; "
        "what is compared is how likely the model finds them.",
        allow_abbrev=False,
    )
    agent.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    agent.add_argument(
        "--trajectory",
        type=Path,
        help="file with a trajectory as a JSON object on each line, instead of the one that comes "
        "along",
    )
    agent.add_argument(
        "--index", type=int, default=0, help="which of the file's (default: the first, 0)"
    )
    agent.add_argument("--policy", default="agentkv", help="eviction policy (default: %(default)s)")
    agent.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[256, 512, 1024],
        help="KV budgets in tokens (default: 256 512 1024)",
    )
    agent.add_argument(
        "--stride", type=int, default=128, help="tokens from event to event (default: %(default)s)"
    )
    agent.add_argument(
        "--turns", type=int, default=4, help="most turns of the agent (default: %(default)s)"
    )
    agent.add_argument(
        "--max-tokens",
        type=int,
        default=4096,
        help="where the trajectory is cut (default: %(default)s)",
    )
    agent.add_argument(
        "--output",
        type=Path,
        default=Path("build/demo"),
        help="folder for agent.json, the plot and the report (default: %(default)s)",
    )
    agent.set_defaults(run=run_agent)


def run_memory(arguments: argparse.Namespace) -> int:
    """Runs the memory demo; returns the exit status."""
    prepare_environment()
    from phasekv.demo.memory import MemoryDemo

    def say(line: str) -> None:
        print(line, flush=True)

    model = arguments.model if arguments.model is not None else ensure_demo_model(report=say)
    MemoryDemo(
        model=model,
        locomo=arguments.locomo,
        questions=arguments.questions,
        notes=arguments.notes,
        ratio=arguments.ratio,
        encode=arguments.encode,
        answer_tokens=arguments.answer_tokens,
        output=arguments.output,
        say=say,
    ).run()
    return 0


def run_agent(arguments: argparse.Namespace) -> int:
    """Runs the agent demo; returns the exit status."""
    from phasekv.demo.agent import AgentDemo

    def say(line: str) -> None:
        print(line, flush=True)

    model = arguments.model if arguments.model is not None else ensure_demo_model(report=say)
    AgentDemo(
        model=model,
        trajectory=arguments.trajectory,
        index=arguments.index,
        policy=arguments.policy,
        budgets=tuple(arguments.budgets),
        stride=arguments.stride,
        turns=arguments.turns,
        max_tokens=arguments.max_tokens,
        output=arguments.output,
        say=say,
    ).run()
    return 0
