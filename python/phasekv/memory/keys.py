"""Content keys: equal keys mean equal tokens under equal circumstances, and nothing else.

A key depends on everything that changes a chunk's keys and values except its neighbours: the
model, its dtype and RoPE, the adapter, the salt and the tokens. It does not depend on what stands
before or after the chunk in a prompt, so the same note has the same key wherever it is used.

Every field is hashed as a tag, a length and its bytes. No two different lists of fields give the
same bytes, so a salt can never pass for an adapter, or the end of one field for the start of the
next.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from phasekv.errors import InvalidArgumentError
from phasekv.quantization import Quantization

ChunkKey = NewType("ChunkKey", str)
"""A chunk's content key: 64 hexadecimal digits (256 bits)."""

FORMAT_VERSION = 1
"""Changes whenever the bytes that are hashed do; keys of different versions never meet."""

DIGEST_SIZE = 32
"""Bytes of a digest."""


class _Tag(IntEnum):
    """First byte of each hashed field. Numbers are never reused."""

    MODEL = 1
    DTYPE = 2
    ROPE = 3
    NUM_LAYERS = 4
    NUM_KV_HEADS = 5
    HEAD_SIZE = 6
    ADAPTER = 7
    TENSOR_PARALLEL_SIZE = 8
    IDENTITY = 9
    SALT = 10
    TOKENS = 11
    QUANTIZATION = 12


class _FieldHash:
    """BLAKE2b over tagged, length-prefixed fields.

    Parameters
    ----------
    purpose : bytes
        At most 16 bytes that keep digests of different purposes apart.
    """

    def __init__(self, purpose: bytes) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_SIZE, person=purpose)
        self._hash.update(bytes([FORMAT_VERSION]))

    def add(self, tag: _Tag, value: bytes | str | int) -> None:
        if isinstance(value, str):
            # Names may hold what UTF-8 cannot (lone surrogates from the file system).
            value = value.encode("utf-8", "surrogatepass")
        elif isinstance(value, int):
            value = struct.pack("<q", value)
        self._hash.update(struct.pack("<BQ", tag, len(value)))
        self._hash.update(value)

    def digest(self) -> bytes:
        return self._hash.digest()


def canonical_rope(parameters: Mapping[str, Any], rotary_dim: int) -> str:
    """Write RoPE parameters so that equal ones give equal text.

    Parameters
    ----------
    parameters : Mapping[str, Any]
        The model's RoPE configuration: theta, type, factors; JSON values.
    rotary_dim : int
        Dimensions of a head that are rotated.

    Returns
    -------
    str
        JSON with sorted keys, without spaces.

    Raises
    ------
    InvalidArgumentError
        If a value cannot be written as JSON, is NaN or infinite.
    """
    try:
        return json.dumps(
            {"parameters": dict(parameters), "rotary_dim": rotary_dim},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("rope", repr(parameters), f"JSON values ({error})") from error


@dataclass(frozen=True)
class ModelIdentity:
    """What a model must have in common with another for their keys and values to be the same.

    Parameters
    ----------
    model : str
        Name or path, with the revision or a fingerprint of the weights.
    dtype : str
        Of the KV cache, as torch names it: ``"float32"``, ``"bfloat16"``, ``"float16"``.
    rope : str
        RoPE parameters and rotary dimension, from `canonical_rope`.
    num_layers : int
        Layers that have keys and values.
    num_kv_heads : int
        KV heads of the whole model, over all ranks.
    head_size : int
        Elements of one head.
    adapter : str
        Name and number of a LoRA adapter, empty without one.
    tensor_parallel_size : int
        Ranks the heads are spread over. With more ranks than heads, each rank holds one.
    quantization : str
        How chunks are kept (``Quantization.name``), empty where they are exact. Chunks of one
        precision are a miss for a store of another.
    """

    model: str
    dtype: str
    rope: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    adapter: str = ""
    tensor_parallel_size: int = 1
    quantization: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise InvalidArgumentError(field.name, repr(value), "an int of at least 1")
            elif not isinstance(value, str):
                raise InvalidArgumentError(field.name, repr(value), "a str")

    @property
    def local_kv_heads(self) -> int:
        """KV heads that one rank holds."""
        return max(1, self.num_kv_heads // self.tensor_parallel_size)

    def quantized(self, quantization: Quantization | None) -> ModelIdentity:
        """The identity of this model's chunks in a store of this precision."""
        return replace(self, quantization="" if quantization is None else quantization.name)

    def digest(self) -> bytes:
        """Fingerprint of all fields, 32 bytes."""
        field_hash = _FieldHash(b"phasekv model")
        field_hash.add(_Tag.MODEL, self.model)
        field_hash.add(_Tag.DTYPE, self.dtype)
        field_hash.add(_Tag.ROPE, self.rope)
        field_hash.add(_Tag.NUM_LAYERS, self.num_layers)
        field_hash.add(_Tag.NUM_KV_HEADS, self.num_kv_heads)
        field_hash.add(_Tag.HEAD_SIZE, self.head_size)
        field_hash.add(_Tag.ADAPTER, self.adapter)
        field_hash.add(_Tag.TENSOR_PARALLEL_SIZE, self.tensor_parallel_size)
        if self.quantization:  # exact chunks keep the keys that they had before there were others
            field_hash.add(_Tag.QUANTIZATION, self.quantization)
        return field_hash.digest()


def int32_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous little-endian int32 array of shape ``[tokens]``.

    Raises
    ------
    InvalidArgumentError
        If they are not a flat sequence of integers in ``[0, 2**31)``. Nothing is ever wrapped or
        rounded: two different lists of tokens never become the same array.
    """
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError("tokens", type(tokens).__name__, "integers") from error
    if array.ndim != 1:
        raise InvalidArgumentError("tokens", f"shape {array.shape}", "one dimension")
    if array.size == 0:
        return np.zeros(0, dtype="<i4")
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError("tokens", f"dtype {array.dtype}", "integers")
    if int(array.min()) < 0 or int(array.max()) >= 2**31:
        worst = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise InvalidArgumentError("tokens", str(worst), "token ids in [0, 2**31)")
    return np.ascontiguousarray(array, dtype="<i4")


def chunk_key(
    identity: ModelIdentity,
    tokens: Sequence[int] | npt.NDArray[Any],
    salt: str = "",
    adapter: str = "",
) -> ChunkKey:
    """Key of a chunk, by its content.

    Parameters
    ----------
    identity : ModelIdentity
        The model that encodes it.
    tokens : Sequence[int]
        The chunk's token ids, all of them and nothing else.
    salt : str
        Keeps those who do not share chunks apart (vLLM's ``cache_salt``).
    adapter : str
        LoRA adapter of the request, where adapters change from request to request.

    Returns
    -------
    ChunkKey
        64 hexadecimal digits.
    """
    field_hash = _FieldHash(b"phasekv chunk")
    field_hash.add(_Tag.IDENTITY, identity.digest())
    field_hash.add(_Tag.ADAPTER, adapter)
    field_hash.add(_Tag.SALT, salt)
    field_hash.add(_Tag.TOKENS, int32_tokens(tokens).tobytes())
    return ChunkKey(field_hash.digest().hex())
