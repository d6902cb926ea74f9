"""``phasekv calibrate``: measures what the policy triattention has to know of a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.environment import prepare_environment


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a model's mean queries, for the eviction policy triattention",
        description="Runs a text through the model once and writes the mean of its queries, per "
        "layer and head. The text may be about anything.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="folder or name of the model, as the engine is given it")
    parser.add_argument("--text", type=Path, required=True, help="file of UTF-8 text")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, as `calibration` in the settings"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32768, help="of the text (default: %(default)s, the most)"
    )
    parser.add_argument(
        "--context", type=int, default=4096, help="tokens of a piece of it (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="auto", help="of the model, as for vLLM (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes; returns the exit status."""
    if not arguments.out.resolve().parent.is_dir():
        raise InvalidArgumentError("out", str(arguments.out), "a file in a folder that exists")
    prepare_environment()
    from phasekv.vllm.calibrate import calibrate

    calibration = calibrate(
        arguments.model,
        arguments.text,
        max_tokens=arguments.max_tokens,
        context=arguments.context,
        dtype=arguments.dtype,
        say=lambda line: print(line, flush=True),
    )
    calibration.save(arguments.out)
    layers, heads = calibration.mean_norm.shape[:2]
    print(
        f"wrote {arguments.out}: {layers} layers of {heads} query heads over "
        f"{calibration.tokens} tokens, mean concentration {calibration.concentration:.2f}"
    )
    return 0
