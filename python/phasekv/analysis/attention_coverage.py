"""How much of the attention that an agent's later tokens pay still finds its key.

Under full KV, U_i is the attention that key i gets from the queries after an event, per layer and
KV head. A policy has kept some keys; its coverage of a phase is the sum of U_i over kept keys of
that phase over the sum of all of them (AgentKV, arXiv 2609.14872). Queries are those of full KV, so
the choice of keys alone is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from phasekv import _core
from phasekv.analysis.figures import BLUE, GREEN, ORANGE, VIOLET, new_figure
from phasekv.analysis.progress import progress
from phasekv.analysis.recording import record_attention
from phasekv.analysis.results import Floats
from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.future_attention import StepAttention, kept_share
from phasekv.evaluation.trajectories import LabelledTokens
from phasekv.phases import phase_names
from phasekv.transformers import evict
from phasekv.transformers.models import check_on_cpu, shape_of


@dataclass(frozen=True)
class AttentionCoverage:
    """What ``attention_coverage`` finds.

    Attributes
    ----------
    policies, phases : tuple of str
        Names.
    by_key : numpy.ndarray
        ``[policies, phases]`` in [0, 1]: kept share of the attention to earlier steps' keys of a
        phase; NaN where there is none.
    by_query : numpy.ndarray
        ``[policies, phases + 1]`` in [0, 1]: kept share of all the attention that a phase's queries
        pay, their own step's keys included; last, that of all queries.
    tokens, budget, stride : int
        Of the trajectory, and of every policy.
    """

    policies: tuple[str, ...]
    phases: tuple[str, ...]
    by_key: Floats
    by_query: Floats
    tokens: int
    budget: int
    stride: int


@torch.no_grad()
def attention_coverage(
    model: Any,
    labelled: LabelledTokens,
    policies: Mapping[str, Mapping[str, Any]],
    *,
    budget: int,
    stride: int = 128,
    tokenizer: Any = None,
) -> AttentionCoverage:
    """Replay a trajectory under full KV and under each policy, in steps of ``stride`` tokens.

    Parameters
    ----------
    model : transformers model
        As ``phasekv.transformers.evict`` takes it.
    labelled : LabelledTokens
        The trajectory; its phases tell keys and queries apart in the result.
    policies : mapping of str to mapping
        Under each name what ``evict`` is given: ``policy`` and its options.
    budget, stride : int
        In tokens.
    tokenizer : transformers tokenizer or None
        Tells the policies the phases of tokens; None: one phase for everything.

    Raises
    ------
    InvalidArgumentError
        If nothing is ever evicted.
    """
    tokens = torch.from_numpy(labelled.tokens.astype(np.int64))
    first = budget + stride
    if len(tokens) <= first:
        raise InvalidArgumentError(
            "trajectory", f"{len(tokens)} tokens", f"more than budget + stride, {first}"
        )
    steps = _full(model, tokens, labelled, stride)
    by_key, by_query = [], []
    for name, options in policies.items():
        held = _held(model, tokens, stride, name, budget=budget, tokenizer=tokenizer, **options)
        by_key.append(_by_key_phase(steps, held, labelled))
        shares = kept_share(steps, held)
        by_query.append([shares[phase] for phase in (*phase_names(), "all")])
    return AttentionCoverage(
        policies=tuple(policies),
        phases=tuple(phase_names()),
        by_key=np.stack(by_key),
        by_query=np.array(by_query, dtype=np.float64),
        tokens=len(tokens),
        budget=budget,
        stride=stride,
    )


def _full(
    model: Any, tokens: torch.Tensor, labelled: LabelledTokens, stride: int
) -> list[StepAttention]:
    """What every step's queries attend under full KV."""
    shape = shape_of(model)
    check_on_cpu(shape, "analyses run")
    scale = shape.scale
    phases = torch.from_numpy(labelled.phases.astype(np.int32))
    steps: list[StepAttention] = []

    def layer(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        end = key.shape[1]
        begin = end - query.shape[1]
        if index == 0:
            steps.append(StepAttention(begin, end, []))
        # All keys in one block.
        kv = _core.strided_paged_kv(key=key[None], value=value[None])
        sums = torch.zeros(len(phase_names()), key.shape[0], end)
        _core.accumulate_attention(
            query=query.transpose(0, 1).contiguous(),
            query_limits=torch.arange(begin + 1, end + 1),
            query_phases=phases[begin:end],
            key=kv.key,
            block_table=torch.zeros(1, dtype=torch.int32),
            first_token=0,
            tokens=end,
            scale=scale,
            sums=sums,
        )
        steps[-1].mass.append(sums)

    cache = DynamicCache()
    with record_attention(model, layer):
        for step in progress(tokens.split(stride), "full KV"):
            model(step[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    return steps


def _held(
    model: Any, tokens: torch.Tensor, stride: int, name: str, **options: Any
) -> dict[int, list[torch.Tensor]]:
    """Per number of computed tokens the positions that each layer holds then."""
    held = {}
    cache = None
    with evict(model, stride=stride, **options) as eviction:
        for step in progress(tokens.split(stride), name):
            model(step[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = eviction.cache
            assert cache is not None
            layers = range(len(cache.layers))
            held[cache.seen()] = [cache.positions(0, layer) for layer in layers]
    return held


def _by_key_phase(
    steps: list[StepAttention], held: dict[int, list[torch.Tensor]], labelled: LabelledTokens
) -> Floats:
    phases = torch.from_numpy(labelled.phases.astype(np.int64))
    kept = torch.zeros(len(phase_names()), dtype=torch.float64)
    total = torch.zeros_like(kept)
    for step in steps:
        layers = held.get(step.begin)
        if layers is None or layers[0].shape[1] == step.begin:
            continue  # the first step, or nothing was evicted before it
        for mass, positions in zip(step.mass, layers, strict=True):
            earlier = mass.sum(0).double()[:, : step.begin]
            total.index_add_(0, phases[: step.begin], earlier.sum(0))
            index = positions.to(torch.int64)
            kept.index_add_(0, phases[index].flatten(), earlier.gather(1, index).flatten())
    shares: Floats = torch.where(total > 0, kept / total, torch.nan).numpy()
    return shares


def plot_attention_coverage(result: AttentionCoverage, subject: str = "") -> Any:
    """Coverage by the phase of the key and by that of the query, a bar for each policy.

    Parameters
    ----------
    result : AttentionCoverage
        What is drawn.
    subject : str
        Model and data, for the heading.
    """
    figure, axes = new_figure(
        f"Future attention that still finds its key: budget {result.budget} of {result.tokens} "
        f"tokens, an event every {result.stride}",
        subject,
        1,
        2,
        (11, 4),
        sharey=True,
    )
    names = (result.phases, (*result.phases, "all"))
    for one, values, groups, of in zip(
        axes[0], (result.by_key, result.by_query), names, ("key", "query"), strict=True
    ):
        width = 0.8 / len(result.policies)
        for index, policy in enumerate(result.policies):
            color = (ORANGE, BLUE, GREEN, VIOLET)[index % 4]
            bars = one.bar(
                np.arange(len(groups)) + (index - (len(result.policies) - 1) / 2) * width,
                np.nan_to_num(values[index]),
                width,
                color=color,
                label=policy,
            )
            one.bar_label(
                bars,
                [f"{value:.2f}" if value == value else "none" for value in values[index]],
                fontsize=7,
            )
        one.set_xticks(range(len(groups)), groups)
        one.set_xlabel(f"phase of the {of}")
    axes[0, 0].set_title("attention to earlier steps' keys", fontsize=9)
    axes[0, 1].set_title("all attention, own step included", fontsize=9)
    axes[0, 0].set_ylabel("share kept (1: nothing missed)")
    axes[0, 0].set_ylim(0, 1.05)
    axes[0, 0].legend(fontsize=8)
    return figure
