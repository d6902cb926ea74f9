"""Eviction in transformers: against transformers itself, and against the float64 reference."""

from __future__ import annotations

import pytest
import python_policies
import torch
from eviction_reference import POLICIES, EvictingReference
from generation import generated
from tiny_models import random_tokens
from tokenizers_for_tests import byte_level_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedTokenizerFast,
    pipeline,
)

from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.transformers import evict

pytestmark = pytest.mark.engine

LARGE = 2048
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def load(model_folder):
    def load(family="llama", dtype=torch.float32, **changes):
        folder = model_folder(family, "default", **changes)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    return load


@pytest.fixture(scope="module")
def model(load):
    return load()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_budget_that_holds_everything_changes_nothing(load, family, dtype):
    """With left padding: a row of 200 tokens, one of 90, one of 1."""
    model = load(family, dtype)
    rows = [random_tokens(200, 1), random_tokens(90, 2), random_tokens(1, 3)]
    tokens = [[0] * (200 - len(row)) + row for row in rows]
    mask = [[0] * (200 - len(row)) + [1] * len(row) for row in rows]
    expected, plain = generated(model, tokens, mask)
    with evict(model, policy="agentkv", budget=LARGE) as eviction:
        logits, ours = generated(model, tokens, mask)
    if dtype is torch.float32:
        assert torch.equal(ours.sequences, plain.sequences)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    else:
        first = (logits[:, 0] - expected[:, 0]).abs().max()
        assert first < 0.1 * expected[:, 0].abs().max()
    seen = [report["tokens_seen"] for report in eviction.cache.reports]
    assert seen == [205, 95, 6]  # the last token is not computed
    assert model.config._attn_implementation != "phasekv"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_window_equals_the_reference(model, model_folder, policy):
    """Prompt in two passes, then decoding; the reference checks survivors by its own scores."""
    prompt, more = random_tokens(250, 4), random_tokens(45, 5)
    survivors, logprobs, steps = [], [], []
    with evict(model, policy=policy, budget=128, stride=32) as eviction, torch.no_grad():
        cache, tokens = None, []
        given = [prompt[:150], prompt[150:], *([token] for token in more)]
        for part in given:
            events = eviction.cache.reports[0]["compactions"] if eviction.cache else 0
            out = model(torch.tensor([part]), past_key_values=cache)
            cache = out.past_key_values
            tokens += part
            steps.append(len(tokens))
            logprobs.append(out.logits[0, -1].log_softmax(-1))
            if cache.reports[0]["compactions"] > events:
                survivors.append([cache.positions(0, layer) for layer in range(len(cache))])
    assert len(survivors) == 3
    assert cache.reports[0]["tokens_kept"] == 128 + (295 - 288)
    reference = EvictingReference(str(model_folder()))
    expected = reference.run_window(tokens, steps, 128, 32, POLICIES[policy], survivors)
    torch.testing.assert_close(torch.stack(logprobs), expected.float(), atol=1e-3, rtol=0)


def test_rows_of_a_batch_do_not_touch_each_other(model):
    rows = [random_tokens(300, 6), random_tokens(170, 7)]
    alone = []
    for row in rows:
        with evict(model, policy="snapkv", budget=128, stride=32) as eviction:
            alone.append(generated(model, [row], max_new_tokens=40)[0][0])
    tokens = [rows[0], [0] * 130 + rows[1]]
    mask = [[1] * 300, [0] * 130 + [1] * 170]
    with evict(model, policy="snapkv", budget=128, stride=32) as eviction:
        together, _ = generated(model, tokens, mask, max_new_tokens=40)
    torch.testing.assert_close(together, torch.stack(alone), atol=2e-4, rtol=0)
    assert [report["compactions"] for report in eviction.cache.reports] == [2, 2]


def test_memory_is_freed(model):
    with evict(model, policy="streaming_llm", budget=128, stride=32) as eviction:
        generated(model, [random_tokens(1000, 8)], max_new_tokens=1)
    per_token = 2 * 4 * 2 * 32 * 4  # keys and values, layers, heads, head size, float32
    assert eviction.cache.reports[0]["tokens_kept"] == 128 + 1000 % 32
    assert 128 * per_token < eviction.cache.nbytes < 320 * per_token
    assert eviction.cache.reports[0]["blocks_freed"] == (1000 // 32 * 32 - 128) // 16


def test_a_turn_goes_on_with_the_cache(model):
    first, second = random_tokens(180, 9), random_tokens(60, 10)
    with evict(model, policy="phase_balanced", budget=128, stride=32) as eviction:
        _, turn = generated(model, [first], max_new_tokens=10)
        history = turn.sequences[0].tolist() + second
        cache = eviction.cache
        generated(model, [history], past_key_values=cache, max_new_tokens=5)
    assert eviction.cache is cache
    assert cache.reports[0]["tokens_seen"] == 180 + 10 + 60 + 4


def test_a_function_in_python_scores_here_too(model):
    """The same file as in the tests of vLLM, and the function itself."""
    tokens = [random_tokens(200, 12)]
    for function in ("python_policies:newest", python_policies.newest):
        options = {"policy": "function", "function": function, "sinks": 0}
        with evict(model, budget=128, stride=32, **options) as eviction:
            generated(model, tokens, max_new_tokens=1)
        expected = torch.arange(192 - 128, 200).expand(2, -1)
        assert torch.equal(eviction.cache.positions(0, 1).sort().values, expected)
        assert "failure" not in eviction.cache.reports[0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (python_policies.not_a_number, "not finite"),
        (python_policies.wrong_shape, "[2, 199]"),
        (python_policies.raises, "no idea"),
    ],
)
def test_a_function_that_fails_keeps_the_newest_and_is_named(model, function, says):
    options = {"policy": "function", "function": function, "sinks": 0}
    with evict(model, budget=128, stride=32, **options) as eviction:
        generated(model, [random_tokens(200, 12)], max_new_tokens=1)
    expected = torch.arange(192 - 128, 200).expand(2, -1)
    assert torch.equal(eviction.cache.positions(0, 1).sort().values, expected)
    assert says in eviction.cache.reports[0]["failure"]


