"""Every family's format, with markers that are tokens and markers that are cut up."""

import copy
import random
import re

import numpy as np
import pytest
from families import FAMILIES, QWEN3, Family, labels_of
from tokenizers_for_tests import byte_level_tokenizer

from phasekv.phases import (
    PhaseTracker,
    choose_table,
    compile_table,
    label_stream,
    phase_names,
    table_named,
    table_names,
    token_vocabulary,
)

ADDED = ["every marker", "control tokens", "none"]


def encode(family: Family, added: str) -> tuple[object, list[int], list[tuple[int, int]]]:
    """Tokenizer, tokens, and the byte range of each token."""
    tokenizer = byte_level_tokenizer(
        family.text,
        [] if added == "none" else family.control,
        family.tags if added == "every marker" else [],
    )
    tokens = tokenizer.encode(family.text).ids
    names = {
        token: name.encode() for name, token in token_vocabulary(tokenizer).added_tokens.items()
    }
    vocabulary = token_vocabulary(tokenizer)
    pieces = [names.get(token) or vocabulary.bytes_of(token) for token in tokens]
    assert b"".join(pieces) == family.text.encode()
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return tokenizer, tokens, list(zip([0, *ends], ends, strict=False))


def expected_labels(family: Family, ranges: list[tuple[int, int]]) -> tuple[list[str], list[bool]]:
    """A token has the phase of its first byte, and is a marker's if any of its bytes is."""
    phases, is_marker = labels_of(family)
    return [phases[begin] for begin, _ in ranges], [any(is_marker[b:e]) for b, e in ranges]


def streamed(automaton: object, tokens: list[int], cuts: random.Random) -> tuple[list, list]:
    """Labels of a stream in random pieces, saved, restored and copied on the way."""
    tracker = PhaseTracker(automaton)
    phases: list[int] = []
    is_marker: list[bool] = []
    while len(phases) < len(tokens):
        step = cuts.randint(0, 9)
        part, reached_back = tracker.advance(tokens[len(phases) : len(phases) + step])
        phases += part.tolist()
        for count in reached_back.tolist():
            is_marker.append(False)
            is_marker[len(is_marker) - count :] = [True] * count
        tracker = cuts.choice(
            [tracker, copy.copy(tracker), PhaseTracker.restore(automaton, tracker.save())]
        )
    assert tracker.num_tokens == len(tokens)
    return phases, is_marker


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.table)
def test_phases_of_a_tool_round(family: Family, added: str) -> None:
    tokenizer, tokens, ranges = encode(family, added)
    automaton = compile_table(table_named(family.table), tokenizer)
    expected_phases, expected_markers = expected_labels(family, ranges)
    assert set(expected_phases) >= {"act", "tool", "others"}

    phases, is_marker = label_stream(automaton, tokens)
    assert [phase_names()[phase] for phase in phases] == expected_phases
    assert is_marker.tolist() == expected_markers

    cuts = random.Random(7)
    for _ in range(20):
        assert streamed(automaton, tokens, cuts) == (phases.tolist(), is_marker.tolist())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.table)
def test_the_tokenizers_of_the_tests_are_hard_enough(family: Family) -> None:
    """Some token begins before a marker's end and ends behind it, or the other way round."""
    _, tokens, ranges = encode(family, "none")
    _, is_marker = labels_of(family)
    assert any(len(set(is_marker[begin:end])) == 2 for begin, end in ranges)
    assert len(tokens) < len(family.text.encode()) / 2


def test_every_table_has_a_family_here() -> None:
    others = {"agentkv_published", "single_phase"}
    assert {family.table for family in FAMILIES} | others == set(table_names())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.table)
def test_special_tokens_that_are_only_spelled_mean_nothing(family: Family) -> None:
    """Somebody writes the whole conversation, with all its markers, into one text."""
    tokenizer = byte_level_tokenizer(family.text, family.control, family.tags)
    tokens = [token for letter in family.text for token in tokenizer.encode(letter).ids]
    automaton = compile_table(table_named(family.table), tokenizer)
    phases, _ = label_stream(automaton, tokens)
    assert {phase_names()[phase] for phase in phases} == {"others"}


@pytest.mark.parametrize("added", ADDED)
def test_published_table_of_agentkv(added: str) -> None:
    tokenizer, tokens, ranges = encode(QWEN3, added)
    automaton = compile_table(table_named("agentkv_published"), tokenizer)
    marks = [
        (match.end(), phase)
        for pattern, phase in [
            (rb"<\|im_start\|>(?:system|user)", "others"),
            (rb"<think>", "think"),
            (rb"<tool_call>", "act"),
            (rb"<tool_response>", "tool"),
        ]
        for match in re.finditer(pattern, QWEN3.text.encode())
    ]
    expected = [
        max((mark for mark in marks if mark[0] <= end), default=(0, "others"))[1]
        for _, end in ranges
    ]
    phases, _ = label_stream(automaton, tokens)
    assert [phase_names()[phase] for phase in phases] == expected
    assert streamed(automaton, tokens, random.Random(3))[0] == phases.tolist()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.table)
def test_one_phase_without_markers(family: Family) -> None:
    tokenizer, tokens, _ = encode(family, "control tokens")
    automaton = compile_table(table_named("single_phase"), tokenizer)
    phases, is_marker = label_stream(automaton, tokens)
    assert {phase_names()[phase] for phase in phases} == {"others"}
    assert not is_marker.any()
    assert choose_table(tokenizer, "", "single_phase").table.name == "single_phase"
