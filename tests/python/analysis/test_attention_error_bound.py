"""Error and bound against loops in numpy, written from the module's formulas."""

import io

import numpy as np
import pytest

from phasekv.analysis import attention_error_bound, plot_attention_error_bound
from phasekv.methods import Method

SCALE = 32**-0.5


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def oracle(measured, exact, method, ratio, layer, uses_offset):
    """Means over queries and heads: error, error of plain reuse, and the bound's four parts."""
    count = exact.keys.shape[1]
    positions = np.arange(count)
    fresh = {"keys": exact.rotate(exact.keys[layer], positions), "values": exact.values[layer]}
    plain = {name: rows.copy() for name, rows in fresh.items()}
    used = {name: rows.copy() for name, rows in fresh.items()}
    bias = {name: np.zeros(rows.shape[:2]) for name, rows in fresh.items()}
    estimation = {name: np.zeros(rows.shape[:2]) for name, rows in fresh.items()}
    for note, flags in enumerate(measured.select(method, ratio)):
        span = exact.span(note)
        for name, probe, weight in (
            ("keys", flags[0].numpy(), flags[2].numpy()),
            ("values", flags[1].numpy(), flags[3].numpy()),
        ):
            residual = exact.residuals(note, name)[layer]
            turned = name == "keys" and method.frame == "unrotated"
            averaged = exact.residuals(note, "keys, unrotated")[layer] if turned else residual
            for i, position in enumerate(span):
                plain[name][position] -= residual[i]
                if probe[i]:
                    continue
                offset = weight[i] * averaged.mean(0) * uses_offset
                estimate = weight[i] * averaged[probe].mean(0) * uses_offset
                if turned:
                    at = np.array([position])
                    offset = exact.rotate(offset[None], at)[0]
                    estimate = exact.rotate(estimate[None], at)[0]
                used[name][position] -= residual[i] - estimate
                bias[name][position] = np.linalg.norm(residual[i] - offset, axis=-1)
                estimation[name][position] = np.linalg.norm(offset - estimate, axis=-1)
    queries = exact.rotate(exact.queries[layer], positions)
    rows = []
    for position in range(exact.span(2)[-1] + 1, count):
        seen = slice(0, position + 1)
        for head in range(queries.shape[1]):
            of = head // 2
            query = queries[position, head]

            def attend(states, query=query, of=of, seen=seen):
                weights = softmax(SCALE * states["keys"][seen, of] @ query)
                return weights, weights @ states["values"][seen, of]

            a, out = attend(fresh)
            b, reached = attend(used)
            _, without = attend(plain)
            m = np.maximum(a, b)
            rho = np.linalg.norm(fresh["values"][seen, of] - out, axis=-1)
            key = SCALE * np.linalg.norm(query) * m * (rho + (m * rho).sum())
            size = np.linalg.norm(out)
            found = [
                np.linalg.norm(out - reached),
                np.linalg.norm(out - without),
                key @ bias["keys"][seen, of],
                key @ estimation["keys"][seen, of],
                b @ bias["values"][seen, of],
                b @ estimation["values"][seen, of],
            ]
            assert found[0] <= sum(found[2:])
            rows.append([one / size for one in found] + [found[0] / sum(found[2:])])
    return np.array(rows)


@pytest.mark.parametrize(
    ("method", "uses_offset"),
    [
        (Method("agentkvshift"), True),
        (Method("phaseshift", frame="unrotated"), True),
        (Method("cacheblend"), False),
    ],
    ids=["agentkvshift", "unrotated", "cacheblend"],
)
def test_equals_numpy(measured, exact, method, uses_offset):
    result = attention_error_bound([measured], method, 0.2)
    assert result.layers.tolist() == [2, 3]
    tightest = 0.0
    for column, layer in enumerate((2, 3)):
        rows = oracle(measured, exact, method, 0.2, layer, uses_offset)
        mean = rows.mean(0)
        assert result.measured[column] == pytest.approx(mean[0], rel=1e-3)
        assert result.uncorrected[column] == pytest.approx(mean[1], rel=1e-3)
        np.testing.assert_allclose(result.parts[:, column], mean[2:6], rtol=1e-3)
        tightest = max(tightest, rows[:, 6].max())
    assert result.tightest == pytest.approx(tightest, rel=1e-3)
    assert 0 < result.tightest <= 1
    assert (result.parts[1].max() > 0) == uses_offset


def test_nothing_is_off_when_every_token_is_a_probe(measured):
    result = attention_error_bound([measured], Method("phaseshift"), 1.0)
    assert result.measured.max() < 1e-12
    assert result.parts.max() == 0
    assert result.tightest < 1e-3
    assert result.uncorrected.min() > 0.1


def test_full_reuse_is_uncorrected_from_the_first_layer_on(measured):
    result = attention_error_bound([measured], Method("full_reuse"), 0.1)
    assert result.layers.tolist() == [1, 2, 3]
    np.testing.assert_allclose(result.measured, result.uncorrected)
    figure = plot_attention_error_bound(result, "a model")
    assert "full_reuse" in figure.get_suptitle()
    figure.savefig(io.BytesIO(), format="png")
