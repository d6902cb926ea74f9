"""``phasekv info``: what is active on this machine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from phasekv import Error, __version__
from phasekv.evaluation.environment import prepare_environment

# Head size, block size and dtype for which vLLM's CPU backend chooses different block layouts; a
# head size that is no multiple of 32 means "vec16".
_LAYOUT_CASES = (
    (64, 128, "float32"),
    (64, 128, "bfloat16"),
    (64, 128, "float16"),
    (80, 128, "float32"),
    (80, 128, "bfloat16"),
    (128, 32, "float32"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "info",
        help="tell what is active: instruction set, layouts and their self-tests, engine, defaults",
        description="Tells what is active on this machine. The exit status is 1 if PhaseKV cannot "
        "work inside vLLM here.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if PhaseKV can serve here, else 1."""
    findings = collect()
    if arguments.json:
        print(json.dumps(findings, indent=2))
    else:
        print(in_words(findings))
    return 0 if findings["ready"] else 1


def collect() -> dict[str, Any]:
    """All findings as plain data; a part that fails holds its ``error`` instead."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "core": _core,
        "engine": _engine,
        "plugin": _plugin,
        "layouts": _layouts,
        "defaults": _defaults,
    }
    findings: dict[str, Any] = {"version": __version__}
    for name, part in parts.items():
        findings[name] = _guarded(part)
    findings["ready"] = (
        not any("error" in findings[name] for name in parts)
        and findings["plugin"]["registered"]
        and findings["plugin"]["allowed"]
        and all(test["passed"] for test in findings["layouts"]["self_tests"])
    )
    return findings


def in_words(findings: dict[str, Any]) -> str:
    """The findings as a short text."""
    lines = [f"phasekv {findings['version']}"]
    for name, tell in (
        ("core", _core_in_words),
        ("engine", _engine_in_words),
        ("plugin", _plugin_in_words),
        ("layouts", _layouts_in_words),
        ("defaults", _defaults_in_words),
    ):
        part = findings[name]
        text = f"not available: {part['error']}" if "error" in part else tell(part)
        lines.append(f"  {name:<9} {text}")
    lines.append("ready" if findings["ready"] else "not ready")
    return "\n".join(lines)


def _guarded(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except (Error, ImportError, OSError) as error:
        return {"error": str(error)}


def _core() -> dict[str, Any]:
    from phasekv import _core as core

    return {
        "instruction_set": core.active_cpu_isa(),
        "supported": list(core.supported_cpu_isas()),
        "cuda": core.cuda_is_built(),
        "methods": list(core.method_names()),
    }


def _core_in_words(part: dict[str, Any]) -> str:
    cuda = "CUDA kernels" if part["cuda"] else "no CUDA kernels"
    return (
        f"{part['instruction_set']} in use, {', '.join(part['supported'])} supported, {cuda}; "
        f"methods {', '.join(part['methods'])}"
    )


def _engine() -> dict[str, Any]:
    prepare_environment()
    import vllm

    from phasekv.vllm.compatibility import check_engine_version

    check_engine_version(vllm.__version__)
    return {"name": "vllm", "version": vllm.__version__}


def _engine_in_words(part: dict[str, Any]) -> str:
    return f"{part['name']} {part['version']}"


def _plugin() -> dict[str, Any]:
    from phasekv.cli.serve import PLUGIN_GROUP, PLUGIN_NAME, plugin_is_registered

    chosen = os.environ.get("VLLM_PLUGINS")
    names = None if chosen is None else [name.strip() for name in chosen.split(",")]
    return {
        "group": PLUGIN_GROUP,
        "registered": plugin_is_registered(),
        "allowed": names is None or PLUGIN_NAME in names,
    }


def _plugin_in_words(part: dict[str, Any]) -> str:
    if not part["registered"]:
        return f"no entry point in {part['group']}: install phasekv with pip"
    return "registered" if part["allowed"] else "registered, but VLLM_PLUGINS leaves it out"


def _layouts() -> dict[str, Any]:
    import torch
    from vllm.platforms import current_platform

    from phasekv.vllm.compatibility import check_cuda_build
    from phasekv.vllm.layout_check import check_layout

    if current_platform.is_cuda():
        # An engine tests its own when it has made its cache.
        check_cuda_build()
        return {"self_tests": []}
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tests = []
    for head_size, block_size, dtype_name in _LAYOUT_CASES:
        dtype = getattr(torch, dtype_name)
        layout = _get_attn_isa(dtype, block_size, head_size)
        test: dict[str, Any] = {
            "layout": layout,
            "dtype": dtype_name,
            "head_size": head_size,
            "block_size": block_size,
            "passed": True,
        }
        try:
            check_layout(layout, dtype, block_size, head_size)
        except Error as error:
            test["passed"] = False
            test["reason"] = str(error)
        tests.append(test)
    return {"self_tests": tests}


def _layouts_in_words(part: dict[str, Any]) -> str:
    if not part["self_tests"]:
        return "tested when an engine starts on the GPU"
    words = []
    for test in part["self_tests"]:
        result = "passed" if test["passed"] else f"failed ({test['reason']})"
        words.append(
            f"{test['layout']} {test['dtype']} head size {test['head_size']} "
            f"block size {test['block_size']}: {result}"
        )
    return "\n            ".join(words)


def _defaults() -> dict[str, Any]:
    from dataclasses import asdict

    from phasekv.vllm.config import PhaseKVConfig

    return asdict(PhaseKVConfig.parse({}))


def _defaults_in_words(part: dict[str, Any]) -> str:
    choice = part["choice"]
    auto = "on" if part["auto"] else "off"
    directory = part["store_directory"] or "memory only"
    return (
        f"method {choice['method']}, ratio {choice['ratio']}, auto {auto}, "
        f"store {part['chunk_store_bytes'] / (1 << 30):g} GiB per worker, {directory}"
    )
