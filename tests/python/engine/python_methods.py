"""Reuse methods that a researcher might write in Python, good and bad, for both engines."""

from __future__ import annotations

import math

import torch


def like_phaseshift(segments, key_divergence, value_divergence, ratio):
    """Probes by both divergences over their mean in the chunk, and the whole mean residual."""
    probes = torch.zeros(len(key_divergence), dtype=torch.bool)
    begin = 0
    for tokens, _, _ in segments:
        part = slice(begin, begin + tokens)
        scores = sum(d[part] / d[part].mean() for d in (key_divergence, value_divergence))
        count = math.ceil(ratio * tokens - 1e-9)
        probes[begin + scores.argsort(descending=True, stable=True)[:count]] = True
        begin += tokens
    return probes, torch.ones(len(probes))


def two_sets(segments, key_divergence, value_divergence, ratio):
    """As AgentKVShift: probes of keys and of values of their own, weights min(d, 1)."""
    both = []
    for divergence in (key_divergence, value_divergence):
        probes = torch.zeros(len(divergence), dtype=torch.bool)
        begin = 0
        for tokens, _, _ in segments:
            order = divergence[begin : begin + tokens].argsort(descending=True, stable=True)
            probes[begin + order[: math.ceil(ratio * tokens - 1e-9)]] = True
            begin += tokens
        both.append(probes)
    weights = torch.stack([key_divergence, value_divergence]).clamp(max=1)
    return torch.stack(both), weights


def most_diverged_values(segments, key_divergence, value_divergence, ratio):
    """As CacheBlend: nothing is added to what is not computed again."""
    order = value_divergence.argsort(descending=True, stable=True)
    probes = torch.zeros(len(order), dtype=torch.bool)
    probes[order[: math.floor(ratio * len(order) + 1e-9)]] = True
    return probes, None


def too_few(segments, key_divergence, value_divergence, ratio):
    """One flag is missing."""
    return torch.ones(len(key_divergence) - 1, dtype=torch.bool), None


def not_a_number(segments, key_divergence, value_divergence, ratio):
    """Weights that are not finite."""
    return key_divergence > 1, key_divergence * float("nan")


def raises(segments, key_divergence, value_divergence, ratio):
    """No choice at all."""
    raise RuntimeError("no idea")
