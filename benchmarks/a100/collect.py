"""Puts what run.sh found into one JSON, and its kernels into one plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot(kernels: dict[str, Any], path: Path) -> None:
    """Share of its bound that each op reaches, by number of tokens."""
    rows = kernels["rows"]
    sizes = sorted({row["tokens"] for row in rows})
    ops = list(dict.fromkeys(row["op"] for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / len(sizes)
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


def main(folder: Path) -> None:
    """Writes ``result.json`` and, where kernels were measured, ``kernels.png`` into ``folder``."""
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    result: dict[str, Any] = {"steps": [json.loads(line) for line in lines]}
    for name in ("kernels", "prefill", "throughput"):
        measured = folder / f"{name}.json"
        if measured.exists():
            result[name] = json.loads(measured.read_text(encoding="utf-8"))
    if "kernels" in result:
        plot(result["kernels"], folder / "kernels.png")
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"==> {folder / 'result.json'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
