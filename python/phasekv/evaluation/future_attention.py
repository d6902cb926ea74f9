"""The share of future attention that falls on keys which an eviction policy has kept.

A replay under full KV tells how much attention each key gets from each step's queries. A replay of
the same tokens under a policy tells which keys its events left. What the step after an event
attends among those keys, and among its own, is the future attention that survived: no policy can
know it beforehand, and under full KV it is one. The queries are those of the full run, so that the
share judges the choice of keys alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from phasekv import _core
from phasekv.reuse.stream import current_stream

if TYPE_CHECKING:
    from phasekv.vllm.eviction.worker import StepRow


@dataclass(frozen=True)
class StepAttention:
    """What one step's queries attend under full KV.

    Attributes
    ----------
    begin, end : int
        Positions of the queries.
    mass : list of torch.Tensor
        Per layer float32 ``[phases, kv heads, end]``: by the queries' phase, the attention that
        each key gets; a query gives 1 to each KV head, the mean over its query heads.
    """

    begin: int
    end: int
    mass: list[torch.Tensor]


@dataclass
class AttentionRecorder:
    """Watches a replay under full KV; one request, which takes any number of steps.

    Parameters
    ----------
    phases : numpy.ndarray
        int ``[tokens]``: the phase of each token.
    scale : float
        What multiplies q.k before the softmax.
    """

    phases: npt.NDArray[Any]
    scale: float
    steps: list[StepAttention] = field(default_factory=list)

    def layer(
        self, layer: int, row: StepRow, query: torch.Tensor, kv: _core.PagedKV, blocks: torch.Tensor
    ) -> None:
        """Sums up the attention of a step's queries in a layer."""
        if row.first_held != 0:
            raise RuntimeError("keys were evicted: the attention of full KV is wanted")
        if layer == 0:
            self.steps.append(StepAttention(row.begin, row.end, []))
        device = query.device
        sums = torch.zeros(len(_core.phase_names()), kv.num_heads, row.end, device=device)
        phases = self.phases[row.begin : row.end].astype(np.int32)
        _core.accumulate_attention(
            query=query,
            query_limits=torch.arange(row.begin + 1, row.end + 1, device=device),
            query_phases=torch.from_numpy(phases).to(device),
            key=kv.key,
            block_table=blocks,
            first_token=0,
            tokens=row.end,
            scale=self.scale,
            sums=sums,
            stream=current_stream(device),
        )
        self.steps[-1].mass.append(sums.cpu())

    def step_ended(self, row: StepRow, positions: list[torch.Tensor]) -> None:
        """Nothing: every key is still held."""


@dataclass
class HeldRecorder:
    """Watches a replay under a policy: which keys each step leaves.

    ``held[end]`` are, per layer, the positions ``[kv heads, held]`` that were held when the first
    ``end`` tokens were computed.
    """

    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def layer(
        self, layer: int, row: StepRow, query: torch.Tensor, kv: _core.PagedKV, blocks: torch.Tensor
    ) -> None:
        """Nothing: what counts is what the step leaves."""

    def step_ended(self, row: StepRow, positions: list[torch.Tensor]) -> None:
        """Keeps the positions."""
        self.held[row.end] = positions


def kept_share(
    steps: list[StepAttention], held: dict[int, list[torch.Tensor]]
) -> dict[str, float | None]:
    """Share of the attention of queries after the first eviction that finds its key.

    Parameters
    ----------
    steps : list of StepAttention
        Of the replay under full KV.
    held : dict
        Of a ``HeldRecorder``, whose replay took the same steps.

    Returns
    -------
    dict
        For ``all`` queries and those of each phase: over layers and KV heads, attention to keys
        that were held ÷ attention to all keys, in [0, 1]; None without such a query.
    """
    names = _core.phase_names()
    kept = torch.zeros(len(names), dtype=torch.float64)
    total = torch.zeros(len(names), dtype=torch.float64)
    for step in steps:
        layers = held.get(step.begin)
        if layers is None or layers[0].shape[1] == step.begin:
            continue  # the first step, or nothing was evicted before it
        for mass, positions in zip(step.mass, layers, strict=True):
            index = positions.to(torch.int64)[None].expand(len(names), -1, -1)
            own = mass[:, :, step.begin :].double().sum((1, 2))
            kept += mass.gather(2, index).double().sum((1, 2)) + own
            total += mass.double().sum((1, 2))
    shares: dict[str, float | None] = {
        name: float(kept[i] / total[i]) if total[i] > 0 else None for i, name in enumerate(names)
    }
    shares["all"] = float(kept.sum() / total.sum()) if total.sum() > 0 else None
    return shares
