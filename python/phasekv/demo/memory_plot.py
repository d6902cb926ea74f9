"""Draws the memory demo's result from its JSON."""

from __future__ import annotations

from typing import Any

FULL_RECOMPUTE = "full_recompute"
COLORS = {
    FULL_RECOMPUTE: "#6b7280",
    "full_reuse": "#c2410c",
    "cacheblend": "#b58900",
    "cacheblend_lmcache": "#8a6d00",
    "epic": "#7c3aed",
    "agentkvshift": "#0369a1",
    "phaseshift": "#047857",
}


def memory_demo_figure(result: dict[str, Any]) -> Any:
    """Divergence from full recompute, and time to first token, a bar per method.

    Parameters
    ----------
    result
        The content of ``demo.json``.

    Returns
    -------
    Figure
        Of matplotlib, not yet laid out.
    """
    from matplotlib.figure import Figure

    methods = result["methods"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)

    reusing = [name for name in methods if name != FULL_RECOMPUTE]
    kl = [methods[name]["kl"] for name in reusing]
    errors = [
        [entry["mean"] - entry["low"] for entry in kl],
        [entry["high"] - entry["mean"] for entry in kl],
    ]
    left.barh(
        reusing,
        [entry["mean"] for entry in kl],
        xerr=errors,
        color=[COLORS[name] for name in reusing],
        error_kw={"ecolor": "#111827", "capsize": 3},
    )
    left.set_xlabel("KL(full recompute ‖ method) in nats, lower is closer")
    left.set_title("Distance from full recompute")

    names = list(methods)
    bars = right.barh(
        names,
        [methods[name]["first_token_seconds"] for name in names],
        color=[COLORS[name] for name in names],
    )
    right.bar_label(bars, [f" {methods[name]['speedup']:.1f}x" for name in names])
    right.margins(x=0.12)
    right.set_xlabel("median time to first token in seconds")
    right.set_title("Time to first token")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{result['model']}, {len(result['questions'])} questions over "
        f"{result['retrieved_notes']} notes, r = {result['ratio']}\n"
        f"{result['machine']['processor']}, {result['machine']['cores']} cores",
        fontsize=10,
    )
    return figure
