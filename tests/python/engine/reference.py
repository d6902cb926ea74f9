"""Reuse written a second time: plain torch, float64, one request, no blocks and no engine.

It runs a transformers model layer by layer with its own modules and follows the published
definitions literally. It shares no code with the library.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from tiny_models import load_model_in_float64


@dataclass
class Chunk:
    """A stored chunk: keys before RoPE and values of each layer, [layers, tokens, heads, dim]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Setting:
    """One method as the paper or the authors' code defines it."""

    method: str
    ratio: float
    frame: str = "rotated"
    weight: str | None = None
    probes: str | None = None
    boundary_tokens: int | None = None


@dataclass
class Trace:
    """What a run recomputed: rows per layer, and the probes of the cached tokens."""

    rows: list[int] = field(default_factory=list)
    probes: list[int] = field(default_factory=list)


class Reference:
    """A causal language model of the Llama family in float64."""

    def __init__(self, folder: str) -> None:
        self.model = load_model_in_float64(folder)
        self.config = self.model.config
        self.layers = self.model.model.layers
        self.kv_heads = self.config.num_key_value_heads
        self.dim = self.config.head_dim
        rotary = self.model.model.rotary_emb
        self.frequencies = rotary.inv_freq.double()
        self.magnitude = float(rotary.attention_scaling)
        self.watched: tuple[int, torch.Tensor] | None = None  # question's begin, its attention
        self.attention = torch.empty(0)  # of the question to each position, by prophetkv's stage I
        self.prophesied: set[int] = set()  # positions

    def rotate(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] turned by its position, halves paired."""
        angle = positions.double()[:, None] * self.frequencies
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        first, second = rows.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def project(self, layer, hidden):
        """Queries, keys (both before RoPE) and values of rows [tokens, heads, dim]."""
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        query = attention.q_proj(normed).view(len(hidden), -1, self.dim)
        key = attention.k_proj(normed).view(len(hidden), -1, self.dim)
        value = attention.v_proj(normed).view(len(hidden), -1, self.dim)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        return query * self.magnitude, key * self.magnitude, value

    def finish(self, layer, hidden, query, positions, keys, values):
        """The rest of a layer for rows at ``positions`` over keys (after RoPE) and values."""
        group = query.shape[1] // self.kv_heads
        if self.watched is not None:
            begin, attention = self.watched
            before = keys[:begin].repeat_interleave(group, dim=1)
            asked = query[positions >= begin]
            logits = torch.einsum("thd,shd->hts", asked, before) / math.sqrt(self.dim)
            attention += logits.softmax(-1).mean((0, 1)) / len(self.layers)
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        logits = torch.einsum("thd,shd->hts", query, keys) / math.sqrt(self.dim)
        hidden_from = torch.arange(len(keys))[None, :] > positions[:, None]
        weights = logits.masked_fill(hidden_from, -math.inf).softmax(-1)
        attended = torch.einsum("hts,shd->thd", weights, values).reshape(len(hidden), -1)
        hidden = hidden + layer.self_attn.o_proj(attended)
        normed = layer.post_attention_layernorm(hidden)
        fed = layer.mlp(normed[None])
        fed = fed[0] if isinstance(fed, tuple) else fed
        return hidden + fed.reshape(hidden.shape)

    @torch.no_grad()
    def encode(self, tokens: list[int], begin: int, end: int) -> Chunk:
        """Keys and values of tokens [begin, end) in the context of those before."""
        keys, values = [], []
        hidden = self.model.model.embed_tokens(torch.tensor(tokens))
        positions = torch.arange(len(tokens))
        for layer in self.layers:
            query, key, value = self.project(layer, hidden)
            keys.append(key[begin:end])
            values.append(value[begin:end])
            hidden = self.finish(
                layer,
                hidden,
                self.rotate(query, positions),
                positions,
                self.rotate(key, positions),
                value,
            )
        return Chunk(torch.stack(keys), torch.stack(values))

    @torch.no_grad()
    def run(
        self,
        tokens: list[int],
        cached: list[tuple[int, Chunk]],
        setting: Setting,
        steps: list[int] | None = None,
    ) -> tuple[torch.Tensor, Trace]:
        """Log-probabilities [vocabulary] after the last token.

        Parameters
        ----------
        tokens : list of int
            The prompt.
        cached : list of (int, Chunk)
            Where in the prompt each stored chunk begins.
        setting : Setting
            The method.
        steps : list of int or None
            Ends of the engine's steps (chunked prefill); None is one step.
        """
        count = len(tokens)
        if setting.method == "prophetkv":
            self._prophesy(tokens, cached, setting.ratio)
        past_keys = [torch.empty(0, self.kv_heads, self.dim).double() for _ in self.layers]
        past_values = [torch.empty(0, self.kv_heads, self.dim).double() for _ in self.layers]
        trace = Trace()
        begin, hidden = 0, None
        for end in steps or [count]:
            hidden = self._step(tokens, begin, end, cached, setting, past_keys, past_values, trace)
            begin = end
        logits = self.model.lm_head(self.model.model.norm(hidden[-1:]))[0]
        return logits.log_softmax(-1), trace

    def _prophesy(self, tokens, cached, ratio):
        """Stage I of ProphetKV: the question looks at the moved chunks, none of them repaired."""
        begin = max(first + chunk.keys.shape[1] for first, chunk in cached)
        self.watched = (begin, torch.zeros(begin).double())
        self.run(tokens, cached, Setting("full_reuse", 0.0))
        self.attention = attention = self.watched[1]
        self.watched = None
        positions = [first + i for first, chunk in cached for i in range(chunk.keys.shape[1])]
        order = sorted(positions, key=lambda position: (-float(attention[position]), position))
        self.prophesied = set(order[: math.floor(ratio * len(order) + 1e-9)])

    def _step(self, tokens, begin, end, cached, setting, past_keys, past_values, trace):
        positions = torch.arange(begin, end)
        segments = []  # (first row, tokens, stored keys, stored values, offset, whole length)
        for first, chunk in cached:
            length = chunk.keys.shape[1]
            low, high = max(first, begin), min(first + length, end, len(tokens) - 1)
            if low < high:
                part = slice(low - first, high - first)
                segments.append(
                    (
                        low - begin,
                        high - low,
                        chunk.keys[:, part],
                        chunk.values[:, part],
                        low - first,
                        length,
                    )
                )
        rows = torch.cat(
            [torch.arange(s[0], s[0] + s[1]) for s in segments]
            or [torch.empty(0, dtype=torch.long)]
        )
        starts = [0]
        for segment in segments:
            starts.append(starts[-1] + segment[1])
        early = setting.method in ("full_reuse", "epic", "full_recompute", "prophetkv")
        check = 0 if early else 1
        key_probe = value_probe = torch.ones(len(rows), dtype=torch.bool)
        key_weight = value_weight = None
        if early:
            key_probe = value_probe = self._static_probes(setting, segments)
            if setting.method == "prophetkv":
                chosen = [int(row) + begin in self.prophesied for row in rows]
                key_probe = value_probe = torch.tensor(chosen, dtype=torch.bool)
        active = torch.ones(end - begin, dtype=torch.bool)
        hidden = self.model.model.embed_tokens(torch.tensor(tokens[begin:end]))
        for index, layer in enumerate(self.layers):
            if early and index == 0:
                active[rows[~key_probe]] = False
            live = active.nonzero()[:, 0]
            query, key, value = self.project(layer, hidden[live])
            fresh_key = torch.zeros(end - begin, self.kv_heads, self.dim).double()
            fresh_value = torch.zeros_like(fresh_key)
            fresh_key[live] = self.rotate(key, positions[live])
            fresh_value[live] = value
            final_key, final_value = fresh_key.clone(), fresh_value.clone()
            if segments:
                stored_key = torch.cat([s[2][index] for s in segments])
                stored_key = self.rotate(stored_key, positions[rows])
                stored_value = torch.cat([s[3][index] for s in segments])
                if index == check and not early:
                    d_key = (fresh_key[rows] - stored_key).flatten(1).norm(dim=1)
                    d_value = (fresh_value[rows] - stored_value).flatten(1).norm(dim=1)
                    key_probe, value_probe = self._probes(setting, starts, d_key, d_value)
                    key_weight = self._weights(setting, starts, d_key, key_probe)
                    value_weight = self._weights(setting, starts, d_value, value_probe)
                    active[rows[~(key_probe | value_probe)]] = False
                merged = (
                    index > check
                    or early
                    or (index == check and setting.method == "cacheblend_lmcache")
                )
                if merged:
                    shift = setting.method in ("agentkvshift", "phaseshift") and index > check
                    for stored, fresh, final, probe, weight, is_key in (
                        (stored_key, fresh_key, final_key, key_probe, key_weight, True),
                        (stored_value, fresh_value, final_value, value_probe, value_weight, False),
                    ):
                        result = stored.clone()
                        if shift:
                            result += self._shift(
                                setting,
                                starts,
                                positions[rows],
                                stored,
                                fresh[rows],
                                probe,
                                weight,
                                is_key,
                            )
                        result[probe] = fresh[rows][probe]
                        final[rows] = result
            if index == check and not early:
                keep = active[live]
                query, live = query[keep], live[keep]
            past_keys[index] = torch.cat([past_keys[index], final_key])
            past_values[index] = torch.cat([past_values[index], final_value])
            out = self.finish(
                layer,
                hidden[live],
                self.rotate(query, positions[live]),
                positions[live],
                past_keys[index],
                past_values[index],
            )
            hidden = hidden.clone()
            hidden[live] = out
            trace.rows.append(len(live))
        trace.probes += rows[key_probe | value_probe].add(begin).tolist()
        return hidden

    def _shift(self, setting, starts, positions, stored, fresh, probe, weight, is_key):
        added = torch.zeros_like(stored)
        turn = is_key and setting.frame == "unrotated"
        for low, high in itertools.pairwise(starts):
            chosen = torch.arange(low, high)[probe[low:high]]
            if not len(chosen):
                continue
            residual = fresh[chosen] - stored[chosen]
            if turn:
                residual = self.rotate(residual, -positions[chosen])
            mean = residual.mean(0, keepdim=True).expand(high - low, -1, -1)
            if turn:
                mean = self.rotate(mean, positions[low:high])
            added[low:high] = weight[low:high, None, None] * mean
        return added

    @staticmethod
    def _static_probes(setting, segments):
        flags = []
        for _, tokens, _, _, offset, length in segments:
            if setting.method == "epic":
                limit = setting.boundary_tokens
                limit = math.ceil(setting.ratio * length - 1e-9) if limit is None else limit
                flags += [offset + i < limit for i in range(tokens)]
            else:
                flags += [setting.method == "full_recompute"] * tokens
        return torch.tensor(flags, dtype=torch.bool)

    @staticmethod
    def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
        flags = torch.zeros(len(scores), dtype=torch.bool)
        order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))
        flags[order[:count]] = True
        return flags

    def _probes(self, setting, starts, d_key, d_value):
        if setting.method in ("cacheblend", "cacheblend_lmcache"):
            score = d_value if setting.method == "cacheblend" else d_key
            chosen = self._top(score, math.floor(setting.ratio * len(score) + 1e-9))
            return chosen, chosen
        rule = setting.probes or ("separate" if setting.method == "agentkvshift" else "sum")

        def per_chunk(score: torch.Tensor) -> torch.Tensor:
            return torch.cat(
                [
                    self._top(score[low:high], math.ceil(setting.ratio * (high - low) - 1e-9))
                    for low, high in itertools.pairwise(starts)
                ]
            )

        if rule == "separate":
            return per_chunk(d_key), per_chunk(d_value)
        if rule == "sum":
            score = torch.cat(
                [
                    sum(d[low:high] / d[low:high].mean() for d in (d_key, d_value))
                    for low, high in itertools.pairwise(starts)
                ]
            )
        else:
            score = d_key if rule == "key" else d_value
        chosen = per_chunk(score)
        return chosen, chosen

    @staticmethod
    def _weights(setting, starts, d, probe):
        rule = setting.weight or ("clipped" if setting.method == "agentkvshift" else "one")
        if rule == "one":
            return torch.ones_like(d)
        if rule == "clipped":
            return d.clamp(max=1.0)
        return torch.cat(
            [
                d[low:high] / d[low:high][probe[low:high]].mean()
                for low, high in itertools.pairwise(starts)
            ]
        )
