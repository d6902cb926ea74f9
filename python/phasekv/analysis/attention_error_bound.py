"""How far attention is off in one layer when chunks are reused, and what a bound says of it.

A query attends fresh keys k_j and values v_j with weights a and reaches o; with the keys and values
that a method uses instead, k_j - e_j and v_j - f_j, the weights are b and it reaches p. With
delta_j = scale q.e_j, rho_j = |v_j - o| and m_j = max(a_j, b_j)::

    |o - p| <= sum_j b_j |f_j| + sum_j m_j (rho_j + sum_i m_i rho_i) |delta_j|

since o - p = sum b f + sum (a - b)(v - o), a_j - b_j is at most m_j |delta_j - c| (the logarithmic
mean of a_j and b_j is at most m_j) and c, the log of sum_j b_j exp(delta_j), lies between
sum b delta and sum a delta. |delta_j| is bounded by scale |q| |e_j|. The bound is linear in |e_j|
and |f_j|, so what makes them can be told apart: with residual r_j, the chunk's mean residual mu,
the probes' mean mu' and weight w_j, a token that is not recomputed is off by

    r_j - w_j mu' = (r_j - w_j mu) + w_j (mu - mu')

what one offset cannot express (its bias), and what few probes do not know of it (estimation). The
paper of AgentKVShift (arXiv 2607.21604) argues with such a bound; this form of it is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phasekv import _core
from phasekv.analysis.figures import BLUE, GRAY, GREEN, ORANGE, VIOLET, label_layers, new_figure
from phasekv.analysis.progress import progress
from phasekv.analysis.results import Floats
from phasekv.analysis.reused_prompt import ReusedPrompt, rotated
from phasekv.errors import InvalidArgumentError

PARTS = ("keys, bias", "keys, estimation", "values, bias", "values, estimation")
"""What the bound adds up."""


@dataclass(frozen=True)
class AttentionErrorBound:
    """What ``attention_error_bound`` finds, each a mean over queries, query heads and prompts.

    Attributes
    ----------
    method : str
        Name of the reuse method.
    ratio : float
        Nominal recompute ratio.
    layers : numpy.ndarray
        ``[layers]`` after the check layer.
    measured, uncorrected : numpy.ndarray
        ``[layers]``: |o - p| / |o| with the method's keys and values, and with cached ones.
    parts : numpy.ndarray
        ``[PARTS, layers]``: what the bound on ``measured`` adds up.
    tightest : float
        Largest |o - p| of any query and head over its own bound; the bound holds: at most 1.
    """

    method: str
    ratio: float
    layers: Floats
    measured: Floats
    uncorrected: Floats
    parts: Floats
    tightest: float


def attention_error_bound(
    prompts: Sequence[ReusedPrompt], method: _core.Method, ratio: float = 0.1
) -> AttentionErrorBound:
    """Error and bound of the attention that the tokens after the last chunk pay.

    Each layer is looked at alone: its queries, and the keys and values of probes and of all that
    is in no chunk, are those of the full prefill.

    Parameters
    ----------
    prompts : sequence of ReusedPrompt
        From ``measure_prompt``.
    method : Method
        Of reuse.
    ratio : float
        Nominal recompute ratio r in [0, 1].
    """
    layers = range(method.check_layer + 1, prompts[0].layers)
    if not layers:
        raise InvalidArgumentError("model", f"{prompts[0].layers} layers", "one after the check")
    sums = np.zeros((2 + len(PARTS), len(layers)))
    tightest = 0.0
    for prompt in progress(prompts, "prompts"):
        chosen = prompt.select(method, ratio)
        for column, layer in enumerate(layers):
            used = _used(prompt, method, chosen, layer)
            found, worst = _errors(prompt, layer, *used)
            sums[:, column] += found / len(prompts)
            tightest = max(tightest, worst)
    return AttentionErrorBound(
        method=method.name,
        ratio=ratio,
        layers=np.array(layers, dtype=np.float64),
        measured=sums[0],
        uncorrected=sums[1],
        parts=sums[2:],
        tightest=tightest,
    )


@dataclass(frozen=True)
class _Errors:
    """Of a layer's keys or values, float64; all but the chunks' tokens is zero.

    ``residual`` (fresh minus cached) and ``error`` (fresh minus used) are [tokens, kv heads, head
    size], ``bias`` and ``estimation`` norms [tokens, kv heads].
    """

    residual: torch.Tensor
    error: torch.Tensor
    bias: torch.Tensor
    estimation: torch.Tensor


def _used(
    prompt: ReusedPrompt, method: _core.Method, chosen: Any, layer: int
) -> tuple[_Errors, _Errors]:
    found = []
    for kind, states, probe_at in (("keys", prompt.keys, 0), ("values", prompt.values, 1)):
        zeros = torch.zeros_like(states[layer], dtype=torch.float64)
        errors = _Errors(zeros, zeros.clone(), zeros[..., 0].clone(), zeros[..., 0].clone())
        for chunk, flags in zip(prompt.chunks, chosen, strict=True):
            rows = slice(chunk.begin, chunk.end)
            probe, weights = flags[probe_at], flags[probe_at + 2]
            residuals = prompt.residuals(chunk, layer, kind)
            mean, estimate = _means(prompt, method, chunk, layer, kind, probe)
            shift = weights[:, None, None] * mean
            shift_used = weights[:, None, None] * estimate
            reused = (~probe).double()[:, None]
            errors.residual[rows] = residuals
            errors.error[rows] = (residuals - shift_used) * reused[..., None]
            errors.bias[rows] = (residuals - shift).norm(dim=-1) * reused
            errors.estimation[rows] = (shift - shift_used).norm(dim=-1) * reused
        found.append(errors)
    return found[0], found[1]


def _means(
    prompt: ReusedPrompt, method: _core.Method, chunk: Any, layer: int, kind: str, probe: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean residual of a chunk's tokens and of its probes, as each of its tokens gets it."""
    turn = kind == "keys" and method.frame == "unrotated"
    residuals = prompt.residuals(chunk, layer, "keys, unrotated" if turn else kind)
    means = []
    for chosen in (residuals, residuals[probe]):
        mean = chosen.mean(0) if len(chosen) else torch.zeros_like(residuals[0])
        mean = mean.expand_as(residuals)
        if turn:
            forward = torch.arange(chunk.begin, chunk.end)
            mean = rotated(mean.float().contiguous(), forward, prompt.rope).double()
        means.append(mean)
    return means[0], means[1]


