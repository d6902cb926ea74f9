"""Bootstrap intervals against loops and against the normal theory of a mean."""

import math

import numpy as np
import pytest

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.bootstrap import bootstrap_mean, paired_difference


def test_mean_is_over_values_not_over_groups():
    assert bootstrap_mean([[1.0, 1.0, 1.0], [5.0]]).mean == 2.0


def test_interval_equals_a_loop_over_the_same_draws():
    groups = [[1.0, 2.0], [4.0], [0.5, 0.25, 3.0]]
    estimate = bootstrap_mean(groups, resamples=200, confidence=0.9, seed=3)
    draws = np.random.default_rng(3).integers(3, size=(200, 3))
    means = sorted(
        math.fsum(value for index in draw for value in groups[index])
        / sum(len(groups[index]) for index in draw)
        for draw in draws
    )

    def quantile(share):
        position = share * (len(means) - 1)
        below = math.floor(position)
        above = min(below + 1, len(means) - 1)
        return means[below] + (position - below) * (means[above] - means[below])

    assert estimate.low == pytest.approx(quantile(0.05))
    assert estimate.high == pytest.approx(quantile(0.95))


def test_interval_of_independent_values_agrees_with_the_normal_one():
    values = np.random.default_rng(7).normal(3.0, 2.0, size=400)
    estimate = bootstrap_mean(list(values), resamples=4000)
    half = 1.96 * values.std() / math.sqrt(values.size)
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.03)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.03)


def test_values_that_depend_on_their_question_widen_the_interval():
    centres = np.random.default_rng(5).normal(size=30)
    grouped = bootstrap_mean([np.full(10, centre) for centre in centres])
    flat = bootstrap_mean([value for centre in centres for value in [centre] * 10])
    assert grouped.mean == pytest.approx(flat.mean)
    assert grouped.high - grouped.low > 2.5 * (flat.high - flat.low)


def test_paired_difference_removes_what_both_share():
    draw = np.random.default_rng(2)
    shared = [draw.normal(size=4) * 10 for _ in range(25)]
    first = [values + 0.5 for values in shared]
    estimate = paired_difference(first, shared)
    assert estimate.mean == pytest.approx(0.5)
    assert estimate.low == pytest.approx(0.5)
    assert estimate.high == pytest.approx(0.5)
    assert paired_difference(shared, first).mean == pytest.approx(-0.5)


def test_same_seed_same_interval():
    groups = list(np.random.default_rng(1).normal(size=(30, 2)))
    assert bootstrap_mean(groups, seed=4) == bootstrap_mean(groups, seed=4)
    assert bootstrap_mean(groups, seed=4) != bootstrap_mean(groups, seed=5)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: bootstrap_mean([]), "groups"),
        (lambda: bootstrap_mean([[1.0], []]), "groups"),
        (lambda: bootstrap_mean([1.0], confidence=1.0), "confidence"),
        (lambda: bootstrap_mean([1.0], resamples=0), "resamples"),
        (lambda: paired_difference([1.0], [1.0, 2.0]), "second"),
        (lambda: paired_difference([[1.0, 2.0]], [[1.0]]), "second[0]"),
    ],
)
def test_bad_input_is_named(call, argument):
    with pytest.raises(InvalidArgumentError) as error:
        call()
    assert error.value.argument == argument
