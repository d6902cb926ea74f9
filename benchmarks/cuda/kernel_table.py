"""What the CUDA compiler makes of the kernels, without a GPU: the table of docs/kernels.md.

Compiles every kernel for an A100 (sm_80) and for an H100 or H200 (sm_90), and checks that none
spills a register, that each keeps within its budget, and that those for the tensor cores use them.

``kernel_table.py`` writes the table; ``kernel_table.py --check`` only checks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = REPOSITORY / "kernels"
PAGE = REPOSITORY / "docs" / "kernels.md"
ARCHITECTURES = ("sm_80", "sm_90")
BEGIN = "<!-- kernel_table.py: begin -->"
END = "<!-- kernel_table.py: end -->"

# Llama 3.1 8B in bfloat16: 8 KV heads, 32 query heads, head size 128, and 4096 tokens.
TOKENS, KV_HEADS, QUERY_HEADS, HEAD_SIZE = 4096, 8, 32, 128
ROW = KV_HEADS * HEAD_SIZE * 2  # bytes of one token's keys, or values
ACTIVE_ROWS = 614  # of a prompt of 4096 tokens, at a recompute ratio of 0.15


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is launched for the shapes above.

    Parameters
    ----------
    op
        Name of the op.
    entry
        Regular expression of the mangled name.
    threads, shared_bytes
        Of a block; dynamic shared memory.
    most_registers
        Budget of every instance whose name matches `family`.
    family
        Regular expression of the instances that the budget holds for.
    least_bytes, planned_bytes
        What must be moved, and what the kernel moves.
    flops
        Multiplications and additions.
    bound
        What bounds it.
    on_tensor_cores
        Whether it claims to use them.
    """

    op: str
    entry: str
    family: str
    threads: int
    shared_bytes: int
    most_registers: int
    least_bytes: int
    planned_bytes: int
    flops: int
    bound: str
    on_tensor_cores: bool = False


def copy_kernel(op: str, direction: int) -> Kernel:
    """gather_blocks or scatter_blocks: a slot is read beside each row."""
    return Kernel(
        op=op,
        entry=rf"copy_rows_kernelILi16ELb1ELNS0_9DirectionE{direction}E",
        family=r"copy_rows_kernel",
        threads=256,
        shared_bytes=8 * 8,
        most_registers=40,
        least_bytes=TOKENS * 2 * ROW,
        planned_bytes=TOKENS * (2 * ROW + 8),
        flops=0,
        bound="memory",
    )


SEGMENTS, PROBES = 20, 30  # of mean_residual and apply_shift: chunks, and probes of each
MEANS = SEGMENTS * KV_HEADS * HEAD_SIZE * 4
AVERAGE_KEYS = TOKENS // 2
BUFFERED_QUERIES = 32  # that score_keys takes
EXPECTED_VECTORS = 2 * 144 * QUERY_HEADS  # two of each of 128 queries, their mean, and zeros
KEY_TILE = r"\w*KeyTileI13__nv_bfloat16Li128E"
KEY_TILE_BYTES = 128 * (HEAD_SIZE + 8) * 2


