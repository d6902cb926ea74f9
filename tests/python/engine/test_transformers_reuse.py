"""Reuse in transformers: the methods against the float64 reference, the store against vLLM."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from python_methods import like_phaseshift, most_diverged_values, two_sets
from reference import Setting
from reuse_case import ReuseCase
from tiny_models import ROPE_TYPES, random_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.memory import chunk_key
from phasekv.methods import method_names
from phasekv.transformers import Chunk, ChunkMemory, chunk_memory

pytestmark = pytest.mark.engine

SETTINGS = [
    {"method": "full_recompute", "ratio": 0.1},
    {"method": "full_reuse", "ratio": 0.1},
    {"method": "cacheblend", "ratio": 0.16},
    {"method": "cacheblend_lmcache", "ratio": 0.15},
    {"method": "epic", "ratio": 0.2, "boundary_tokens": 4},
    {"method": "agentkvshift", "ratio": 0.3},
    {"method": "agentkvshift", "ratio": 0.2, "frame": "unrotated"},
    {"method": "phaseshift", "ratio": 0.2},
    {"method": "phaseshift", "ratio": 1.0},
    {"method": "prophetkv", "ratio": 0.2},
    {"method": "prophetkv", "ratio": 1.0},
]
METHODS = [*method_names(), "function"]
SHIFTS = ("agentkvshift", "phaseshift")


class Memory(ChunkMemory):
    """A memory that stores as the tests' vLLM engine does, and a prompt of a ``ReuseCase``."""

    def store_note(self, note, before):
        chunk = self.encode(note, before)
        self.chunks = {**getattr(self, "chunks", {}), tuple(note): chunk}

    def logprobs(self, case, **setting):
        setting["recompute_ratio"] = setting.pop("ratio")
        prefill = self.prefill(self.parts(case), **setting)
        assert prefill.input_ids.tolist() == [case.tokens]
        out = self._model(prefill.input_ids[:, -1:], past_key_values=prefill.past_key_values)
        return out.logits[0, -1].log_softmax(-1), prefill.report

    def parts(self, case):
        parts, at = [], 0
        for begin, end in case.ranges:
            parts += [case.tokens[at:begin], self.chunks[tuple(case.tokens[begin:end])]]
            at = end
        return [*parts, case.tokens[at:]]


class _Store:
    def __init__(self, memory):
        self.store = memory.store_note


@pytest.fixture(scope="module")
def make_case(model_folder):
    def make(family="llama", rope="default", seed=100, **options):
        folder = model_folder(family, rope)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        memory = Memory(model, None, **options)
        return memory, ReuseCase(_Store(memory), folder, seed)

    return make


@pytest.fixture(scope="module")
def case(make_case):
    return make_case()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_method_equals_reference(case, setting):
    memory, prompt = case
    expected, trace = prompt.reference.run(prompt.tokens, prompt.cached, Setting(**setting))
    logprobs, report = memory.logprobs(prompt, **setting)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-3, rtol=0)
    assert report["chunks_found"] == 3
    if setting["method"] != "full_recompute":
        assert report["probes"] == len(trace.probes)
        assert report["tokens_reused"] == 57 + 96 + 33 - len(trace.probes)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_model_families(make_case, family):
    memory, prompt = make_case(family, seed=200)
    for method in ("phaseshift", "agentkvshift", "epic", "prophetkv"):
        setting = {"method": method, "ratio": 0.2}
        expected, _ = prompt.reference.run(prompt.tokens, prompt.cached, Setting(**setting))
        logprobs, _ = memory.logprobs(prompt, **setting)
        torch.testing.assert_close(logprobs.double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("rope", [kind for kind in ROPE_TYPES if kind != "default"])
def test_rope_types(make_case, rope):
    memory, prompt = make_case(rope=rope, seed=300)
    setting = {"method": "phaseshift", "ratio": 0.2}
    expected, _ = prompt.reference.run(prompt.tokens, prompt.cached, Setting(**setting))
    logprobs, _ = memory.logprobs(prompt, **setting)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-3, rtol=0)


