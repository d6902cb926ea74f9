"""Divergences against sums written out with Python's own floats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.divergence import (
    kl_divergence,
    negative_log_likelihood,
    top1_agreement,
)


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def kl_by_hand(p: list[float], q: list[float]) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


rows_of_logits = st.lists(
    st.lists(st.floats(-20, 20), min_size=4, max_size=4), min_size=1, max_size=3
)


@given(rows_of_logits, st.randoms(use_true_random=False))
def test_kl_matches_the_sum_by_hand(logits, random):
    p = [log_softmax(row) for row in logits]
    q = [log_softmax([random.uniform(-20, 20) for _ in row]) for row in logits]
    expected = [kl_by_hand(a, b) for a, b in zip(p, q, strict=True)]
    assert kl_divergence(p, q) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert (kl_divergence(p, q) > -1e-9).all()
    assert kl_divergence(p, p) == pytest.approx([0.0] * len(p), abs=1e-12)


def test_kl_matches_scipy_on_a_large_vocabulary():
    special = pytest.importorskip("scipy.special")
    draw = np.random.default_rng(1)
    p = special.log_softmax(draw.normal(size=(3, 5000)) * 4, axis=1)
    q = special.log_softmax(draw.normal(size=(3, 5000)) * 4, axis=1)
    expected = special.rel_entr(np.exp(p), np.exp(q)).sum(axis=1)
    assert kl_divergence(p, q) == pytest.approx(expected, rel=1e-12)


def test_kl_is_not_symmetric_and_names_full_first():
    certain = [[math.log(0.9), math.log(0.1)]]
    even = [[math.log(0.5), math.log(0.5)]]
    assert kl_divergence(certain, even)[0] == pytest.approx(
        0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    )
    assert kl_divergence(even, certain)[0] != pytest.approx(kl_divergence(certain, even)[0])


def test_impossible_tokens():
    impossible = [[0.0, -math.inf]]
    even = [[math.log(0.5), math.log(0.5)]]
    assert kl_divergence(impossible, even)[0] == pytest.approx(math.log(2))
    assert kl_divergence(impossible, impossible)[0] == 0.0
    assert kl_divergence(even, impossible)[0] == math.inf


def test_top1_takes_the_lowest_of_equals():
    full = [[-1.0, -1.0, -2.0], [-3.0, -1.0, -2.0]]
    method = [[-1.0, -5.0, -1.0], [-1.0, -2.0, -3.0]]
    assert top1_agreement(full, method).tolist() == [True, False]


def test_likelihood_of_given_tokens():
    rows = [[-0.5, -1.5], [-2.5, -3.5]]
    assert negative_log_likelihood(rows, [1, 0]).tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: kl_divergence([[0.0]], [[0.0], [0.0]]), "method"),
        (lambda: kl_divergence([0.0], [[0.0]]), "full"),
        (lambda: kl_divergence([[math.nan]], [[0.0]]), "full"),
        (lambda: negative_log_likelihood([[0.0]], [0, 0]), "tokens"),
    ],
)
def test_bad_input_is_named(call, argument):
    with pytest.raises(InvalidArgumentError) as error:
        call()
    assert error.value.argument == argument