def attention_mass(op: str, kernel: str, queries: int, keys: int) -> Kernel:
    """One of the two passes of score_keys and of accumulate_attention."""
    query_bytes = queries * QUERY_HEADS * HEAD_SIZE * 2
    sums = queries * QUERY_HEADS * (keys // 32) * 8
    return Kernel(
        op=op,
        entry=rf"{kernel}I{KEY_TILE}",
        family=rf"{kernel}I\w*KeyTileI(13__nv_bfloat16|6__half)",
        threads=128,
        shared_bytes=KEY_TILE_BYTES,
        most_registers=200,
        least_bytes=TOKENS * (ROW + KV_HEADS * 4) + query_bytes,
        # Every 128 keys of a KV head see all its queries, mostly from the L2 cache.
        planned_bytes=TOKENS * (ROW + KV_HEADS * 4) + TOKENS // 128 * query_bytes + sums,
        flops=2 * queries * QUERY_HEADS * keys * HEAD_SIZE,
        bound="memory" if queries == BUFFERED_QUERIES else "tensor cores",
        on_tensor_cores=True,
    )


def quantization(op: str, axis: str) -> Kernel:
    """Quantize or dequantize to 2 bits in groups of 32 tokens (keys) or channels (values)."""
    channels = 2 if (op, axis) == ("quantize", "token") else 8  # of a thread at once
    quantized = ROW // 8 + ROW // 16
    # Of a group that has two words, both want the scale and the zero point.
    read_again = ROW // 16 if op == "dequantize" else 0
    return Kernel(
        op=f"{op} along {axis}s",
        entry=rf"[0-9]{op}_{axis}_groups_kernelILi2ELi{channels}E",
        family=rf"[0-9]{op}_{axis}_groups_kernel",
        threads=128,
        shared_bytes=0,
        most_registers=64,
        least_bytes=TOKENS * (ROW + quantized),
        planned_bytes=TOKENS * (ROW + quantized + read_again),
        flops=TOKENS * KV_HEADS * HEAD_SIZE * (4 if op == "quantize" else 2),
        bound="memory",
    )


TABLE = (
    copy_kernel("gather_blocks", 0),
    copy_kernel("scatter_blocks", 1),
    Kernel(
        op="rotate_keys",
        entry=r"rotate_keys_kernelILi8E",
        family=r"rotate_keys_kernel",
        threads=256,
        shared_bytes=8 * (8 + HEAD_SIZE * 4 + 4),
        most_registers=64,
        least_bytes=TOKENS * 2 * ROW,
        planned_bytes=TOKENS * (2 * ROW + 8),
        flops=TOKENS * KV_HEADS * HEAD_SIZE * 3,
        bound="memory",
    ),
    Kernel(
        op="divergence",
        entry=r"divergence_kernelILi8E",
        family=r"divergence_kernel",
        threads=256,
        shared_bytes=0,
        most_registers=48,
        least_bytes=TOKENS * (2 * ROW + 4),
        planned_bytes=TOKENS * (2 * ROW + 4),
        flops=TOKENS * KV_HEADS * HEAD_SIZE * 3,
        bound="memory",
    ),
    Kernel(
        op="mean_residual",
        entry=r"mean_residual_kernelILi8E",
        family=r"mean_residual_kernel",
        threads=128,
        shared_bytes=128 * 16 * 4,
        most_registers=104,
        least_bytes=SEGMENTS * PROBES * 2 * ROW + MEANS,
        planned_bytes=SEGMENTS * PROBES * (2 * ROW + KV_HEADS * 24) + MEANS,
        flops=SEGMENTS * PROBES * KV_HEADS * HEAD_SIZE * 2,
        bound="memory; float64 where it rotates",
    ),
    Kernel(
        op="apply_shift",
        entry=r"apply_shift_kernelILi8E",
        family=r"apply_shift_kernel",
        threads=256,
        shared_bytes=8 * (32 + 2 * (8 + HEAD_SIZE * 4 + 4)),
        most_registers=72,
        least_bytes=TOKENS * 2 * ROW + MEANS,
        planned_bytes=TOKENS * (2 * ROW + 20) + MEANS,
        flops=TOKENS * KV_HEADS * HEAD_SIZE * 5,
        bound="memory",
    ),
    Kernel(
        op="push_queries",
        entry=r"push_queries_kernelILi8E",
        family=r"push_queries_kernel",
        threads=256,
        shared_bytes=0,
        most_registers=32,
        least_bytes=32 * 2 * QUERY_HEADS * HEAD_SIZE * 2,
        planned_bytes=32 * (2 * QUERY_HEADS * HEAD_SIZE * 2 + 2 * 16),
        flops=0,
        bound="memory",
    ),
    *(quantization(op, axis) for op in ("quantize", "dequantize") for axis in ("token", "channel")),
    Kernel(
        op="compact",
        entry=r"compact_kernelILi16ELb1E",
        family=r"compact_kernel",
        threads=256,
        shared_bytes=32 * 32,
        most_registers=48,
        least_bytes=2048 * 4 * ROW,
        planned_bytes=2048 * (4 * ROW + KV_HEADS * 16),
        flops=0,
        bound="memory",
    ),
    Kernel(
        op="select_top",
        entry=r"12count_kernel",
        family=r"12count_kernel",
        threads=256,
        shared_bytes=256 * (4 + 4 + 8) + 16,
        most_registers=48,
        least_bytes=TOKENS * 4 + SEGMENTS * PROBES * 8,
        planned_bytes=6 * TOKENS * 4 + SEGMENTS * PROBES * 8,
        flops=0,
        bound="latency: 20 blocks",
    ),
    Kernel(
        op="attend_rows",
        entry=r"attend_tile_kernelI13__nv_bfloat16Li128ELi64E",
        family=r"attend_tile_kernel\w+Li(64|96|128|192)E",
        threads=128,
        shared_bytes=(64 + 64 + 64) * (HEAD_SIZE + 8) * 2 + 64 * 4,
        most_registers=216,
        least_bytes=ACTIVE_ROWS * 2 * QUERY_HEADS * HEAD_SIZE * 2 + TOKENS * 2 * ROW,
        # Every 16 rows of a KV head pass over half of the keys, mostly from the L2 cache.
        planned_bytes=ACTIVE_ROWS * 2 * QUERY_HEADS * HEAD_SIZE * 2
        + ACTIVE_ROWS // 16 * AVERAGE_KEYS * 2 * ROW,
        flops=6 * ACTIVE_ROWS * QUERY_HEADS * AVERAGE_KEYS * HEAD_SIZE,
        bound="tensor cores",
        on_tensor_cores=True,
    ),
    Kernel(
        op="attend_rows, head size 256",
        entry=r"attend_tile_kernelI13__nv_bfloat16Li256ELi16E",
        family=r"attend_tile_kernel\w+Li256E",
        threads=128,
        shared_bytes=(64 + 16 + 16) * (256 + 8) * 2 + 64 * 4,
        most_registers=255,
        least_bytes=2 * (ACTIVE_ROWS * 2 * QUERY_HEADS * HEAD_SIZE * 2 + TOKENS * 2 * ROW),
        planned_bytes=2 * (ACTIVE_ROWS * 2 * QUERY_HEADS * HEAD_SIZE * 2)
        + ACTIVE_ROWS // 16 * AVERAGE_KEYS * 4 * ROW,
        flops=6 * ACTIVE_ROWS * QUERY_HEADS * AVERAGE_KEYS * 256,
        bound="tensor cores",
        on_tensor_cores=True,
    ),
    Kernel(
        op="attend_rows in float32",
        entry=r"attend_simt_kernelILi128E",
        family=r"attend_simt_kernel",
        threads=128,
        shared_bytes=(3 * 32 * (HEAD_SIZE + 1) + 32 * 33 + 32) * 4,
        most_registers=136,
        least_bytes=2 * (ACTIVE_ROWS * 2 * QUERY_HEADS * HEAD_SIZE * 2 + TOKENS * 2 * ROW),
        planned_bytes=2 * ACTIVE_ROWS * 2 * QUERY_HEADS * HEAD_SIZE * 2
        + ACTIVE_ROWS // 8 * AVERAGE_KEYS * 4 * ROW,
        flops=4 * ACTIVE_ROWS * QUERY_HEADS * AVERAGE_KEYS * HEAD_SIZE,
        bound="float32 arithmetic",
    ),
    attention_mass("score_keys, first pass", "sum_weights_kernel", BUFFERED_QUERIES, TOKENS),
    attention_mass("score_keys, second pass", "add_weights_kernel", BUFFERED_QUERIES, TOKENS),
    attention_mass("accumulate_attention, first pass", "sum_weights_kernel", TOKENS, AVERAGE_KEYS),
    attention_mass("accumulate_attention, second pass", "add_weights_kernel", TOKENS, AVERAGE_KEYS),
    Kernel(
        op="key_redundancy",
        entry=rf"search_kernelI{KEY_TILE}",
        family=r"search_kernelI\w*KeyTileI(13__nv_bfloat16|6__half)",
        threads=128,
        shared_bytes=KEY_TILE_BYTES,
        most_registers=200,
        least_bytes=TOKENS * (ROW + KV_HEADS * 4),
        # Every 128 keys of a KV head pass over all others, mostly from the L2 cache.
        planned_bytes=TOKENS // 128 * TOKENS * (ROW + KV_HEADS * 4),
        flops=2 * TOKENS * TOKENS * KV_HEADS * HEAD_SIZE,
        bound="tensor cores",
        on_tensor_cores=True,
    ),
    Kernel(
        op="keydiff_score, each of two passes",
        entry=r"compare_keys_kernel",
        family=r"(measure|compare)_keys_kernel",
        threads=128,
        shared_bytes=4 * 256 * 4,
        most_registers=64,
        least_bytes=TOKENS * (ROW + KV_HEADS * 4),
        planned_bytes=TOKENS * (ROW + 2 * KV_HEADS * 4),
        flops=2 * TOKENS * KV_HEADS * HEAD_SIZE,
        bound="memory",
    ),
    Kernel(
        op="expected_attention_score, keys",
        entry=rf"expect_logits_kernelI{KEY_TILE}",
        family=r"expect_logits_kernelI\w*KeyTileI(13__nv_bfloat16|6__half)",
        threads=128,
        shared_bytes=KEY_TILE_BYTES,
        most_registers=200,
        least_bytes=TOKENS * (ROW + QUERY_HEADS * 4) + EXPECTED_VECTORS * HEAD_SIZE * 2,
        # Every 128 keys of a KV head see all vectors of its query heads, mostly from the L2 cache.
        planned_bytes=TOKENS * (ROW + QUERY_HEADS * 4)
        + TOKENS // 128 * EXPECTED_VECTORS * HEAD_SIZE * 2,
        flops=2 * TOKENS * EXPECTED_VECTORS * HEAD_SIZE,
        bound="tensor cores",
        on_tensor_cores=True,
    ),
    Kernel(
        op="expected_attention_score, values",
        entry=r"weigh_values_kernel",
        family=r"weigh_values_kernel",
        threads=128,
        shared_bytes=0,
        most_registers=64,
        least_bytes=TOKENS * (ROW + QUERY_HEADS * 4 + KV_HEADS * 4),
        planned_bytes=TOKENS * (ROW + QUERY_HEADS * 4 + 2 * KV_HEADS * 4),
        flops=2 * TOKENS * KV_HEADS * HEAD_SIZE,
        bound="memory",
    ),
    Kernel(
        op="triattention_score",
        entry=r"12score_kernel",
        family=r"12score_kernel",
        threads=128,
        shared_bytes=(32 * (HEAD_SIZE + 68) + 4 * (HEAD_SIZE + 64) + 4 * 32) * 4,
        most_registers=64,
        least_bytes=TOKENS * (ROW + KV_HEADS * 4),
        # Every 32 keys read the weights of their query heads, from a cache.
        planned_bytes=TOKENS * (ROW + KV_HEADS * 4)
        + TOKENS // 32 * QUERY_HEADS * (HEAD_SIZE + HEAD_SIZE // 2) * 4,
        flops=TOKENS * QUERY_HEADS * 2 * (HEAD_SIZE + HEAD_SIZE // 2),
        bound="memory",
    ),
)
COPY_LIKE = ("gather_blocks", "scatter_blocks", "rotate_keys", "divergence", "apply_shift",
             "push_queries", "compact", "quantize along tokens", "quantize along channels",
             "dequantize along tokens", "dequantize along channels")  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One compiled kernel instance."""

    architecture: str
    name: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def find_nvcc() -> str | None:
    """Path of nvcc, or None."""
    return shutil.which("nvcc")


def nvcc_version(nvcc: str) -> str:
    """Such as "13.0.88"."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else "of an unknown version"


def compile_kernel(nvcc: str, source: Path, architecture: str, output: Path) -> str:
    """Compile to PTX, and that to a cubin beside it; what ptxas says of it."""
    ptx = output.with_suffix(".ptx")
    includes = [f"-I{REPOSITORY / folder}" for folder in ("include", "src", "kernels")]
    said = ""
    for command in (
        [nvcc, "-std=c++20", f"-arch={architecture}", "-ptx", *includes, "-o", ptx, source],
        [nvcc, f"-arch={architecture}", "-Xptxas=-v", "-cubin", "-o", output, ptx],
    ):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise RuntimeError(f"{source.name} for {architecture}:\n{result.stderr}")
        said = result.stderr
    return said


def parse_ptxas(text: str) -> list[Entry]:
    """Entries of ``ptxas -v``."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\S+)' for '(?P<architecture>\S+)'"
        r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    entries = []
    for match in pattern.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        entries.append(
            Entry(
                architecture=match["architecture"],
                name=match["name"],
                registers=int(match["registers"]),
                shared_bytes=int(shared[1]) if shared else 0,
                spilled_bytes=int(match["stores"]) + int(match["loads"]),
            )
        )
    return entries


def compile_all(nvcc: str, folder: Path) -> list[Entry]:
    """Every kernel for every architecture; PTX and cubins are left in `folder`."""
    jobs = [
        (source, architecture)
        for source in sorted(KERNELS.glob("*.cu"))
        for architecture in ARCHITECTURES
    ]

    def run(job: tuple[Path, str]) -> list[Entry]:
        source, architecture = job
        output = folder / f"{source.stem}.{architecture}.cubin"
        return parse_ptxas(compile_kernel(nvcc, source, architecture, output))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [entry for entries in pool.map(run, jobs) for entry in entries]


def tensor_core_instructions(folder: Path) -> dict[str, int] | None:
    """HMMA instructions of each entry for sm_80, or None without cuobjdump to look for them."""
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        return None
    counts: dict[str, int] = {}
    for cubin in sorted(folder.glob("*.sm_80.cubin")):
        text = subprocess.run(
            [cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        for part in text.split("Function : ")[1:]:
            counts[part.split()[0]] = part.count("HMMA.16816")
    return counts


def ptx_tensor_core_instructions(folder: Path) -> dict[str, int]:
    """mma instructions of each entry in PTX, which the assembler can only turn into HMMA."""
    counts: dict[str, int] = {}
    for ptx in sorted(folder.glob("*.sm_80.ptx")):
        for part in ptx.read_text(encoding="utf-8").split(".entry ")[1:]:
            counts[part.split("(")[0].strip()] = part.count("mma.sync.aligned.m16n8k16")
    return counts


def occupancies(
    folder: Path, nvcc: str, questions: list[tuple[str, int, int, int, int]]
) -> list[int]:
    """Blocks per multiprocessor of (architecture, registers, threads, static, dynamic bytes)."""
    program = folder / "occupancy"
    source = Path(__file__).parent / "occupancy.cpp"
    # By nvcc, which knows where the header is; nothing of the program runs on a device.
    subprocess.run([nvcc, "-std=c++20", "-o", str(program), str(source)], check=True)
    lines = "\n".join(" ".join(map(str, question)) for question in questions)
    result = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    return [int(line) for line in result.stdout.split()]


def problems_of(entries: list[Entry], mma: dict[str, int]) -> list[str]:
    """What is wrong: spills, budgets, missing tensor cores, too many bytes."""
    problems = [
        f"{entry.name} spills {entry.spilled_bytes} bytes on {entry.architecture}"
        for entry in entries
        if entry.spilled_bytes > 0
    ]
    for kernel in TABLE:
        family = [entry for entry in entries if re.search(kernel.family, entry.name)]
        problems += [
            f"{entry.name} needs {entry.registers} registers on {entry.architecture}, "
            f"more than {kernel.most_registers}"
            for entry in family
            if entry.registers > kernel.most_registers
        ]
        if sum(bool(re.search(kernel.entry, entry.name)) for entry in family) != len(ARCHITECTURES):
            problems.append(f"{kernel.op}: no kernel of the name {kernel.entry}")
        if kernel.on_tensor_cores:
            problems += [
                f"{entry.name} has no tensor core instruction"
                for entry in family
                if mma.get(entry.name, 0) == 0
            ]
        if kernel.op in COPY_LIKE and kernel.planned_bytes > 1.1 * kernel.least_bytes:
            problems.append(f"{kernel.op} moves more than 1.1 times the bytes that it must")
    return problems


def scaled(number: float, units: tuple[str, ...]) -> str:
    """Three digits and a unit."""
    for unit in units[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {units[-1]}"


def table_of(
    entries: list[Entry], mma: dict[str, int], in_sass: bool, folder: Path, nvcc: str
) -> str:
    """The table in Markdown."""
    rows = []
    questions = []
    for kernel in TABLE:
        by_architecture = {
            entry.architecture: entry for entry in entries if re.search(kernel.entry, entry.name)
        }
        rows.append((kernel, by_architecture))
        questions += [
            (
                architecture,
                by_architecture[architecture].registers,
                kernel.threads,
                by_architecture[architecture].shared_bytes,
                kernel.shared_bytes,
            )
            for architecture in ARCHITECTURES
        ]
    blocks = iter(occupancies(folder, nvcc, questions))
    lines = [
        "| kernel | bytes, of the least | operations | bound | registers | shared memory "
        "| occupancy | mma |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kernel, by_architecture in rows:
        registers = " / ".join(str(by_architecture[a].registers) for a in ARCHITECTURES)
        occupancy = " / ".join(
            f"{100 * next(blocks) * kernel.threads / 2048:.0f} %" for _ in ARCHITECTURES
        )
        planned = scaled(kernel.planned_bytes, ("B", "kB", "MB", "GB"))
        operations = scaled(kernel.flops, ("", "k", "M", "G", "T")).strip()
        lines.append(
            f"| {kernel.op} | {planned}, {kernel.planned_bytes / kernel.least_bytes:.3g} x "
            f"| {operations} | {kernel.bound} | {registers} "
            f"| {kernel.shared_bytes / 1024:.1f} KiB | {occupancy} "
            f"| {mma.get(by_architecture['sm_80'].name, 0) or ''} |"
        )
    lines += [
        "",
        f"{len(entries)} kernels by nvcc {nvcc_version(nvcc)}, none of which spills. Registers and "
        "occupancy are those of sm_80 (A100) / sm_90 (H100, H200), with the shared memory of the "
        "launch. The last column counts "
        + ("HMMA in the SASS" if in_sass else "mma instructions in the PTX")
        + " of sm_80.",
    ]
    return "\n".join(lines)


def main() -> int:
    """Check, and write the table unless told otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("there is no nvcc on PATH", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = compile_all(nvcc, folder)
        in_sass = tensor_core_instructions(folder)
        mma = ptx_tensor_core_instructions(folder) if in_sass is None else in_sass
        problems = problems_of(entries, mma)
        for problem in problems:
            print(problem, file=sys.stderr)
        if problems or arguments.check:
            return 1 if problems else 0
        table = table_of(entries, mma, in_sass is not None, folder, nvcc)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