def test_the_questions_attention_equals_reference(case, monkeypatch):
    memory, prompt = case
    seen = []

    class Spy(chunk_memory.CachedRows):
        def __init__(self, *arguments):
            seen.append(arguments[-1])
            super().__init__(*arguments)

    monkeypatch.setattr(chunk_memory, "CachedRows", Spy)
    setting = {"method": "prophetkv", "ratio": 0.2}
    prompt.reference.run(prompt.tokens, prompt.cached, Setting(**setting))
    memory.logprobs(prompt, **setting)
    before, attention = seen
    assert before == []
    cached = torch.cat([torch.arange(begin, end) for begin, end in prompt.ranges])
    expected = prompt.reference.attention[cached]
    torch.testing.assert_close(torch.tensor(attention).double(), expected, atol=1e-6, rtol=1e-3)
    assert 0.5 < sum(attention) < 1


def test_the_pass_of_the_question_is_charged(case):
    memory, prompt = case
    _, report = memory.logprobs(prompt, method="prophetkv", ratio=0.25)
    found = 57 + 96 + 33
    assert report["probes"] == found // 4
    # The question's 18 tokens ran through all layers once more.
    assert report["charged_ratio"] == pytest.approx((found // 4 + 18) / found)


def test_prophetkv_at_ratio_one_is_a_full_prefill(case):
    memory, prompt = case
    prophet, _ = memory.logprobs(prompt, method="prophetkv", ratio=1.0)
    full, _ = memory.logprobs(prompt, method="full_recompute", ratio=0.0)
    torch.testing.assert_close(prophet, full, atol=1e-4, rtol=0)


def test_prophetkv_wants_a_question(case):
    memory, prompt = case
    with pytest.raises(InvalidArgumentError, match="question"):
        memory.prefill(memory.parts(prompt)[:-1], method="prophetkv")


@pytest.mark.parametrize("method", [name for name in METHODS if name != "full_reuse"])
def test_at_ratio_one_every_method_is_transformers_itself(case, method):
    memory, prompt = case
    ours, report = memory.logprobs(prompt, **method_named(method), ratio=1.0)
    plain = memory._model(torch.tensor([prompt.tokens])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)
    assert report["chunks_found"] == 3
    assert report["tokens_reused"] == 0


@pytest.mark.parametrize("method", [name for name in METHODS if name != "full_recompute"])
def test_exact_chunks_without_probes_are_transformers_itself(case, method):
    """The note stands behind what it was encoded after; nothing of it is computed again."""
    memory, _ = case
    head, note, question = (random_tokens(count, 700 + count) for count in (40, 90, 17))
    chunk = memory.encode(note, head)
    choice = {**method_named(method), "recompute_ratio": 0.0}
    prefill = memory.prefill([head, chunk, question], **choice)
    assert prefill.report["tokens_reused"] == len(note)
    assert prefill.seconds > 0
    tokens = torch.tensor([head + note + question])
    answers = [
        memory._model.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for inputs in (prefill.inputs, {"input_ids": tokens})
    ]
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    ours, plain = (torch.cat(answer.logits).log_softmax(-1) for answer in answers)
    torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)


def method_named(method):
    return {"method": method} | ({"function": like_phaseshift} if method == "function" else {})


def test_bfloat16_runs(model_folder):
    """Nothing of an exact chunk is computed again: near transformers' own cache in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16)
    memory = ChunkMemory(model, None)
    head, note, question = (random_tokens(count, 800 + count) for count in (40, 90, 17))
    chunk = memory.encode(note, head)
    plain = model(torch.tensor([head + note + question[:-1]])).past_key_values
    for method in ("full_reuse", "phaseshift"):
        prefill = memory.prefill([head, chunk, question], method=method, recompute_ratio=0.1)
        for ours, theirs in zip(prefill.past_key_values.layers, plain.layers, strict=True):
            assert ours.keys.dtype == torch.bfloat16
            difference = (ours.keys - theirs.keys).float().norm()
            assert difference < 0.05 * theirs.keys.float().norm()


@pytest.mark.parametrize("bits", [2, 4])
def test_quantised_chunks_are_what_the_methods_work_with(make_case, bits):
    """The reference is given what is left of the chunks; nothing else may differ."""
    memory, prompt = make_case(seed=300 + bits, bits=bits)
    cached = [(begin, dequantised(memory, prompt, begin, chunk)) for begin, chunk in prompt.cached]
    for method in ("full_reuse", "cacheblend", "cacheblend_lmcache", "epic", *SHIFTS):
        setting = {"method": method, "ratio": 0.2}
        expected, _ = prompt.reference.run(prompt.tokens, cached, Setting(**setting))
        exact, _ = prompt.reference.run(prompt.tokens, prompt.cached, Setting(**setting))
        logprobs, report = memory.logprobs(prompt, **setting)
        assert report["chunks_found"] == 3
        torch.testing.assert_close(logprobs.double(), expected, atol=2e-3, rtol=0)
        assert (expected - exact).abs().max() > 0.02
    with pytest.raises(InvalidArgumentError, match="bits"):
        Memory(memory._model, None, bits=3)


@pytest.mark.parametrize(
    "wish",
    [
        {"method": "prophetkv"},
        {"method": "function", "function": two_sets},
        {"method": "function", "function": like_phaseshift, "frame": "unrotated"},
        {"method": "function", "function": most_diverged_values},
    ],
    ids=lambda wish: getattr(wish.get("function"), "__name__", "prophetkv"),
)
def test_over_quantised_chunks_is_over_what_is_left_of_them(make_case, wish):
    """An exact memory is given the dequantised chunks; methods must not see a difference."""
    memory, prompt = make_case(seed=302, bits=2)
    exact, _ = make_case(seed=302)
    left = Memory(memory._model, None)
    left.chunks = {
        tokens: put_exactly(left, memory.store.get(chunk.key))
        for tokens, chunk in memory.chunks.items()
    }
    ours, report = memory.logprobs(prompt, **wish, ratio=0.2)
    expected, same_report = left.logprobs(prompt, **wish, ratio=0.2)
    assert report == same_report
    assert report["chunks_found"] == 3
    assert 0 < report["probes"] < report["tokens_found"]
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
    unquantised, _ = exact.logprobs(prompt, **wish, ratio=0.2)
    assert (ours - unquantised).abs().max() > 0.02


def put_exactly(memory, chunk):
    """Store what is left of a quantised chunk, its keys rotated to where it was encoded."""
    layers = [chunk.rows(layer, 0, len(chunk.tokens)) for layer in range(chunk.keys.shape[0])]
    keys, values = (torch.stack(kind) for kind in zip(*layers, strict=True))
    places = torch.arange(chunk.position, chunk.position + len(chunk.tokens))
    half = keys.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (places[:, None] * frequencies)[:, None]
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    tokens = chunk.tokens.tolist()
    key = chunk_key(memory.identity, tokens)
    rotated = torch.cat([pairs.real, pairs.imag], dim=-1).to(keys.dtype)
    memory.store.put(dataclasses.replace(chunk, key=key, keys=rotated, values=values))
    return Chunk(tuple(tokens), key)


def dequantised(memory, prompt, begin, chunk):
    """A stored chunk's rows; the reference, too, has keys without rotation."""
    end = begin + chunk.keys.shape[1]
    stored = memory.store.get(memory.chunks[tuple(prompt.tokens[begin:end])].key)
    assert stored.quantization is not None
    layers = [stored.rows(layer, 0, end - begin) for layer in range(chunk.keys.shape[0])]
    keys = [keys.double() for keys, _ in layers]
    values = [values.double() for _, values in layers]
    return type(chunk)(torch.stack(keys), torch.stack(values))


def wait_for_files(folder, count):
    """A worker writes chunks beside its steps."""
    for _ in range(600):
        if len(list(folder.rglob("*.safetensors"))) >= count:
            return
        time.sleep(0.1)
    pytest.fail(f"{count} chunks were not written")


@pytest.mark.parametrize("bits", [None, 2])
def test_one_store_on_disk_serves_both_engines(make_case, start_engine, tmp_path, bits):
    """Encoded here, found by vLLM; and the other way round."""
    memory, prompt = make_case(seed=400, directory=tmp_path, bits=bits)
    memory.store.flush()
    engine = start_engine(phasekv={"store_directory": str(tmp_path), "chunk_store_bits": bits})
    answer = engine.one(prompt.tokens, chunks=prompt.ranges, method="phaseshift", ratio=0.2)
    assert answer.report["chunks_found"] == 3
    ours, report = memory.logprobs(prompt, method="phaseshift", ratio=0.2)
    assert report["probes"] == answer.report["probes"]
    torch.testing.assert_close(ours, answer.logprobs[0], atol=2e-3, rtol=0)
    note = random_tokens(40, 500)
    engine.store(note)
    wait_for_files(tmp_path, 4)
    engine.close()
    again = Memory(memory._model, None, directory=tmp_path, bits=bits)
    prefill = again.prefill([[5, 6], Chunk(tuple(note), again.encode(note).key), [7, 8]])
    assert prefill.report["chunks_found"] == 1
    assert again.store.statistics().disk_hits == 1


def test_texts_notes_and_generate(demo_model):
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    memory = ChunkMemory(model, tokenizer)
    head = "<|im_start|>user\nNotes:\n"
    note = memory.encode("Anna keeps the keys of the archive in the blue drawer.\n", head)
    assert memory.encode("Anna keeps the keys of the archive in the blue drawer.\n") == note
    prompt = [head, note, "Where are the keys?<|im_end|>\n<|im_start|>assistant\n"]
    prefill = memory.prefill(prompt, method="full_reuse")
    answer = model.generate(**prefill.inputs, max_new_tokens=8, do_sample=False)
    plain = model.generate(prefill.input_ids, max_new_tokens=8, do_sample=False)
    # The note stands where it was encoded, so that reuse is exact.
    assert torch.equal(answer, plain)
    assert prefill.report["tokens_reused"] == len(note.tokens)
    assert model.config._attn_implementation != "phasekv"


def test_what_is_not_stored_is_computed_and_named(case):
    memory, _ = case
    lost = Chunk((7, 8, 9), "0" * 64)
    prefill = memory.prefill([[4, 5], lost, [6]])
    assert prefill.report["missed"] == [{"range": [2, 5], "reason": "not stored"}]
    plain = memory._model(torch.tensor([[4, 5, 7, 8, 9]]), use_cache=True).past_key_values
    for ours, theirs in zip(prefill.past_key_values.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=0)


def test_a_chunk_at_the_end_leaves_its_last_token_to_generate(case):
    memory, _ = case
    chunk = memory.encode(random_tokens(30, 600))
    prefill = memory.prefill([chunk], method="full_reuse")
    assert prefill.report["tokens_reused"] == 29
    assert prefill.past_key_values.get_seq_length() == 29


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "magic"}, "method"),
        ({"recompute_ratio": 1.5}, "ratio"),
        ({"frame": "sideways"}, "frame"),
    ],
)
def test_bad_options_are_named(case, options, named):
    memory, prompt = case
    with pytest.raises(InvalidArgumentError, match=named):
        memory.prefill(memory.parts(prompt), **options)


def test_bad_prompts_and_notes_are_named(case):
    memory, _ = case
    with pytest.raises(InvalidArgumentError, match="parts"):
        memory.prefill([[3]])
    with pytest.raises(InvalidArgumentError, match="note"):
        memory.encode([])
    with pytest.raises(InvalidArgumentError, match="tokens"):
        memory.prefill([[3, -4]])


def test_other_models_are_refused(model_folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(UnsupportedError, match="gpt2"):
        ChunkMemory(model, None)
