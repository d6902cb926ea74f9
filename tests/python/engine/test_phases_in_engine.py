"""Phases reach the engine's buffers: told from tokens, by the tokenizer's marker table."""

from __future__ import annotations

import pytest
import torch
from eviction_reference import POLICIES, EvictingReference
from tiny_models import random_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from phasekv.phases import compile_table, label_stream, phase_names, table_named

pytestmark = pytest.mark.engine

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
CHANGES = {"max_position_embeddings": 4095}  # a folder of its own, for the tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    """Bytes, and the markers of Qwen3 as tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    tokenizer.save_pretrained(model_folder(**CHANGES))
    return tokenizer


def a_round(seed: int) -> str:
    """One round of an agent: thinking, a call, its result."""
    words = [f"word{token}" for token in random_tokens(14, seed)]
    return (
        f"<|im_start|>user\n{' '.join(words[:3])}<|im_end|>\n"
        f"<|im_start|>assistant\n<think>{' '.join(words[3:7])}</think>"
        f"<tool_call>{' '.join(words[7:9])}</tool_call><|im_end|>\n"
        f"<|im_start|>user\n<tool_response>{' '.join(words[9:])}</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize("policy", ["agentkv", "phase_balanced"])
def test_buffers_and_sums_are_kept_per_phase(start_engine, tokenizer, policy):
    engine = start_engine(
        changes=CHANGES,
        skip_tokenizer_init=False,
        phasekv={"eviction": {"budget": 128, "stride": 32, "policy": policy}, "phases": "qwen3"},
        max_num_batched_tokens=128,
        worker_extension_cls="survivor_probe.SurvivorProbe",
    )
    engine.llm.collective_rpc("watch_survivors")
    text = a_round(1) + a_round(2) + "<|im_start|>assistant\n<think>now"
    tokens = tokenizer.encode(text)
    automaton = compile_table(table_named("qwen3"), tokenizer)
    answer = engine.one(tokens, max_tokens=40)
    sequence = tokens + answer.tokens
    phases = label_stream(automaton, sequence)[0].tolist()
    assert set(phases) == {0, 1, 2, 3}
    ((events,),) = (recorded.values() for recorded in engine.llm.collective_rpc("survivors"))
    survivors = [[torch.tensor(layer).view(2, -1) for layer in event] for event in events]
    count = len(tokens)
    steps = [*range(128, count, 128), *range(count, count + 40)]
    logprobs = EvictingReference(str(engine.folder)).run_window(
        sequence, steps, 128, 32, POLICIES[policy], survivors, phases
    )
    torch.testing.assert_close(answer.logprobs, logprobs[-40:].float(), atol=1e-3, rtol=0)
    kept = torch.stack([torch.tensor(phases)[layer] for layer in survivors[-1]])
    for index, name in enumerate(phase_names()):
        mean = float((kept == index).sum()) / kept.shape[0] / kept.shape[1]
        assert answer.report["eviction"]["kept_by_phase"][name] == pytest.approx(mean)
