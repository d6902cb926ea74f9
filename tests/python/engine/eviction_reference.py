"""Eviction written a second time: plain torch, float64, one request, a list of keys per head.

It shares no code with the library. An engine that works in float32 may choose between two almost
equal keys otherwise, so the reference goes on with the engine's survivors, after it has checked
that they are the best by its own scores up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from reference import Reference


@dataclass
class Query:
    """A buffered query: logical position, phase, [query heads, dim] after RoPE."""

    position: int
    phase: int
    vector: torch.Tensor


@dataclass
class Held:
    """One layer's keys and values: [held, kv heads, ...] each; positions are logical."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    sums: torch.Tensor  # [phases, held, kv heads]
    queries: list[Query] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * 4)
    event_at: int = 0  # tokens computed at the last event


@dataclass
class Event:
    """What a policy may look at."""

    held: Held
    seen: int
    budget: int
    scale: float
    layer: int
    frequencies: torch.Tensor  # of RoPE, [pairs]


Score = Callable[[Event], torch.Tensor]
"""[held, kv heads], the higher the better."""


@dataclass
class ReferencePolicy:
    """A policy's definition.

    ``buffers`` is 0, 1 or 4; ``capacity`` the queries in each; ``cleared`` whether an event empties
    them.
    """

    score: Score
    sinks: int = 0
    recent: int | str = 0  # "half": of what the budget leaves after the sinks
    buffers: int = 0
    capacity: int = 0
    cleared: bool = False
    sums: int = 0


