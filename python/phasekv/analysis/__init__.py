"""Analyses of reuse and eviction on models of Hugging Face transformers, with their figures.

Each is a function that returns a dataclass of arrays, and a function that draws it.
``docs/analyses.md`` shows them, with their formulas and what they find.
"""

from phasekv.analysis.attention_coverage import (
    AttentionCoverage,
    attention_coverage,
    plot_attention_coverage,
)
from phasekv.analysis.attention_error_bound import (
    AttentionErrorBound,
    attention_error_bound,
    plot_attention_error_bound,
)
from phasekv.analysis.divergence_by_position import (
    DivergenceByPosition,
    divergence_by_position,
    plot_divergence_by_position,
)
from phasekv.analysis.phase_subspaces import (
    PhaseSubspaces,
    phase_subspaces,
    plot_phase_subspaces,
)
from phasekv.analysis.residual_spectrum import (
    ResidualSpectrum,
    plot_residual_spectrum,
    residual_spectrum,
)
from phasekv.analysis.results import from_json, to_json
from phasekv.analysis.reused_prompt import ReusedChunk, ReusedPrompt, measure_prompt
from phasekv.analysis.sample_data import (
    labelled_trajectory,
    load_notes,
    load_trajectory,
    measured_prompts,
)

__all__ = [
    "AttentionCoverage",
    "AttentionErrorBound",
    "DivergenceByPosition",
    "PhaseSubspaces",
    "ResidualSpectrum",
    "ReusedChunk",
    "ReusedPrompt",
    "attention_coverage",
    "attention_error_bound",
    "divergence_by_position",
    "from_json",
    "labelled_trajectory",
    "load_notes",
    "load_trajectory",
    "measure_prompt",
    "measured_prompts",
    "phase_subspaces",
    "plot_attention_coverage",
    "plot_attention_error_bound",
    "plot_divergence_by_position",
    "plot_phase_subspaces",
    "plot_residual_spectrum",
    "residual_spectrum",
    "to_json",
]
