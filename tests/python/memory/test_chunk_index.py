"""The chunk index from Python, against a quadratic search, and together with the store."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_samples import IDENTITY, examples, sample_chunk

from phasekv import InvalidArgumentError, _core
from phasekv.memory import ChunkStore, DiskTier, chunk_key

ChunkIndex = _core.ChunkIndex
Match = tuple[str, int, int, int]


@dataclass(frozen=True)
class Run:
    """prompt[begin:end] equals tokens of chunk `key` from `chunk_begin` on."""

    begin: int
    end: int
    key: str
    chunk_begin: int
    whole: bool


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def slow_find(chunks: dict[str, list[int]], prompt: list[int], min_match: int) -> list[Match]:
    """The rules of include/phasekv/reuse/chunk_index.h, tried out one by one."""
    runs = []
    for begin in range(len(prompt)):
        candidates = []
        for order, (key, tokens) in enumerate(chunks.items()):
            for offset in range(min(3, len(tokens))):
                length = common_length(prompt[begin:], tokens[offset:])
                if length >= min_match:
                    rest = tokens[offset:]
                    whole = offset == 0 and length == len(tokens)
                    run = Run(begin, begin + length, key, offset, whole)
                    # rest sorts shorter chunks of the same beginning first
                    candidates.append(((-length, offset, rest, order), run))
        if candidates:
            runs.append(min(candidates, key=lambda candidate: candidate[0])[1])

    matches: list[Run] = []
    position = 0
    while position < len(prompt):
        reaching = [run for run in runs if run.begin <= position <= run.end - min_match]
        if not reaching:
            position += 1
            continue
        run = max(reaching, key=lambda run: (run.end, -run.begin))
        if run.begin < position and run.whole and not matches[-1].whole:
            previous = matches.pop()
            if run.begin - previous.begin >= min_match:
                cut = (previous.begin, run.begin, previous.key, previous.chunk_begin)
                matches.append(Run(*cut, whole=False))
        elif run.begin < position:
            chunk_begin = run.chunk_begin + position - run.begin
            run = Run(position, run.end, run.key, chunk_begin, whole=False)
        matches.append(run)
        position = run.end
    return [(run.key, run.begin, run.end, run.chunk_begin) for run in matches]


@st.composite
def chunks_and_prompt(
    draw: st.DrawFn,
) -> tuple[dict[str, list[int]], list[int], int]:
    """Few different tokens, common headers, and prompts made of pieces of the chunks."""
    min_match = draw(st.integers(1, 6))
    token = st.integers(0, draw(st.integers(0, 3)))
    chunks: dict[str, list[int]] = {}
    for number in range(draw(st.integers(0, 6))):
        tokens = draw(st.lists(token, max_size=40))
        if chunks and draw(st.booleans()):
            other = draw(st.sampled_from(sorted(chunks)))
            tokens = chunks[other][: draw(st.integers(0, 40))] + tokens
        chunks[f"chunk {number}"] = tokens
    prompt = draw(st.lists(token, max_size=10))
    for _ in range(draw(st.integers(0, 4)) if chunks else 0):
        tokens = chunks[draw(st.sampled_from(sorted(chunks)))]
        prompt += tokens[draw(st.integers(0, 3)) : draw(st.integers(0, 60))]
        prompt += draw(st.lists(token, max_size=2))
    return chunks, prompt, min_match


@examples(400)
@given(chunks_and_prompt())
def test_finds_what_a_slow_search_finds(
    case: tuple[dict[str, list[int]], list[int], int],
) -> None:
    chunks, prompt, min_match = case
    index = ChunkIndex(min_match=min_match)
    for key, tokens in chunks.items():
        assert index.add(key, tokens) == (len(tokens) >= min_match)
    expected = slow_find(chunks, prompt, min_match)
    assert index.find(prompt) == expected
    # What was never there and what was taken away make no difference.
    for key in chunks:
        index.add(key + " again", chunks[key])
    for key in chunks:
        index.remove(key + " again")
    assert index.find(prompt) == expected


@examples(200)
@given(chunks_and_prompt())
def test_matches_are_true_and_do_not_overlap(
    case: tuple[dict[str, list[int]], list[int], int],
) -> None:
    chunks, prompt, min_match = case
    index = ChunkIndex(min_match=min_match, hash_base=1)  # nearly everything collides
    for key, tokens in chunks.items():
        index.add(key, tokens)
    position = 0
    for key, begin, end, chunk_begin in index.find(prompt):
        assert begin >= position
        assert end - begin >= min_match
        assert prompt[begin:end] == chunks[key][chunk_begin : chunk_begin + end - begin]
        position = end
    assert position <= len(prompt)


@pytest.mark.parametrize(
    "convert",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.uint16),
        lambda tokens: np.array(tokens, np.int64).repeat(2)[::2],
        lambda tokens: np.array(tokens, np.int32).repeat(2)[::2],
    ],
)
def test_tokens_may_come_in_any_container(convert: type) -> None:
    tokens = list(range(100, 140))
    index = ChunkIndex()
    assert index.add("a", convert(tokens))
    assert index.find(convert([1, 2, *tokens, 3])) == [("a", 2, 42, 0)]


@pytest.mark.parametrize(
    "tokens", [[2**31], [-(2**31) - 1], [1.0], ["a"], [[1, 2]], None, 5, [None], [True]]
)
def test_bad_tokens_are_refused_by_name(tokens: object) -> None:
    index = ChunkIndex()
    for call in (index.find, lambda tokens: index.add("a", tokens)):
        with pytest.raises(InvalidArgumentError) as caught:
            call(tokens)
        assert caught.value.argument == "tokens"
    assert len(index) == 0


def test_small_interface() -> None:
    index = ChunkIndex(min_match=2)
    assert (index.min_match, len(index), index.find([])) == (2, 0, [])
    assert index.add("a", [1, 2, 3])
    assert not index.add("a", [4, 5, 6])
    assert not index.add("short", [1])
    assert len(index) == 1
    assert "a" in index
    assert "short" not in index
    assert index.nbytes > 0
    assert index.remove("a")
    assert not index.remove("a")
    with pytest.raises(InvalidArgumentError, match="min_match = 0"):
        ChunkIndex(min_match=0)


def test_threads_find_while_others_add() -> None:
    index = ChunkIndex()
    stable = np.arange(64, dtype=np.int32)
    index.add("stable", stable)
    failures = []

    def add_and_remove(first: int) -> None:
        for number in range(first, first + 300):
            index.add(str(number), np.arange(number * 100, number * 100 + 50))
        for number in range(first, first + 300):
            index.remove(str(number))

    def find() -> None:
        for _ in range(500):
            if index.find(stable) != [("stable", 0, 64, 0)]:
                failures.append("find")

    threads = [threading.Thread(target=add_and_remove, args=(1000 * n,)) for n in (1, 2)]
    threads += [threading.Thread(target=find) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(index) == 1


# Together with keys and store


def test_an_index_is_made_from_a_directory(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, IDENTITY)
    chunks = [sample_chunk(seed, 20 + seed) for seed in range(5)]
    for chunk in chunks:
        tier.put(chunk)
    index = ChunkIndex()
    for key, tokens, _ in DiskTier(tmp_path, IDENTITY).scan():
        assert index.add(key, tokens)
    prompt = np.concatenate([chunk.tokens for chunk in reversed(chunks)])
    assert [match[0] for match in index.find(prompt)] == [chunk.key for chunk in reversed(chunks)]


def test_what_the_store_loses_the_index_forgets() -> None:
    chunks = [sample_chunk(seed, 20) for seed in range(10)]
    store = ChunkStore(4 * chunks[0].nbytes)
    index = ChunkIndex()
    for chunk in chunks:
        index.add(chunk.key, chunk.tokens)
        for gone in store.put(chunk):
            assert index.remove(gone)
    assert len(index) == 4
    found = index.find(np.concatenate([chunk.tokens for chunk in chunks]))
    assert [match[0] for match in found] == [chunk.key for chunk in chunks[6:]]
    assert all(store.contains(match[0]) for match in found)


# What others' users met


def test_nothing_is_lost_at_the_seams_of_documents() -> None:
    """LMCache#4667: on a grid of 256 tokens, 11 % were lost in documents of any length."""
    generator = np.random.default_rng(1)
    documents = [generator.integers(0, 50000, size=generator.integers(16, 700)) for _ in range(30)]
    index = ChunkIndex()
    for document in documents:
        index.add(chunk_key(IDENTITY, document), document)
    order = generator.permutation(30)
    prompt = np.concatenate([documents[number] for number in order])
    expected, begin = [], 0
    for number in order:
        end = begin + len(documents[number])
        expected.append((chunk_key(IDENTITY, documents[number]), begin, end, 0))
        begin = end
    assert index.find(prompt) == expected
    assert begin == len(prompt)


