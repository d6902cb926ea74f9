"""The code in the documentation runs as it stands.

A fenced block's language says what is done with it; ``file=PATH`` after the language names the file
it is. ``python`` blocks of a page run as one script each. Pages with a ``CMakeLists.txt`` are built
against an installed prefix; pages with files under ``src/`` are compiled against the source tree.
``console`` blocks must name existing commands with flags that these accept.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import REPOSITORY, run_checked
from phasekv.cli import build_parser
from phasekv.cli.serve import serve_command

PAGES = sorted([*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]*)(?:#(?P<place>[^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    file: str | None
    code: str

    @property
    def name(self) -> str:
        """Where the block is, for the test's name."""
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    blocks = []
    for match in FENCE.finditer(text):
        language, *words = match["info"].split() or [""]
        files = [word.removeprefix("file=") for word in words if word.startswith("file=")]
        blocks.append(
            Block(
                page=page,
                line=text.count("\n", 0, match.start()) + 1,
                language=language,
                file=files[0] if files else None,
                code=match["code"],
            )
        )
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def with_language(language: str) -> list[Block]:
    """Blocks of one language, on all pages."""
    return [block for block in BLOCKS if block.language == language]


def write_files(page: Path, folder: Path) -> list[Block]:
    """Lay the page's named files out in ``folder``."""
    named = [block for block in blocks_of(page) if block.file]
    for block in named:
        path = folder / str(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code)
    return named


def pages_with_file(predicate: str) -> list[Path]:
    """Pages that have a named file whose path starts with ``predicate``."""
    return [
        page
        for page in PAGES
        if any((block.file or "").startswith(predicate) for block in blocks_of(page))
    ]


def name_of(value: Block | Path) -> str:
    return value.name if isinstance(value, Block) else str(value.relative_to(REPOSITORY))


@pytest.mark.engine
@pytest.mark.parametrize("block", with_language("python"), ids=name_of)
def test_python_block_runs(block: Block, tmp_path: Path, demo_model: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code)
    environment = {
        **os.environ,
        "PHASEKV_DEMO_MODEL": str(demo_model),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", pages_with_file("CMakeLists.txt"), ids=name_of)
def test_cmake_project_of_page_builds_and_runs(
    page: Path, installed_prefix: Path, tmp_path: Path
) -> None:
    named = write_files(page, tmp_path)
    build = tmp_path / "build"
    run_checked(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        tmp_path,
        "-B",
        build,
        f"-DCMAKE_PREFIX_PATH={installed_prefix}",
    )
    run_checked("cmake", "--build", build)
    programs = [
        program for block in named for program in re.findall(r"add_executable\((\w+)", block.code)
    ]
    assert programs
    for program in programs:
        assert run_checked(build / program)


@pytest.mark.parametrize("page", pages_with_file("src/"), ids=name_of)
def test_source_files_of_page_pass_their_own_test(
    page: Path, build_directory: Path, tmp_path: Path
) -> None:
    named = write_files(page, tmp_path)
    program = tmp_path / "program"
    run_checked(
        os.environ.get("CXX", "c++"),
        *("-std=c++20", "-Wall", "-Wextra", "-Werror", "-fopenmp"),
        *("-I", REPOSITORY / "include", "-I", REPOSITORY / "src"),
        *(tmp_path / str(block.file) for block in named if str(block.file).endswith(".cpp")),
        build_directory / "src" / "libphasekv.a",
        *("-lgtest", "-lgtest_main", "-lpthread"),
        *("-o", program),
    )
    assert "PASSED" in run_checked(program)


@pytest.mark.parametrize("block", with_language("json"), ids=name_of)
def test_json_block_is_json(block: Block) -> None:
    json.loads(block.code)


@pytest.mark.parametrize("block", with_language("console"), ids=name_of)
def test_console_block_names_commands_that_exist(block: Block) -> None:
    lines = [line.removeprefix("$ ") for line in block.code.splitlines() if line.startswith("$ ")]
    assert lines, "a console block shows commands after a dollar sign"
    for line in lines:
        command, *arguments = shlex.split(line)
        if command == "make":
            run_checked("make", "--dry-run", *arguments, cwd=REPOSITORY)
        elif command == "cmake" and arguments[0] == "--preset":
            assert arguments[1] in run_checked("cmake", "--list-presets", cwd=REPOSITORY)
        elif command == "phasekv":
            check_phasekv_command(arguments)
        else:
            assert command in {"cmake", "ctest", "git", "pip"}, line


def check_phasekv_command(arguments: list[str]) -> None:
    """Fail unless ``phasekv``, and the engine for what it hands on, accepts the arguments."""
    parsed, engine_arguments = build_parser().parse_known_args(arguments)
    if parsed.command != "serve":
        assert not engine_arguments
        return
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _, *words = serve_command(parsed, engine_arguments)
    make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def places_of(page: Path) -> set[str]:
    """Names by which links reach the page's headings, as code hosts make them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text())):
        if "://" in match["target"]:
            continue
        target = page.parent / match["target"] if match["target"] else page
        assert target.exists(), match["target"]
        if match["place"] and target.suffix == ".md":
            assert match["place"] in places_of(target), match[0]
