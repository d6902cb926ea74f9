"""Eviction with budgets per layer and KV head, written a second time: plain torch, float64.

As in ``eviction_reference``, the reference goes on with the engine's survivors, after it has
checked that they are what the definition of the policy asks for, up to rounding of the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from reference import Reference

RECENT = 64
TOLERANCE = 1e-5


@dataclass
class Head:
    """What one KV head of a layer holds: [held, dim] each, positions [held]."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


def snapkv_scores(head: Head, queries, event_at: int, scale: float) -> torch.Tensor:
    """[held]: causal attention of ``queries`` (position, [group, dim]), 5 neighbours pooled."""
    total = torch.zeros(len(head.positions), dtype=torch.float64)
    for position, vectors in queries:
        seen = head.positions <= max(position, event_at - 1)
        logits = (vectors @ head.keys.T * scale).masked_fill(~seen, -math.inf)
        total += logits.softmax(-1).mean(0) / len(queries)
    order = head.positions.argsort()
    pooled = torch.nn.functional.avg_pool1d(total[order][None, None], 5, stride=1, padding=2)
    scores = torch.empty_like(total)
    scores[order] = pooled[0, 0]
    return scores


def pyramid_budgets(layers: int, budget: int, tokens: int, steepness: float) -> list[float]:
    """The published line for prompts of ``tokens``, before it is rounded to blocks."""
    mean = budget - RECENT
    first = min(2 * mean - mean / steepness, tokens - RECENT)
    last = 2 * mean - first
    return [RECENT + first - layer * (first - last) / (layers - 1) for layer in range(layers)]


class RaggedReference(Reference):
    """A model whose heads hold different numbers of keys."""

    @torch.no_grad()
    def run_ragged(
        self,
        tokens: list[int],
        steps: list[int],
        budget: int,
        stride: int,
        policy: str,
        survivors: list[list[torch.Tensor]],
        safeguard: float = 0.2,
        steepness: float = 20,
    ) -> torch.Tensor:
        """Log-probabilities [steps, vocabulary] after each step's last token.

        ``survivors``: for each event and layer the positions kept, [kv heads, most], -1 for none.
        """
        none = torch.empty(0, self.dim).double()
        held = [
            [Head(none, none, torch.empty(0, dtype=torch.long)) for _ in range(self.kv_heads)]
            for _ in self.layers
        ]
        self.safeguard, self.steepness = safeguard, steepness
        queries = [[] for _ in self.layers]
        events = iter(survivors)
        event_at, begin, logprobs = 0, 0, []
        for end in steps:
            full_strides = end // stride * stride
            has_event = full_strides > budget and full_strides > begin
            chosen = next(events) if has_event else None
            hidden = self.model.model.embed_tokens(torch.tensor(tokens[begin:end]))
            positions = torch.arange(begin, end)
            for index, layer in enumerate(self.layers):
                query, key, value = self.project(layer, hidden)
                query, key = self.rotate(query, positions), self.rotate(key, positions)
                before = [len(head.positions) for head in held[index]]
                for number, head in enumerate(held[index]):
                    head.keys = torch.cat([head.keys, key[:, number]])
                    head.values = torch.cat([head.values, value[:, number]])
                    head.positions = torch.cat([head.positions, positions])
                hidden = self._attend(layer, hidden, query, held[index], before)
                queries[index] += list(zip(positions.tolist(), query, strict=True))
                queries[index] = queries[index][-RECENT:]
                if chosen is not None:
                    self._check(
                        policy,
                        index,
                        held[index],
                        queries[index],
                        chosen[index],
                        end,
                        event_at,
                        budget,
                        stride,
                    )
                    for head, kept in zip(held[index], chosen[index], strict=True):
                        stays = torch.isin(head.positions, kept)
                        head.keys, head.values = head.keys[stays], head.values[stays]
                        head.positions = head.positions[stays]
            if chosen is not None:
                event_at = end
            logits = self.model.lm_head(self.model.model.norm(hidden[-1:]))[0]
            logprobs.append(logits.log_softmax(-1))
            begin = end
        assert next(events, None) is None, "the engine had more events"
        return torch.stack(logprobs)

    def _attend(self, layer, hidden, query, heads, before):
        group = query.shape[1] // self.kv_heads
        attended = []
        for number, head in enumerate(heads):
            limits = before[number] + torch.arange(len(query))
            later = torch.arange(len(head.positions))[None, :] > limits[:, None]
            for member in range(number * group, (number + 1) * group):
                logits = query[:, member] @ head.keys.T / math.sqrt(self.dim)
                attended.append(logits.masked_fill(later, -math.inf).softmax(-1) @ head.values)
        rows = torch.stack(attended, dim=1).reshape(len(hidden), -1)
        hidden = hidden + layer.self_attn.o_proj(rows)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def _check(self, policy, index, heads, queries, chosen, end, event_at, budget, stride):
        """The survivors are those of the definition."""
        newest = end % stride
        kept = budget + newest
        group = queries[0][1].shape[0] // self.kv_heads
        counts = [int((row >= 0).sum()) for row in chosen]
        inside, outside = [], []
        for number, head in enumerate(heads):
            mine = [(at, rows[number * group : (number + 1) * group]) for at, rows in queries]
            scores = snapkv_scores(head, mine, event_at, 1 / math.sqrt(self.dim))
            stays = torch.isin(head.positions, chosen[number])
            assert int(stays.sum()) == counts[number]
            pinned = head.positions >= end - RECENT
            assert bool(stays[pinned].all()), "a protected token was evicted"
            slack = TOLERANCE * float(scores.max())
            kept_scores = scores[stays & ~pinned].sort(descending=True).values
            if len(kept_scores) and bool((~stays).any()):
                assert float(kept_scores[-1]) >= float(scores[~stays].max()) - slack
            # What the safeguard gives a head does not compete.
            safeguarded = max(0, int(self.safeguard * kept) - RECENT)
            assert counts[number] >= min(RECENT + safeguarded, len(scores))
            inside += kept_scores[safeguarded:].tolist()
            outside += scores[~stays].tolist()
        if policy == "adakv":
            assert sum(counts) == kept * self.kv_heads
            assert min(inside) >= max(outside) - TOLERANCE * max(inside)
        else:
            (budgets,) = {count - newest for count in counts}
            exact = pyramid_budgets(len(self.layers), budget, end - newest, self.steepness)[index]
            assert budgets % 16 == 0
            assert abs(budgets - exact) <= 16