def test_phases_come_from_the_tokenizer(demo_model):
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    text = (
        "<|im_start|>assistant\n<think>\n" + "I think about it. " * 30 + "\n</think>\n"
        "<tool_call>\n" + '{"name": "look", "arguments": {"at": "it"}} ' * 8 + "</tool_call>"
    )
    tokens = [tokenizer.encode(text)]
    with evict(model, budget=128, stride=32, tokenizer=tokenizer) as eviction:
        generated(model, tokens, max_new_tokens=1)
    kept = eviction.cache.reports[0]["kept_by_phase"]
    assert kept["think"] > 5
    assert kept["act"] > 5
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with evict(model, budget=LARGE, tokenizer=tokenizer):
        ours = pipe("The sky is", max_new_tokens=5, do_sample=False)
    assert ours == pipe("The sky is", max_new_tokens=5, do_sample=False)


RESPONSE = (
    "<|im_start|>user\n<tool_response>\n"
    + "".join(f"The gauge at mill {mill} stands at {mill * 7 % 13} cm.\n" for mill in range(5))
    + "</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    tags = [f"<{end}{tag}>" for tag in ("think", "tool_call", "tool_response") for end in ("", "/")]
    backend = byte_level_tokenizer("The weather", ["<|im_start|>", "<|im_end|>"], tags)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_chat_with_tool_results_goes_on_in_its_cache(model, tokenizer):
    history = tokenizer.encode("<|im_start|>user\nHow high is the water?<|im_end|>\n")
    chat = {"policy": "agentkv", "tokenizer": tokenizer, "phases": "qwen3"}
    caches = []
    with evict(model, budget=128, stride=32, **chat) as eviction:
        for _ in range(3):
            history += tokenizer.encode(RESPONSE)
            _, turn = generated(model, [history], past_key_values=eviction.cache)
            history = turn.sequences[0].tolist()
            caches.append(eviction.cache)
    assert caches[0] is caches[1] is caches[2]
    (report,) = eviction.cache.reports
    assert report["tokens_seen"] == len(history) - 1
    assert report["compactions"] >= 3
    kept = report["kept_by_phase"]
    assert kept["tool"] > 32
    assert kept["others"] > 8
    assert sum(kept.values()) == pytest.approx(128 + (len(history) - 1) % 32, abs=31)


def test_a_pipeline_evicts(model, tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with evict(model, budget=128, stride=32) as eviction:
        (answer,) = pipe(RESPONSE, return_full_text=False, **options)
        assert eviction.cache.reports[0]["compactions"] >= 1
        tokens = torch.tensor([tokenizer.encode(RESPONSE)])
        expected = model.generate(tokens, **options)[0, tokens.shape[1] :]
    assert answer["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "best"}, "policy"),
        ({"budget": 100}, "budget"),
        ({"budget": 128, "stride": 50}, "stride"),
        ({"budget": 128, "sauce": 1}, "sauce"),
        ({"budget": 128, "phases": "qwen3"}, "phases"),
        ({"policy": "triattention", "budget": 512}, "calibration"),
    ],
)
def test_bad_options_are_named(model, options, named):
    with (
        pytest.raises(InvalidArgumentError, match=named),
        evict(model, **{"budget": 256, "stride": 32, **options}),
    ):
        pass
    assert model.config._attn_implementation != "phasekv"


def test_what_cannot_be_combined_is_refused(model):
    tokens = [random_tokens(40, 11)]
    with evict(model, budget=128, stride=32):
        with pytest.raises(UnsupportedError, match="num_beams"):
            generated(model, tokens, num_beams=2)
        with pytest.raises(UnsupportedError, match="padding"):
            generated(model, tokens * 2, [[1] * 40, [1] * 30 + [0] * 10])
        with pytest.raises(UnsupportedError, match="inputs_embeds"):
            model(inputs_embeds=torch.zeros(1, 3, 128))
        other = DynamicCache(config=model.config)
        other.update(torch.zeros(1, 2, 4, 32), torch.zeros(1, 2, 4, 32), 0)
        with pytest.raises(InvalidArgumentError, match="past_key_values"):
            model(torch.tensor(tokens), past_key_values=other)
        generated(model, tokens)  # and still works


def test_models_with_sliding_windows_are_refused(load):
    model = load("mistral", sliding_window=64)
    with (
        pytest.raises(UnsupportedError, match=r"sliding_window|layer_types"),
        evict(model, budget=128, stride=32),
    ):
        pass
