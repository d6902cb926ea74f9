"""The figures and findings of ``docs/analyses.md``, on the demos' own notes and trajectory.

With ``--measure`` the analyses that are named, or all, run first, each for some minutes, and leave
their JSON in ``benchmarks/results/analysis``. The figures, and what stands between
``<!-- NAME -->`` and ``<!-- end -->`` on the page, are made of what is there.

Example: OMP_NUM_THREADS=1 python benchmarks/plots/gallery.py --measure residuals
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from phasekv import analysis
from phasekv.analysis.figures import save_figure
from phasekv.cli import main as phasekv
from phasekv.cli.analyze import in_words

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "analyses.md"
RESULTS = ROOT / "benchmarks" / "results" / "analysis"

ANALYSES = {
    "residuals": "residuals --questions 2",
    "residuals_alone": "residuals --questions 2 --encode alone",
    "error_bound": "error-bound --questions 2 --method agentkvshift",
    "error_bound_phaseshift": "error-bound --questions 2 --method phaseshift",
    "divergence": "divergence --questions 2",
    "subspaces": "subspaces",
    "subspaces_rotated": "subspaces --frame rotated",
    "coverage": "coverage --policies agentkv_recency agentkv",
}
"""By name, the words after ``phasekv analyze``."""

KINDS = {
    "residuals": (analysis.ResidualSpectrum, analysis.plot_residual_spectrum),
    "error-bound": (analysis.AttentionErrorBound, analysis.plot_attention_error_bound),
    "subspaces": (analysis.PhaseSubspaces, analysis.plot_phase_subspaces),
    "coverage": (analysis.AttentionCoverage, analysis.plot_attention_coverage),
    "divergence": (analysis.DivergenceByPosition, analysis.plot_divergence_by_position),
}
"""What each analysis returns, and what draws it."""


def main() -> None:
    """Measures what is asked for, then makes figures and page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", nargs="*", choices=list(ANALYSES), help="default: all")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        RESULTS.mkdir(parents=True, exist_ok=True)
        for name in arguments.measure or ANALYSES:
            measure(name)
    for name in ANALYSES:
        if path_of(name).exists():
            draw(name)
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def measure(name: str) -> None:
    """Runs one analysis and writes its JSON."""
    if phasekv(["analyze", *ANALYSES[name].split(), "--json", str(path_of(name))]) != 0:
        raise SystemExit(f"{name} failed")


def path_of(name: str) -> Path:
    """Where an analysis leaves its JSON."""
    return RESULTS / f"{name}.json"


def read(name: str) -> tuple[dict[str, Any], Any]:
    """An analysis's report and its result."""
    report = json.loads(path_of(name).read_text(encoding="utf-8"))
    return report, analysis.from_json(KINDS[report["analysis"]][0], report["result"])


def draw(name: str) -> None:
    """Draws one analysis beside its JSON."""
    report, result = read(name)
    save_figure(KINDS[report["analysis"]][1](result, report["subject"]), RESULTS / f"{name}.png")


def fill(text: str) -> str:
    """The page with what each analysis found."""
    for name in ANALYSES:
        if not path_of(name).exists():
            continue
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"no place for {name} in {PAGE}")
        found = found_in(name)
        text = pattern.sub(lambda match, found=found: match[1] + found + match[2], text)  # type: ignore[misc]
    return text


def found_in(name: str) -> str:
    """What an analysis found, as Markdown."""
    report, result = read(name)
    machine = report["machine"]
    lines = [f"{report['subject']} (`phasekv analyze {ANALYSES[name]}`):", ""]
    lines += [f"- {line}" for line in in_words(result)]
    lines += ["", f"{machine['processor']}, torch {machine['versions']['torch']}.", ""]
    lines += [f"![{report['subject']}](../benchmarks/results/analysis/{name}.png)", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
