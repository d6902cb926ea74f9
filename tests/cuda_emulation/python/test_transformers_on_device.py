"""transformers models on an emulated device say what they say on a CPU, with PhaseKV's caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_tensors import DEVICE, DeviceTensor, OnDevice, on_device, on_host
from tiny_models import make_model, random_tokens
from transformers import AutoModelForCausalLM

from phasekv import _core
from phasekv.errors import InvalidArgumentError, MissingCapabilityError
from phasekv.transformers import ChunkMemory, evict, quantize
from phasekv.transformers.paged_blocks import PagedBlocks

STREAM = 7
TOKENS = [random_tokens(210, 1), random_tokens(210, 2)]
PADDED = [[0] * 40 + random_tokens(170, 3), random_tokens(210, 4)]
MASK = [[0] * 40 + [1] * 170, [1] * 210]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """On the CPU."""
    folder = make_model(tmp_path_factory.mktemp("model") / "llama", "llama")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def placed(model: Any) -> Any:
    """The same on the device."""
    moved = copy.deepcopy(model)
    for module in moved.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = on_device(tensor.detach())
    return moved


def checked(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op, which asserts that it is given the stream where a tensor is on the device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, DeviceTensor) for value in kwargs.values()):
            assert kwargs["stream"] == STREAM
        return op(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors may be made there, and every op with one of them runs on torch's stream."""
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    for name, op in vars(_core).items():
        if "stream:" in (getattr(op, "__doc__", None) or ""):
            monkeypatch.setattr(_core, name, checked(op))
    with OnDevice(), torch.no_grad():
        yield


def said(model: Any, tokens: list[list[int]], mask: Any = None) -> tuple[torch.Tensor, Any]:
    """Logits of generated tokens, on the CPU, and the rest of the answer."""
    given = None if mask is None else torch.tensor(mask, device=model.device)
    answer = model.generate(
        torch.tensor(tokens, device=model.device),
        attention_mask=given,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        max_new_tokens=20,
    )
    return on_host(torch.stack(answer.logits, dim=1)), answer


@pytest.mark.parametrize(
    ("policy", "tokens", "mask"),
    [
        ("agentkv", TOKENS, None),
        ("agentkv", PADDED, MASK),
        ("h2o", TOKENS, None),
        ("r_kv", TOKENS, None),
    ],
)
def test_eviction_is_that_of_the_cpu(model, placed, policy, tokens, mask):
    held = []
    for one in (model, placed):
        with evict(one, policy=policy, budget=64, stride=16):
            logits, answer = said(one, tokens, mask)
        cache = answer.past_key_values
        positions = [cache.positions(row, layer) for row in range(2) for layer in range(4)]
        held.append((logits, on_host(answer.sequences), positions, cache.nbytes))
        assert all(report["tokens_evicted"] for report in cache.reports)
    (logits, sequences, positions, _), (on_it, theirs, places, _) = held
    torch.testing.assert_close(on_it, logits, atol=2e-4, rtol=2e-4)
    assert torch.equal(sequences, theirs)
    for ours, wanted in zip(places, positions, strict=True):
        assert torch.equal(ours, wanted)


