"""Trajectories become labelled tokens; the tracker, which sees only tokens, agrees."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from phasekv.errors import InvalidArgumentError
from phasekv.evaluation.trajectories import (
    Segment,
    Trajectory,
    label_trajectory,
    load_trajectories,
    render_trajectory,
)
from phasekv.phases import (
    TokenVocabulary,
    choose_table,
    compile_table,
    label_stream,
    phase_names,
    table_named,
    token_vocabulary,
)

SAMPLE = Path(__file__).parent / "trajectory_sample.jsonl"


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: PreTrainedTokenizerBase) -> TokenVocabulary:
    return token_vocabulary(tokenizer)


def test_reading() -> None:
    order, listing = load_trajectories(SAMPLE)
    assert (order.source, order.id, len(order.segments)) == ("written for the tests", "order", 12)
    assert listing == Trajectory("", "7", (Segment("user", ""), Segment("tool_call", "ls")))


def test_line_separators_within_a_text(tmp_path: Path) -> None:
    path = tmp_path / "separators.jsonl"
    text = "one\u2028two\x85three"
    entry = {"segments": [{"phase": "user", "text": text}]}
    path.write_text(json.dumps(entry, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_trajectories(path)[0].segments == (Segment("user", text),)


def test_rendering() -> None:
    order, listing = load_trajectories(SAMPLE)
    assert render_trajectory(listing) == (
        "<|im_start|>user\n<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\nls\n</tool_call><|im_end|>\n"
    )
    assert render_trajectory(order).startswith(
        "<|im_start|>system\nYou help with orders. Call tools as <tool_call>{...}</tool_call>."
        "<|im_end|>\n<|im_start|>user\nWhere is order 4711?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\nLook it up first.\n\nThen answer.\n</think>\n\nOne moment.\n<tool_call>\n"
    )
    assert '"}\n</tool_response>\n<tool_response>\nno parcel' in render_trajectory(order)
    assert render_trajectory(Trajectory("", "", ())) == ""


def test_tokens_of_each_phase_spell_its_segments(
    tokenizer: PreTrainedTokenizerBase, vocabulary: TokenVocabulary
) -> None:
    order = load_trajectories(SAMPLE)[0]
    labelled = label_trajectory(order, tokenizer, vocabulary, max_tokens=10_000)
    assert tokenizer.decode(labelled.tokens) == render_trajectory(order)
    for phase, segment_phase in [("think", "think"), ("act", "tool_call"), ("tool", "tool_result")]:
        content = tokenizer.decode(labelled.tokens[labelled.content(phase)])
        texts = [segment.text for segment in order.segments if segment.phase == segment_phase]
        assert content == "".join(f"\n{text}\n" for text in texts)
    markers = tokenizer.decode(labelled.tokens[labelled.is_marker])
    assert markers.count("<|im_start|>") == 8 - 1
    assert markers.count("</tool_response>\n<tool_response>") == 1


@pytest.mark.parametrize("table", ["smollm2", "qwen3"])
def test_the_tracker_agrees(
    table: str, tokenizer: PreTrainedTokenizerBase, vocabulary: TokenVocabulary
) -> None:
    automaton = compile_table(table_named(table), vocabulary)
    for trajectory in load_trajectories(SAMPLE):
        labelled = label_trajectory(trajectory, tokenizer, vocabulary, max_tokens=10_000)
        phases, is_marker = label_stream(automaton, labelled.tokens)
        np.testing.assert_array_equal(phases, labelled.phases)
        np.testing.assert_array_equal(is_marker, labelled.is_marker)
    assert choose_table(tokenizer).table.name == "smollm2"


def test_cutting(tokenizer: PreTrainedTokenizerBase, vocabulary: TokenVocabulary) -> None:
    order = load_trajectories(SAMPLE)[0]
    whole = label_trajectory(order, tokenizer, vocabulary, max_tokens=10_000)
    cut = label_trajectory(order, tokenizer, vocabulary, max_tokens=50)
    assert len(cut.tokens) == len(cut.phases) == len(cut.is_marker) == 50
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:50])
    np.testing.assert_array_equal(cut.phases, whole.phases[:50])
    np.testing.assert_array_equal(cut.is_marker, whole.is_marker[:50])
    assert set(cut.phases) <= set(range(len(phase_names())))
    empty = label_trajectory(Trajectory("", "", ()), tokenizer, vocabulary, max_tokens=1)
    assert len(empty.tokens) == len(empty.phases) == len(empty.is_marker) == 0


def test_characters_that_the_tokenizer_drops(
    tokenizer: PreTrainedTokenizerBase, vocabulary: TokenVocabulary
) -> None:
    assert tokenizer.encode("\x04", add_special_tokens=False) == []
    trajectory = Trajectory(
        "",
        "",
        (Segment("tool_result", "\x04a\x04"), Segment("think", "\x04b"), Segment("user", "c")),
    )
    labelled = label_trajectory(trajectory, tokenizer, vocabulary, max_tokens=1000)
    assert tokenizer.decode(labelled.tokens) == render_trajectory(trajectory).replace("\x04", "")
    phases, is_marker = label_stream(
        compile_table(table_named("smollm2"), vocabulary), labelled.tokens
    )
    np.testing.assert_array_equal(phases, labelled.phases)
    np.testing.assert_array_equal(is_marker, labelled.is_marker)


def test_bad_arguments(tokenizer: PreTrainedTokenizerBase, vocabulary: TokenVocabulary) -> None:
    order = load_trajectories(SAMPLE)[0]
    with pytest.raises(InvalidArgumentError, match="max_tokens = 0"):
        label_trajectory(order, tokenizer, vocabulary, max_tokens=0)
    shifted = np.concatenate([[0], vocabulary.offsets[:-1]])
    other = TokenVocabulary(vocabulary.data[: shifted[-1]], shifted, {}, frozenset())
    with pytest.raises(InvalidArgumentError, match=r"tokenizer = token .* at byte 0: expected"):
        label_trajectory(order, tokenizer, other, max_tokens=5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad\.jsonl line 2 = {: expected JSON"),
        ("[]", r"bad\.jsonl line 2 = \[\]: expected an object with a list of segments"),
        ('{"segments": {}}', r"bad\.jsonl line 2 = .*: expected an object with a list of segments"),
        ('{"segments": ["x"]}', r'bad\.jsonl line 2: segments\[0\] = "x": expected an object'),
        (
            '{"segments": [{"phase": "act", "text": ""}]}',
            r'bad\.jsonl line 2: segments\[0\].phase = "act": expected one of system, user',
        ),
        (
            '{"segments": [{"phase": "user"}]}',
            r"bad\.jsonl line 2: segments\[0\].text = null: expected text",
        ),
    ],
)
def test_bad_files_name_line_and_field(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"segments": []}) + "\n" + line + "\n")
    with pytest.raises(InvalidArgumentError, match=message):
        load_trajectories(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"trajectories = .*none\.jsonl: expected a file"
    ):
        load_trajectories(tmp_path / "none.jsonl")
