"""Puts what the steps of run.sh have found into one JSON, and its kernels into one plot.

Example: python benchmarks/a100/collect.py build/cuda/measured build/a100
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TESTS = ("tests", "memcheck", "racecheck", "synccheck")
MEASURED = ("kernels", "prefill", "throughput")


def plot(kernels: dict[str, Any], path: Path) -> None:
    """Share of its bound that each op reaches, by number of tokens."""
    from matplotlib.figure import Figure

    rows = [row for row in kernels["rows"] if "share" in row]
    sizes = sorted({row["tokens"] for row in rows})
    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(sizes), 1)
    for index, tokens in enumerate(sizes):
        share = {row["op"]: row["share"] for row in rows if row["tokens"] == tokens}
        at = [i + (index - (len(sizes) - 1) / 2) * width for i in range(len(ops))]
        axes.bar(at, [share.get(op, 0.0) for op in ops], width, label=f"{tokens:,} tokens")
    axes.axhline(0.7, color="black", linewidth=0.8, linestyle=":", label="asked of copies: 0.7")
    axes.set_xticks(range(len(ops)), ops, rotation=35, ha="right")
    axes.set_ylabel("share of the bound (more is better)")
    axes.set_title(f"Kernels on {kernels['machine'].get('device', 'the CPU')}")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(parts: Path, output: Path) -> None:
    """Writes ``result.json`` and, where kernels were measured, ``kernels.png`` into ``output``."""
    lines = (parts / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    result: dict[str, Any] = {"steps": [json.loads(line) for line in lines]}
    for name in (*TESTS, *MEASURED):
        part = parts / f"{name}.json"
        if part.exists():
            result[name] = json.loads(part.read_text(encoding="utf-8"))
    text = json.dumps(result, indent=1)
    (output / "result.json").write_text(text + "\n", encoding="utf-8")
    if "kernels" in result:
        try:
            plot(result["kernels"], output / "kernels.png")
        except ImportError as error:
            print(f"==> no plot of the kernels: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
