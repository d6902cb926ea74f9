"""Registers, spills and tensor cores of the CUDA kernels, as nvcc compiles them."""

from __future__ import annotations

import importlib.util
import sys

import pytest


@pytest.fixture(scope="module")
def table(repository):
    script = repository / "benchmarks" / "cuda" / "kernel_table.py"
    spec = importlib.util.spec_from_file_location("kernel_table", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiled(table, tmp_path_factory):
    nvcc = table.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc: the CUDA kernels are not compiled here")
    folder = tmp_path_factory.mktemp("cubins")
    entries = table.compile_all(nvcc, folder)
    in_sass = table.tensor_core_instructions(folder)
    mma = table.ptx_tensor_core_instructions(folder) if in_sass is None else in_sass
    return entries, mma, in_sass is not None, folder, nvcc


def test_no_kernel_spills_or_exceeds_its_budget(table, compiled):
    entries, mma, *_ = compiled
    assert table.problems_of(entries, mma) == []


def test_the_page_has_the_table_of_this_compiler(table, compiled):
    nvcc = compiled[-1]
    page = table.PAGE.read_text(encoding="utf-8")
    if f"nvcc {table.nvcc_version(nvcc)}," not in page:
        pytest.skip("the page was written with another nvcc, which may count registers otherwise")
    rows = [line for line in table.table_of(*compiled).splitlines() if line.startswith("| ")]
    assert [row for row in rows if row not in page] == [], "run benchmarks/cuda/kernel_table.py"


def test_problems_are_noticed(table):
    spilling = table.Entry("sm_80", "copy_rows_kernel", 255, 0, 8)
    problems = "\n".join(table.problems_of([spilling], {}))
    assert "spills 8 bytes" in problems
    assert "255 registers" in problems
    assert "attend_rows: no kernel" in problems
    plain = table.Entry("sm_80", "attend_tile_kernelI13__nv_bfloat16Li128ELi64E", 168, 0, 0)
    assert "no tensor core instruction" in "\n".join(table.problems_of([plain], {plain.name: 0}))
