"""What is measured of a prompt is what the float64 reference computes, and nothing else changes."""

import numpy as np
import pytest
import torch
from tiny_models import random_tokens

from phasekv.analysis import measure_prompt
from phasekv.analysis.recording import record_attention
from phasekv.analysis.reused_prompt import KINDS
from phasekv.errors import InvalidArgumentError
from phasekv.methods import Method
from phasekv.transformers import Chunk, ChunkMemory


def test_queries_keys_and_values_are_the_models_own(measured, exact):
    positions = np.arange(exact.keys.shape[1])
    for ours, theirs in (
        (measured.queries, exact.rotate(exact.queries, positions)),
        (measured.keys, exact.rotate(exact.keys, positions)),
        (measured.values, exact.values),
    ):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_fresh_minus_moved(measured, exact, kind):
    for note, chunk in enumerate(measured.chunks):
        assert (chunk.begin, chunk.end) == (exact.span(note)[0], exact.span(note)[-1] + 1)
        for layer in range(measured.layers):
            expected = exact.residuals(note, kind)[layer]
            found = measured.residuals(chunk, layer, kind).numpy()
            np.testing.assert_allclose(found, expected, atol=3e-4)
            assert (np.abs(expected).max() > 0.1) == (layer > 0)


def test_a_method_is_asked_as_in_an_engine(measured, exact):
    chosen = measured.select(Method("agentkvshift"), 0.2)
    for note, (key_probe, value_probe, key_weight, value_weight) in enumerate(chosen):
        for probe, weight, kind in (
            (key_probe, key_weight, "keys"),
            (value_probe, value_weight, "values"),
        ):
            distance = np.linalg.norm(
                exact.residuals(note, kind)[1].reshape(len(probe), -1), axis=1
            )
            count = int(np.ceil(0.2 * len(probe)))
            assert set(np.flatnonzero(probe)) == set(np.argsort(-distance)[:count])
            np.testing.assert_allclose(weight, np.minimum(distance, 1), atol=1e-3)
    epic = measured.select(Method("epic", boundary_tokens=3), 0.0)
    assert [int(one[0].sum()) for one in epic] == [3, 3, 3]


def test_recording_leaves_the_model_as_it_was(tiny_model):
    tokens = torch.tensor([random_tokens(30, 3)])
    plain = tiny_model(tokens).logits
    layers = []
    with record_attention(tiny_model, lambda index, *_: layers.append(index)):
        recorded = tiny_model(tokens).logits
    torch.testing.assert_close(recorded, plain)
    assert layers == [0, 1, 2, 3]
    with (
        pytest.raises(RuntimeError, match="stop"),
        record_attention(tiny_model, lambda *_: (_ for _ in ()).throw(RuntimeError("stop"))),
    ):
        tiny_model(tokens)
    torch.testing.assert_close(tiny_model(tokens).logits, plain)
    assert len(layers) == 4


def test_prompts_without_a_question_or_a_stored_chunk_are_refused(tiny_model, note_tokens):
    memory = ChunkMemory(tiny_model, None)
    chunk = memory.encode(note_tokens[0])
    for parts in ([[1, 2], [3]], [[1, 2], chunk], [[1], Chunk((4, 5), "0" * 64), [6]]):
        with pytest.raises(InvalidArgumentError, match="parts"):
            measure_prompt(memory, parts)