def _errors(prompt: ReusedPrompt, layer: int, key: _Errors, value: _Errors) -> tuple[Floats, float]:
    begin = prompt.chunks[-1].end
    keys, values = prompt.keys[layer].double(), prompt.values[layer].double()
    queries = prompt.queries[layer, begin:].double()
    tokens, kv_heads, _ = keys.shape
    group = queries.shape[1] // kv_heads
    hidden = torch.arange(tokens)[None] > torch.arange(begin, tokens)[:, None]
    sums = torch.zeros(2 + len(PARTS), dtype=torch.float64)
    tightest = 0.0
    for head in range(queries.shape[1]):
        of = head // group
        query = queries[:, head]

        def attend(keys: torch.Tensor, query: torch.Tensor = query) -> torch.Tensor:
            logits = prompt.scale * query @ keys.T
            return logits.masked_fill(hidden, -torch.inf).softmax(-1)

        fresh = attend(keys[:, of])
        out = fresh @ values[:, of]
        used = attend((keys - key.error)[:, of])
        error = (out - used @ (values - value.error)[:, of]).norm(dim=-1)
        cached = attend((keys - key.residual)[:, of])
        uncorrected = (out - cached @ (values - value.residual)[:, of]).norm(dim=-1)
        larger = torch.maximum(fresh, used)
        distance = torch.cdist(out, values[:, of])
        reach = distance + (larger * distance).sum(-1, keepdim=True)
        by_key = prompt.scale * query.norm(dim=-1, keepdim=True) * larger * reach
        parts = torch.stack(
            [
                by_key @ key.bias[:, of],
                by_key @ key.estimation[:, of],
                used @ value.bias[:, of],
                used @ value.estimation[:, of],
            ]
        )
        bound = parts.sum(0)
        size = out.norm(dim=-1)
        # Rounding is no error where the bound says that there is none.
        tightest = max(tightest, float((error / (bound + 1e-9 * size)).max()))
        relative = torch.cat([error[None], uncorrected[None], parts]) / size
        sums += relative.mean(1)
    return (sums / queries.shape[1]).numpy(), tightest


def plot_attention_error_bound(result: AttentionErrorBound, subject: str = "") -> Any:
    """The measured error beside that of plain reuse, and the bound by its parts.

    Parameters
    ----------
    result : AttentionErrorBound
        What is drawn.
    subject : str
        Model and data, for the heading.
    """
    figure, axes = new_figure(
        f"Attention output over reused chunks, {result.method} at r = {result.ratio:g}, each layer "
        "alone",
        subject,
        1,
        2,
        (12.5, 4),
    )
    left, right = axes[0]
    left.plot(result.layers, result.uncorrected, color=GRAY, label="cached, nothing corrected")
    left.plot(result.layers, result.measured, color=BLUE, label=result.method)
    left.set_ylim(bottom=0)
    left.set_title("measured error", fontsize=9)
    left.set_ylabel("|error| over |output|, mean (0: exact)")
    right.plot(result.layers, result.parts.sum(0), color="black", linewidth=2, label="bound")
    for part, name, color in zip(result.parts, PARTS, (BLUE, GREEN, ORANGE, VIOLET), strict=True):
        if part.max() > 0:
            right.plot(result.layers, part, color=color, label=f"of it: {name}")
    right.plot(result.layers, result.measured, color=GRAY, linewidth=2, label="measured")
    right.set_yscale("log")
    right.set_ylabel("over |output|, mean (logarithmic)")
    right.set_title("bound: bias (no single offset fits), estimation (few probes)", fontsize=9)
    for one in (left, right):
        label_layers(one)
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))  # covers no line
    return figure
