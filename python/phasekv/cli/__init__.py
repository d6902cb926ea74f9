"""The ``phasekv`` command: one file per subcommand, each with ``add_parser`` and ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from phasekv import Error, __version__
from phasekv.cli import analyze, calibrate, convert, demo, info, serve


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="phasekv",
        description="KV-cache reuse for LLM agents, inside vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"phasekv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, demo, analyze, info, calibrate, convert):
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status (2 for a bad argument)."""
    parser = build_parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and known.command != "serve":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    known.engine_arguments = rest
    try:
        status: int = known.run(known)
    except BrokenPipeError:
        return 1
    except (Error, OSError) as error:
        print(f"phasekv {known.command}: {error}", file=sys.stderr)
        return 2
    return status
