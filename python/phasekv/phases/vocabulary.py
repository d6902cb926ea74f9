"""What a tokenizer's tokens stand for, in bytes.

Text differs with its neighbours in how it is cut into tokens, so a marker that is no token of its
own can only be found in the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasekv.errors import UnsupportedError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True)
class TokenVocabulary:
    """Bytes of all tokens, and the tokens that have a name.

    Parameters
    ----------
    data : bytes
        Bytes of all tokens, one after the other.
    offsets : numpy.ndarray
        ``[tokens + 1]`` of int64: token ``t`` is ``data[offsets[t]:offsets[t + 1]]``. Control
        tokens and unused ids have no bytes.
    added_tokens : dict[str, int]
        Tokens that the tokenizer takes out of a text as a whole, by what they read.
    control_tokens : frozenset[str]
        Those of them that are no text, such as the end of a turn.
    """

    data: bytes
    offsets: npt.NDArray[np.int64]
    added_tokens: dict[str, int]
    control_tokens: frozenset[str]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def bytes_of(self, token: int) -> bytes:
        """Bytes of one token; empty for control tokens."""
        return self.data[self.offsets[token] : self.offsets[token + 1]]


def token_vocabulary(tokenizer: Any) -> TokenVocabulary:
    """Read a tokenizer's vocabulary.

    Parameters
    ----------
    tokenizer : Any
        A ``tokenizers.Tokenizer``, a fast tokenizer of transformers, a tekken tokenizer of
        mistral-common, a ``tiktoken.Encoding``, or an engine's wrapper around one of them.

    Returns
    -------
    TokenVocabulary
        Takes about a second for the largest vocabularies.

    Raises
    ------
    UnsupportedError
        If it is none of these, or its tokens are not pieces of the text.
    """
    for candidate in _unwrapped(tokenizer):
        if hasattr(candidate, "to_str") and hasattr(candidate, "token_to_id"):
            return _from_tokenizers(candidate)
        if hasattr(candidate, "id_to_byte_piece") and hasattr(candidate, "special_ids"):
            return _from_tekken(candidate)
        if hasattr(candidate, "decode_single_token_bytes"):
            return _from_tiktoken(candidate)
    raise _unsupported(tokenizer)


def _unwrapped(tokenizer: Any) -> Iterator[Any]:
    yield tokenizer
    for attribute in ("backend_tokenizer", "tokenizer", "_tokenizer", "model"):
        inner = getattr(tokenizer, attribute, None)
        if inner is not None:
            yield inner


def _unsupported(tokenizer: Any) -> UnsupportedError:
    return UnsupportedError(
        "tokenizer",
        type(tokenizer).__name__,
        "phases are read from byte-level BPE, SentencePiece, tekken and tiktoken vocabularies",
    )


def _packed(
    pieces: dict[int, bytes], added_tokens: dict[str, int], control_tokens: frozenset[str]
) -> TokenVocabulary:
    ordered = [pieces.get(token, b"") for token in range(max(pieces, default=-1) + 1)]
    offsets = np.zeros(len(ordered) + 1, dtype=np.int64)
    np.cumsum([len(piece) for piece in ordered], out=offsets[1:])
    return TokenVocabulary(b"".join(ordered), offsets, added_tokens, control_tokens)


def _from_tokenizers(tokenizer: Any) -> TokenVocabulary:
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    added = description["added_tokens"]
    if _has_type(description.get("decoder"), "ByteLevel") or _has_type(
        description.get("pre_tokenizer"), "ByteLevel"
    ):
        pieces = {token: _byte_level_bytes(piece) for piece, token in vocabulary.items()}
    elif model.get("type") in ("BPE", "Unigram"):
        pieces = {
            token: _sentencepiece_bytes(piece, bool(model.get("byte_fallback")))
            for piece, token in vocabulary.items()
        }
    else:
        raise _unsupported(tokenizer)
    for entry in added:
        pieces[entry["id"]] = b"" if entry["special"] else entry["content"].encode()
    return _packed(
        pieces,
        {entry["content"]: entry["id"] for entry in added},
        frozenset(entry["content"] for entry in added if entry["special"]),
    )


def _has_type(part: Any, name: str) -> bool:
    """Whether a decoder or pre-tokenizer, or one of a sequence of them, is of this type."""
    if isinstance(part, dict):
        return part.get("type") == name or any(_has_type(inner, name) for inner in part.values())
    return isinstance(part, list) and any(_has_type(inner, name) for inner in part)


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte.

    Printable ones stand for themselves, the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_OF_CHARACTER = {ord(character): byte for byte, character in enumerate(_byte_characters())}


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:  # a token that was not made from bytes
        return piece.encode()


def _sentencepiece_bytes(piece: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(_WORD_START, " ").encode()


def _from_tekken(tokenizer: Any) -> TokenVocabulary:
    special_ids = tokenizer.special_ids
    special = {tokenizer.id_to_piece(token): token for token in sorted(special_ids)}
    pieces = {
        token: b"" if token in special_ids else tokenizer.id_to_byte_piece(token)
        for token in range(tokenizer.n_words)
    }
    return _packed(pieces, special, frozenset(special))


def _from_tiktoken(encoding: Any) -> TokenVocabulary:
    special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    special_ids = set(special.values())
    pieces: dict[int, bytes] = dict.fromkeys(special_ids, b"")
    for token in range(encoding.n_vocab):
        if token in special_ids:
            continue
        try:
            pieces[token] = encoding.decode_single_token_bytes(token)
        except KeyError:  # an unused id
            continue
    return _packed(pieces, special, frozenset(special))
