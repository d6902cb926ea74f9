"""Forced answers: the engine says what it is told, and tells what it thought of it."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_tokens
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from phasekv.evaluation.server_replay import FORCED_TOKENS, PROCESSOR

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine(logits_processors=[PROCESSOR])


def ask(engine, prompts, forced, max_tokens):
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=1,
            extra_args=None if tokens is None else {FORCED_TOKENS: tokens},
        )
        for tokens in forced
    ]
    inputs = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = engine.llm.generate(inputs, sampling, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def test_requests_of_a_batch_say_what_each_is_told(engine):
    prompts = [random_tokens(20 + 7 * seed, seed) for seed in range(4)]
    forced = [random_tokens(12, 90), None, random_tokens(5, 91), random_tokens(12, 92)]
    answers = ask(engine, prompts, forced, max_tokens=12)
    for answer, tokens in zip(answers, forced, strict=True):
        if tokens is not None:
            assert list(answer.token_ids)[: len(tokens)] == tokens
    free = engine.one(prompts[1], max_tokens=12)
    assert list(answers[1].token_ids) == free.tokens
    # After its last forced token an answer goes on by itself.
    rest = engine.one(prompts[2] + forced[2], max_tokens=7)
    assert list(answers[2].token_ids)[5:] == rest.tokens


def test_logprobs_are_the_models_own(engine):
    prompt, forced = random_tokens(30, 5), random_tokens(6, 93)
    (answer,) = ask(engine, [prompt], [forced], max_tokens=6)
    for index, token in enumerate(forced):
        expected = engine.one(prompt + forced[:index]).logprobs[0]
        entries = answer.logprobs[index]
        assert entries[token].logprob == pytest.approx(float(expected[token]), abs=1e-3)
        likeliest = max(entries, key=lambda entry: entries[entry].logprob)
        assert likeliest == int(torch.argmax(expected))


@pytest.mark.parametrize("value", ["12", [1.5], [-1], [True]])
def test_what_is_no_list_of_tokens_is_refused(engine, value):
    with pytest.raises(VLLMValidationError, match=FORCED_TOKENS):
        ask(engine, [random_tokens(5, 1)], [value], max_tokens=1)