def test_memory_is_given_back_on_a_device(placed):
    with evict(placed, policy="agentkv", budget=64, stride=16):
        _, answer = said(placed, TOKENS)
    cache = answer.past_key_values
    nbytes_of_block = 4 * 2 * 2 * 16 * 32 * 4
    # Before the event both rows had 14 blocks. Now they hold 64 tokens and the 6 since; an eighth
    # more is room to grow.
    assert cache._keys.nbytes <= 2 * 5 * nbytes_of_block * 9 / 8
    blocks = cache._keys._pool._memory.blocks
    assert (blocks.nbytes, blocks.device) == (cache._keys.nbytes, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_in_use_keep_their_content_when_a_pool_shrinks(dtype):
    pool = PagedBlocks(2, 3, 4, 8, dtype, DEVICE)
    held = pool.allocate(40)
    assert pool.nbytes == 45 * 2 * 2 * 3 * 4 * 8 * dtype.itemsize
    for block in held:
        pool._memory.blocks[block] = float(block)
    kept = held[5:40:7]
    moved = pool.release([block for block in held if block not in kept])
    assert sorted(moved) == kept
    assert pool.nbytes == 8 * 2 * 2 * 3 * 4 * 8 * dtype.itemsize
    for block in kept:
        assert (on_host(pool._memory.blocks[moved[block]]) == float(block)).all()
    assert not set(pool.allocate(3)) & set(moved.values())


def test_few_released_blocks_stay_in_the_pool():
    pool = PagedBlocks(1, 1, 4, 8, torch.float32, DEVICE)
    held = pool.allocate(40)
    before = pool.nbytes
    assert pool.release(held[:10]) == {}
    assert pool.nbytes == before


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        ("agentkvshift", None),
        ("agentkvshift", 4),
        ("phaseshift", None),
        ("cacheblend", None),
        ("prophetkv", None),
    ],
)
def test_reuse_is_that_of_the_cpu(model, placed, method, bits):
    notes = [random_tokens(50, 7), random_tokens(37, 8)]
    answers = []
    for one in (model, placed):
        memory = ChunkMemory(one, None, bits=bits)
        chunks = [memory.encode(note, prefix=[3, 4, 5]) for note in notes]
        parts = [random_tokens(9, 9), *chunks, random_tokens(11, 10)]
        prefill = memory.prefill(parts, method=method, recompute_ratio=0.2)
        stored = memory.store.get(chunks[0].key)
        assert not isinstance(stored.rows(0, 0, 5)[0], DeviceTensor)
        keys = torch.stack([layer.keys for layer in prefill.past_key_values.layers])
        values = torch.stack([layer.values for layer in prefill.past_key_values.layers])
        report = prefill.report
        answer = one.generate(**prefill.inputs, do_sample=False, max_new_tokens=8, pad_token_id=0)
        assert answer.device == one.device
        answers.append((on_host(keys), on_host(values), report, on_host(answer)))
    (keys, values, report, answer), (their_keys, their_values, theirs, on_it) = answers
    assert theirs == report
    torch.testing.assert_close(their_keys, keys, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(their_values, values, atol=2e-4, rtol=2e-4)
    assert torch.equal(on_it, answer)


@pytest.mark.parametrize("bits", [2, 4])
def test_a_quantized_cache_is_that_of_the_cpu(model, placed, bits):
    answers = []
    for one in (model, placed):
        with quantize(one, bits=bits, residual=32):
            answers.append(said(one, TOKENS))
    (logits, answer), (on_it, theirs) = answers
    torch.testing.assert_close(on_it, logits, atol=2e-3, rtol=2e-3)
    assert torch.equal(on_host(theirs.sequences), answer.sequences)
    assert theirs.past_key_values.nbytes == answer.past_key_values.nbytes


@pytest.mark.parametrize("policy", ["adakv", "pyramidkv"])
def test_heads_with_unlike_numbers_of_keys_are_refused(placed, policy):
    with (
        pytest.raises(MissingCapabilityError, match=r"device = cuda:0.* on the CPU only"),
        evict(placed, policy=policy, budget=64, stride=16),
    ):
        said(placed, TOKENS)


def test_what_is_not_where_the_model_is_is_refused(model, placed):
    with (
        pytest.raises(InvalidArgumentError, match="device = cpu: expected cuda:0"),
        evict(placed, policy="agentkv", budget=64, stride=16),
    ):
        placed(torch.tensor(TOKENS))
    split = copy.copy(placed)
    split._modules = dict(placed._modules, lm_head=model.lm_head)
    with (
        pytest.raises(MissingCapabilityError, match="device = cpu, cuda:0"),
        evict(split, policy="agentkv", budget=64, stride=16),
    ):
        pass
