"""Selection of tokens by each method against rules written out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasekv import InvalidArgumentError
from phasekv.methods import Method, method_names

SEGMENTS = st.lists(st.integers(0, 12), min_size=1, max_size=5)
RATIOS = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0])


@st.composite
def inputs(draw):
    lengths = draw(SEGMENTS)
    total = sum(lengths)
    # Few distinct values, so that ties are common.
    number = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.5, 3.0])
    keys = draw(st.lists(number, min_size=total, max_size=total))
    values = draw(st.lists(number, min_size=total, max_size=total))
    return lengths, keys, values, draw(RATIOS)


def choose(method, lengths, keys, values, ratio):
    return method.select(
        segments=[(length, 0, length) for length in lengths],
        key_divergence=keys,
        value_divergence=values,
        ratio=ratio,
    )


def top(scores, count):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
    return [int(i in order) for i in range(len(scores))]


def per_segment(lengths, scores, ratio):
    flags, begin = [], 0
    for length in lengths:
        # In hundredths, where the ratios are whole numbers: no rounding at all.
        count = -(-round(ratio * 100) * length // 100)
        flags += top(scores[begin : begin + length], count)
        begin += length
    return flags


@given(inputs())
def test_agentkvshift_takes_two_sets_per_chunk(case):
    lengths, keys, values, ratio = case
    key_probe, value_probe, key_weight, value_weight = choose(
        Method("agentkvshift"), lengths, keys, values, ratio
    )
    assert key_probe == per_segment(lengths, keys, ratio)
    assert value_probe == per_segment(lengths, values, ratio)
    assert key_weight == [min(d, 1.0) for d in keys]
    assert value_weight == [min(d, 1.0) for d in values]


@given(inputs())
def test_phaseshift_takes_one_set_by_both_divergences(case):
    lengths, keys, values, ratio = case
    key_probe, value_probe, key_weight, value_weight = choose(
        Method("phaseshift"), lengths, keys, values, ratio
    )
    assert key_probe == value_probe
    assert key_weight == value_weight == [1.0] * sum(lengths)
    begin = 0
    for length in lengths:
        end = begin + length
        assert sum(key_probe[begin:end]) == -(-round(ratio * 100) * length // 100)
        means = [sum(d[begin:end]) / max(length, 1) for d in (keys, values)]
        scores = [
            sum(d[i] / mean for d, mean in zip((keys, values), means, strict=True) if mean > 0)
            for i in range(begin, end)
        ]
        chosen = [scores[i] for i in range(length) if key_probe[begin + i]]
        left = [scores[i] for i in range(length) if not key_probe[begin + i]]
        if chosen and left:
            assert min(chosen) >= max(left) - 1e-5
        begin = end


@given(inputs())
def test_cacheblend_variants_choose_over_all_chunks(case):
    lengths, keys, values, ratio = case
    count = round(ratio * 100) * sum(lengths) // 100
    for name, scores in (("cacheblend", values), ("cacheblend_lmcache", keys)):
        key_probe, value_probe, key_weight, value_weight = choose(
            Method(name), lengths, keys, values, ratio
        )
        assert key_probe == value_probe == top(scores, count)
        assert key_weight == value_weight == []


@given(inputs())
def test_prophetkv_takes_the_most_attended_over_all_chunks(case):
    lengths, attention, _, ratio = case
    method = Method("prophetkv")
    assert method.needs_attention
    assert method.check_layer == 0
    key_probe, value_probe, key_weight, value_weight = method.select(
        segments=[(length, 0, length) for length in lengths],
        key_divergence=[],
        value_divergence=[],
        ratio=ratio,
        attention=attention,
    )
    count = round(ratio * 100) * sum(lengths) // 100
    assert key_probe == value_probe == top(attention, count)
    assert key_weight == value_weight == []


def test_prophetkv_without_attention_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"attention = 0.*3 cached"):
        choose(Method("prophetkv"), [3], [], [], 0.5)


@given(inputs(), st.sampled_from([None, 0, 1, 3, 100]))
def test_epic_takes_the_head_of_each_chunk(case, boundary):
    lengths, _, _, ratio = case
    key_probe, value_probe, _, _ = choose(
        Method("epic", boundary_tokens=boundary), lengths, [], [], ratio
    )
    expected = []
    for length in lengths:
        head = -(-round(ratio * 100) * length // 100) if boundary is None else boundary
        expected += [int(i < head) for i in range(length)]
    assert key_probe == value_probe == expected


def test_epic_counts_from_the_chunk_not_from_the_step():
    flags, _, _, _ = Method("epic", boundary_tokens=5).select(
        segments=[(4, 3, 20)], key_divergence=[], value_divergence=[], ratio=0.0
    )
    assert flags == [1, 1, 0, 0]


@given(inputs())
def test_full_methods_ignore_ratio_and_divergence(case):
    lengths, _, _, ratio = case
    total = sum(lengths)
    assert choose(Method("full_reuse"), lengths, [], [], ratio)[0] == [0] * total
    assert choose(Method("full_recompute"), lengths, [], [], ratio)[0] == [1] * total


@given(inputs())
def test_relative_weights_are_one_on_average_over_probes(case):
    lengths, keys, values, ratio = case
    key_probe, _, key_weight, _ = choose(
        Method("agentkvshift", weight="relative"), lengths, keys, values, ratio
    )
    begin = 0
    for length in lengths:
        chosen = [i for i in range(begin, begin + length) if key_probe[i]]
        if chosen and sum(keys[i] for i in chosen) > 0:
            assert math.isclose(sum(key_weight[i] for i in chosen) / len(chosen), 1.0, rel_tol=1e-5)
        begin += length


@pytest.mark.parametrize("name", method_names())
@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_ratio_outside_is_refused(name, ratio):
    with pytest.raises(InvalidArgumentError, match="ratio"):
        choose(Method(name), [3], [1.0] * 3, [1.0] * 3, ratio)


def test_unknown_names_are_refused_by_name():
    with pytest.raises(InvalidArgumentError, match=r"magic.*agentkvshift"):
        Method("magic")
    with pytest.raises(InvalidArgumentError, match="frame = sideways"):
        Method("phaseshift", frame="sideways")
    with pytest.raises(InvalidArgumentError, match="probes = full_reuse"):
        Method("full_reuse", probes="sum")


def test_not_a_number_is_refused():
    with pytest.raises(InvalidArgumentError, match="scores"):
        choose(Method("agentkvshift"), [3], [1.0, math.nan, 2.0], [1.0] * 3, 0.5)


def test_divergence_of_wrong_length_is_refused():
    with pytest.raises(InvalidArgumentError, match="value_divergence = 2"):
        choose(Method("agentkvshift"), [3], [1.0] * 3, [1.0] * 2, 0.5)
