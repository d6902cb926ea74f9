"""Bytes of tokens, for every kind of tokenizer."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers_for_tests import byte_level_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from phasekv import UnsupportedError
from phasekv.phases import TokenVocabulary, token_vocabulary

TEXT = "Grüße, 世界! \t\u00a0 it's 🙂\nand\n\n  spaces\x07 <end>"


def spelled(vocabulary: TokenVocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.bytes_of(token) for token in tokens)


def test_byte_level_tokens_give_the_text_back() -> None:
    tokenizer = byte_level_tokenizer(TEXT, ["<end>"], ["世界"])
    vocabulary = token_vocabulary(tokenizer)
    tokens = tokenizer.encode(TEXT).ids
    assert spelled(vocabulary, tokens) == TEXT.removesuffix("<end>").encode()
    assert vocabulary.added_tokens == {"<end>": tokens[-1], "世界": tokenizer.token_to_id("世界")}
    assert vocabulary.control_tokens == {"<end>"}
    assert len(vocabulary) == tokenizer.get_vocab_size()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_vocabulary(fast).data == vocabulary.data


def test_every_byte_has_a_token() -> None:
    tokenizer = byte_level_tokenizer(TEXT, [], [])
    vocabulary = token_vocabulary(tokenizer)
    pieces = {vocabulary.bytes_of(token) for token in range(len(vocabulary))}
    assert {bytes([byte]) for byte in range(256)} <= pieces


def test_sentencepiece_tokens_give_the_text_back() -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<unk>", "<end>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    vocabulary = token_vocabulary(tokenizer)
    assert spelled(vocabulary, tokenizer.encode(TEXT).ids) == TEXT.removesuffix("<end>").encode()
    assert vocabulary.control_tokens == {"<unk>", "<end>"}


def test_byte_fallback_tokens_are_bytes() -> None:
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "<0xE4>": 2, "\u2581a": 3, "a": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert spelled(token_vocabulary(tokenizer), [1, 2, 3, 4]) == b"\n\xe4 aa"


def test_tekken_tokens_give_the_text_back() -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    data = Path(tekken.__file__).parents[2] / "data"
    tokenizer = tekken.Tekkenizer.from_file(next(data.glob("tekken_240911.json")))
    vocabulary = token_vocabulary(SimpleNamespace(tokenizer=tokenizer))  # as vLLM wraps it
    tokens = tokenizer.encode(TEXT, bos=True, eos=True)
    assert spelled(vocabulary, tokens) == TEXT.encode()
    assert vocabulary.added_tokens["[TOOL_CALLS]"] == 9
    assert "[INST]" in vocabulary.control_tokens
    assert len(vocabulary) == tokenizer.n_words


def test_tiktoken_tokens_give_the_text_back() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"an": 256, b"and": 258}
    encoding = tiktoken.Encoding(
        "test", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={"<end>": 260}
    )
    vocabulary = token_vocabulary(SimpleNamespace(model=encoding))  # as Kimi's tokenizer wraps it
    tokens = encoding.encode(TEXT, allowed_special="all")
    assert spelled(vocabulary, tokens) == TEXT.removesuffix("<end>").encode()
    assert vocabulary.added_tokens == {"<end>": 260}
    assert [vocabulary.bytes_of(token) for token in (256, 257, 258)] == [b"an", b"", b"and"]


def test_demo_model(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    vocabulary = token_vocabulary(tokenizer)
    tokens = tokenizer.encode(TEXT)
    assert spelled(vocabulary, tokens) == TEXT.encode()
    assert vocabulary.control_tokens >= {"<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize(
    "tokenizer",
    [object(), Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))],
    ids=["no tokenizer", "WordPiece"],
)
def test_other_tokenizers_are_refused(tokenizer: object) -> None:
    with pytest.raises(UnsupportedError, match="tokenizer = "):
        token_vocabulary(tokenizer)