def start(computed: int, budget: int, stride: int) -> int:
    """First held position."""
    return max(0, computed // stride * stride - budget)


def probabilities(event: Event, queries: list[Query], allowed: torch.Tensor) -> torch.Tensor:
    """Softmax [queries, query heads, held] over the keys allowed, [queries, held, heads]."""
    keys = event.held.keys
    heads = keys.shape[1]
    vectors = torch.stack([query.vector for query in queries])
    group = vectors.shape[1] // heads
    logits = torch.einsum("qhd,khd->qhk", vectors, keys.repeat_interleave(group, 1)) * event.scale
    mask = allowed.permute(0, 2, 1).repeat_interleave(group, 1)
    return logits.masked_fill(~mask, -math.inf).softmax(-1)


def everything(event: Event, queries: list[Query]) -> torch.Tensor:
    """All keys are allowed."""
    return torch.ones(len(queries), *event.held.positions.shape, dtype=torch.bool)


def before_each(event: Event, queries: list[Query]) -> torch.Tensor:
    """Keys at or before the query's own position; an older one sees what the last event left."""
    at = torch.tensor([max(query.position, event.held.event_at - 1) for query in queries])
    return event.held.positions[None] <= at[:, None, None]


def pooled(scores: torch.Tensor, positions: torch.Tensor, kernel: int, largest: bool):
    """Over neighbours in the text; [held, kv heads]."""
    out = torch.empty_like(scores)
    for head in range(scores.shape[1]):
        order = positions[:, head].argsort()
        row = scores[order, head][None, None]
        if largest:
            row = torch.nn.functional.max_pool1d(row, kernel, stride=1, padding=kernel // 2)
        else:
            row = torch.nn.functional.avg_pool1d(row, kernel, stride=1, padding=kernel // 2)
        out[order, head] = row[0, 0]
    return out


def group_max_logit(event: Event, queries: list[Query], allowed: torch.Tensor) -> torch.Tensor:
    """[held, kv heads]: mean over queries of the softmax of a group's largest logits."""
    keys = event.held.keys
    heads = keys.shape[1]
    vectors = torch.stack([query.vector for query in queries])
    group = vectors.shape[1] // heads
    logits = torch.einsum("qhd,khd->qhk", vectors, keys.repeat_interleave(group, 1)) * event.scale
    logits = logits.unflatten(1, (heads, group)).amax(2)
    mask = allowed.permute(0, 2, 1)
    return logits.masked_fill(~mask, -math.inf).softmax(-1).mean(0).T


def group_mean(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., query heads, held] to [..., kv heads, held]."""
    return weights.unflatten(-2, (heads, weights.shape[-2] // heads)).mean(-2)


def recency(event: Event) -> torch.Tensor:
    """streaming_llm."""
    return event.held.positions.double()


def agentkv(event: Event) -> torch.Tensor:
    """agentkv and agentkv_recency: they differ in their buffers."""
    queries = event.held.queries
    scores = group_max_logit(event, queries, everything(event, queries))
    return pooled(scores, event.held.positions, 7, largest=True)


def snapkv(event: Event) -> torch.Tensor:
    """Mean over queries and group of causal attention, averaged over 5 neighbours."""
    queries = event.held.queries
    weights = probabilities(event, queries, before_each(event, queries))
    scores = group_mean(weights, event.held.keys.shape[1]).mean(0).T
    return pooled(scores, event.held.positions, 5, largest=False)


def accumulated(event: Event) -> torch.Tensor:
    """h2o and phase_balanced: they differ in their number of sums."""
    held = event.held
    scores = torch.zeros_like(held.positions, dtype=torch.float64)
    for phase, count in enumerate(held.counts):
        if count:
            scores += held.sums[phase] / count
    return scores


def r_kv(event: Event, window: int = 8, share: float = 0.93) -> torch.Tensor:
    """Importance of the keys before the window, minus redundancy."""
    held = event.held
    queries = held.queries
    count, heads = held.positions.shape
    candidates = everything(event, queries)
    candidates[:, count - window :] = False
    scores = group_max_logit(event, queries, candidates)
    inner = pooled(scores[: count - window], held.positions[: count - window], 7, largest=True)
    scores = torch.cat([inner, scores[count - window :]])
    redundancy = torch.empty_like(scores)
    for head in range(heads):
        keys = held.keys[:, head]
        unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
        cosine = unit @ unit.T
        cosine.fill_diagonal_(0.0)
        order = held.positions[:, head].argsort()
        for row in range(count):
            similar = [j for j in order.tolist() if cosine[row, j] > 0.5]
            cosine[row, similar[-1] if similar else order[0]] = 0.0
        redundancy[:, head] = cosine.mean(0).softmax(0)
    return (1 - share) * scores - share * redundancy


def keydiff(event: Event) -> torch.Tensor:
    """Minus the cosine with the mean of the unit keys."""
    keys = event.held.keys
    unit = keys / keys.norm(dim=-1, keepdim=True)
    return -torch.cosine_similarity(keys, unit.mean(0, keepdim=True), dim=-1)


def turned(rows: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rows whose halves are real and imaginary parts, times complex numbers."""
    whole = torch.complex(*rows.chunk(2, dim=-1)) * rotation
    return torch.cat([whole.real, whole.imag], dim=-1)


def expected_attention(event: Event, sinks: int = 4, horizon: int = 512) -> torch.Tensor:
    """Normally distributed queries at the next positions, averaged over those."""
    keys, values, frequencies = event.held.keys, event.held.values, event.frequencies
    queries = [query for query in event.held.queries if query.position >= sinks]
    vectors = torch.stack([query.vector for query in queries])  # [queries, query heads, dim]
    at = torch.tensor([query.position for query in queries]).double()
    angles = at[:, None, None] * frequencies
    before = turned(vectors, torch.polar(torch.ones_like(angles), -angles))
    mean = before.mean(0)
    centered = before - mean
    covariance = torch.einsum("qhi,qhj->hij", centered, centered) / len(queries)
    # R averaged over the positions, as a matrix.
    following = torch.arange(event.seen, event.seen + horizon).double()[:, None] * frequencies
    cosine, sine = following.cos().mean(0).diag(), following.sin().mean(0).diag()
    rotation = torch.cat([torch.cat([cosine, -sine], 1), torch.cat([sine, cosine], 1)], 0)
    mean, covariance = mean @ rotation.T, rotation @ covariance @ rotation.T
    group = vectors.shape[1] // keys.shape[1]
    wide = keys.repeat_interleave(group, 1)
    logits = torch.einsum("hd,khd->kh", mean, wide) * event.scale
    logits += torch.einsum("khi,hij,khj->kh", wide, covariance, wide) * event.scale**2 / 2
    is_sink = (event.held.positions < sinks).repeat_interleave(group, 1)
    weights = logits.masked_fill(is_sink, -math.inf).softmax(0)
    return group_mean(weights.T, keys.shape[1]).T * values.norm(dim=-1)


def triattention(reference: Reference, mean_query: torch.Tensor, mean_norm: torch.Tensor) -> Score:
    """The published sum over offsets, from unrotated keys and their positions.

    ``mean_query`` is complex [layers, query heads, pairs], ``mean_norm`` real; halves are paired.
    """
    mean_query, mean_norm = mean_query.to(torch.complex128), mean_norm.double()

    def score(event: Event) -> torch.Tensor:
        first, second = event.held.keys.chunk(2, dim=-1)
        positions = event.held.positions[..., None].double()
        angles = positions * reference.frequencies
        keys = torch.complex(first, second) * torch.polar(torch.ones_like(angles), -angles)
        keys = keys / reference.magnitude
        group = mean_query.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)
        positions = positions.repeat_interleave(group, dim=1)
        query, norm = mean_query[event.layer], mean_norm[event.layer]
        angle = (query * keys.conj()).angle()
        total = torch.zeros(keys.shape[:2], dtype=torch.float64)
        for exponent in range(17):
            distance = event.seen - positions + 2**exponent
            cosine = torch.cos(reference.frequencies * distance + angle)
            total += (query.abs() * keys.abs() * cosine).sum(-1) / 17
        total += ((norm - query.abs()) * keys.abs()).sum(-1)
        total *= reference.magnitude**2
        total = (total - total.mean(0)) / total.std(0, correction=0).clamp(min=1e-6)
        return total.unflatten(1, (-1, group)).amax(-1)

    return score


POLICIES = {
    "streaming_llm": ReferencePolicy(recency, sinks=4),
    "snapkv": ReferencePolicy(snapkv, recent=64, buffers=1, capacity=64),
    "keydiff": ReferencePolicy(keydiff),
    "expected_attention": ReferencePolicy(expected_attention, sinks=4, buffers=1, capacity=128),
    "h2o": ReferencePolicy(
        accumulated, recent="half", buffers=1, capacity=128, cleared=True, sums=1
    ),
    "r_kv": ReferencePolicy(r_kv, recent=8, buffers=1, capacity=8),
    "agentkv": ReferencePolicy(agentkv, sinks=32, buffers=4, capacity=8),
    "agentkv_recency": ReferencePolicy(agentkv, sinks=32, buffers=1, capacity=32),
    "phase_balanced": ReferencePolicy(
        accumulated, sinks=4, recent="half", buffers=1, capacity=128, cleared=True, sums=4
    ),
}


class EvictingReference(Reference):
    """A model that holds a window of a request's keys."""

    @torch.no_grad()
    def run_window(
        self,
        tokens: list[int],
        steps: list[int],
        budget: int,
        stride: int,
        policy: ReferencePolicy,
        survivors: list[list[torch.Tensor]],
        phases: list[int] | None = None,
        tolerance: float = 1e-5,
    ) -> torch.Tensor:
        """Log-probabilities [steps, vocabulary] after each step's last token.

        Parameters
        ----------
        tokens : list of int
            The request's tokens; the last one has no successor of interest.
        steps : list of int
            Ends of the engine's steps, ascending.
        budget, stride : int
            Of the window.
        policy : ReferencePolicy
            Its definition.
        survivors : list of list of torch.Tensor
            For each event and layer, the positions that the engine kept, [kv heads, kept].
        phases : list of int or None
            Of each token; None: all are others.
        tolerance : float
            Largest amount, relative to the highest score, by which a survivor may be worse than a
            key that was evicted.
        """
        phases = phases or [3] * len(tokens)
        none = torch.empty(0, self.kv_heads, self.dim).double()
        layers = [
            Held(
                none,
                none,
                torch.empty(0, self.kv_heads, dtype=torch.long),
                torch.empty(4, 0, self.kv_heads).double(),
            )
            for _ in self.layers
        ]
        events = iter(survivors)
        logprobs = []
        begin = 0
        for end in steps:
            first = start(begin, budget, stride)
            kept = end - start(end, budget, stride)
            chosen = next(events) if kept < end - first else None
            positions = torch.arange(begin, end)
            hidden = self.model.model.embed_tokens(torch.tensor(tokens[begin:end]))
            for index, layer in enumerate(self.layers):
                held = layers[index]
                query, key, value = self.project(layer, hidden)
                query = self.rotate(query, positions)
                self._append(held, self.rotate(key, positions), value, positions)
                limits = torch.arange(begin, end) - first
                hidden = self.finish(layer, hidden, query, limits, held.keys, held.values)
                self._buffer(held, policy, query, positions, phases)
                if chosen is not None:
                    event = Event(
                        held, end, budget, 1 / math.sqrt(self.dim), index, self.frequencies
                    )
                    self._evict(event, policy, kept, chosen[index], tolerance)
            logits = self.model.lm_head(self.model.model.norm(hidden[-1:]))[0]
            logprobs.append(logits.log_softmax(-1))
            begin = end
        assert next(events, None) is None, "the engine had more events"
        return torch.stack(logprobs)

    @staticmethod
    def _append(held, key, value, positions):
        heads = key.shape[1]
        held.keys = torch.cat([held.keys, key])
        held.values = torch.cat([held.values, value])
        held.positions = torch.cat([held.positions, positions[:, None].expand(-1, heads)])
        new = torch.zeros(4, len(positions), heads).double()
        held.sums = torch.cat([held.sums, new], dim=1)

    @staticmethod
    def _buffer(held, policy, query, positions, phases):
        if policy.buffers == 0:
            return
        for row, position in enumerate(positions.tolist()):
            held.queries.append(Query(position, phases[position], query[row]))
        kept = []
        for phase in range(4) if policy.buffers == 4 else [None]:
            mine = [q for q in held.queries if phase is None or q.phase == phase]
            kept += mine[-policy.capacity :]
        held.queries = kept

    def _evict(self, event, policy, kept, chosen, tolerance):
        held = event.held
        if policy.sums:
            # Queries since the last event stand among keys in their order.
            weights = probabilities(event, held.queries, before_each(event, held.queries))
            attention = group_mean(weights, held.keys.shape[1])
            for row, query in enumerate(held.queries):
                phase = query.phase if policy.sums == 4 else 0
                held.sums[phase] += attention[row].T
                held.counts[phase] += 1
        scores = policy.score(event)
        recent = policy.recent
        if recent == "half":
            recent = (event.budget - policy.sinks) // 2
        pinned = (held.positions < policy.sinks) | (held.positions >= event.seen - recent)
        rows = []
        for head in range(held.positions.shape[1]):
            keep = torch.isin(held.positions[:, head], chosen[head])
            assert int(keep.sum()) == kept == len(chosen[head])
            assert bool(keep[pinned[:, head]].all()), "a protected token was evicted"
            free = ~pinned[:, head]
            inside, outside = scores[keep & free, head], scores[~keep, head]
            if len(inside) and len(outside):
                slack = tolerance * float(scores[:, head].abs().max())
                assert float(inside.min()) >= float(outside.max()) - slack
            rows.append(keep.nonzero()[:, 0])
        index = torch.stack(rows, dim=1)  # [kept, kv heads]
        wide = index[:, :, None].expand(-1, -1, held.keys.shape[2])
        held.keys = held.keys.gather(0, wide)
        held.values = held.values.gather(0, wide)
        held.positions = held.positions.gather(0, index)
        held.sums = held.sums.gather(1, index[None].expand(4, -1, -1))
        held.event_at = event.seen
        if policy.cleared:
            held.queries = []