def test_more_is_found_than_the_common_prefix() -> None:
    """LMCache#3238: only prefixes were asked for, so sys+Q2+doc found nothing after sys+Q1+doc."""
    generator = np.random.default_rng(2)
    system, document = (generator.integers(0, 50000, size=size) for size in (50, 2400))
    index = ChunkIndex()
    index.add("document", document)
    question = generator.integers(0, 50000, size=31)
    prompt = np.concatenate([system, question, document])
    assert index.find(prompt) == [("document", 81, 2481, 0)]


def test_a_chunk_is_found_with_the_next_passage_glued_on() -> None:
    """LMCache#2026: 468 stored tokens were not found in 550 without a separator between."""
    generator = np.random.default_rng(3)
    passage, following = generator.integers(0, 50000, size=468), generator.integers(0, 50000, 82)
    index = ChunkIndex()
    index.add("passage", passage)
    assert index.find(np.concatenate([passage, following])) == [("passage", 0, 468, 0)]
    # And the other way round: what was stored with its neighbour serves without it.
    index = ChunkIndex()
    index.add("both", np.concatenate([passage, following]))
    assert index.find(np.concatenate([passage, [7] * 20])) == [("both", 0, 468, 0)]


def test_reordered_chunks_fill_the_prompt() -> None:
    """LMCache#938: [A, B, C], then [B, A, C]."""
    index = ChunkIndex()
    chunks = {name: sample_chunk(seed, 16 + seed) for seed, name in enumerate("ABC")}
    for name, chunk in chunks.items():
        index.add(name, chunk.tokens)
    prompt = np.concatenate([chunks[name].tokens for name in "BAC"])
    assert index.find(prompt) == [("B", 0, 17, 0), ("A", 17, 33, 0), ("C", 33, 51, 0)]


@pytest.mark.parametrize("computed", [0, 1, 15, 16, 17, 40, 59, 60, 61, 100])
def test_a_match_behind_computed_tokens_keeps_rows_and_tokens_together(computed: int) -> None:
    """LMCache#1875: with a prefix-cache hit, queries and cached keys had different lengths.

    The whole prompt is searched, and the part of a match behind the `computed` tokens is the same
    slice of tokens, keys and values.
    """
    chunks = {"A": sample_chunk(1, 60), "B": sample_chunk(2, 40)}
    index = ChunkIndex()
    for name, chunk in chunks.items():
        index.add(name, chunk.tokens)
    prompt = np.concatenate([chunks["A"].tokens, chunks["B"].tokens])
    reused = 0
    for name, begin, end, chunk_begin in index.find(prompt):
        first = max(begin, computed)
        rows = slice(chunk_begin + first - begin, chunk_begin + end - begin)
        if first >= end:
            continue
        assert chunks[name].tokens[rows].tolist() == prompt[first:end].tolist()
        assert chunks[name].keys[:, rows].shape[1] == end - first
        reused += end - first
    assert reused == len(prompt) - computed


def test_sustained_shuffled_load() -> None:
    """LMCache#4663: 14 documents in shuffled order and new text, 90 times, all found each time."""
    generator = np.random.default_rng(4)
    documents = [generator.integers(0, 50000, size=112) for _ in range(14)]
    index = ChunkIndex()
    for number, document in enumerate(documents):
        index.add(str(number), document)
    for query in range(90):
        order = generator.permutation(14)
        question = generator.integers(0, 50000, size=112)
        prompt = np.concatenate([*(documents[number] for number in order), question])
        found = index.find(prompt)
        assert [key for key, *_ in found] == [str(number) for number in order]
        assert sum(end - begin for _, begin, end, _ in found) == 14 * 112
        index.add(f"question {query}", question)
