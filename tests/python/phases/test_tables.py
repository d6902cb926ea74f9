"""Reading, checking and choosing marker tables."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, MISTRAL, QWEN3, Family
from tokenizers_for_tests import byte_level_tokenizer
from transformers import AutoTokenizer

from phasekv import InvalidArgumentError
from phasekv.phases import (
    Marker,
    MarkerTable,
    choose_table,
    compile_table,
    label_stream,
    load_table,
    table_named,
    table_names,
    token_vocabulary,
)

TABLE: dict[str, Any] = {
    "name": "mine",
    "special_tokens": ["<turn>"],
    "states": {"all": "others", "thinking": "think"},
    "initial_state": "all",
    "markers": [
        {"text": ["<turn>", "((("], "to": "all"},
        {"text": "<<", "in": ["all"], "to": "thinking"},
        {"tokens": [[1, 2]], "to": "all"},
    ],
}


def test_a_table_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(TABLE))
    table = load_table(path)
    assert table == MarkerTable(
        name="mine",
        states={"all": "others", "thinking": "think"},
        initial_state="all",
        markers=(
            Marker(("<turn>", "((("), "all"),
            Marker(("<<",), "thinking", ("all",)),
            Marker(((1, 2),), "all"),
        ),
        special_tokens=("<turn>",),
    )
    tokenizer = byte_level_tokenizer("a<<b", ["<turn>"], [])
    for override in (path, str(path), table):
        choice = choose_table(tokenizer, override=override)
        assert choice.table == table
        assert "asked for" in choice.reason
    tokens = tokenizer.encode("a<<b<turn>a").ids
    phases, _ = label_stream(compile_table(table, tokenizer), tokens)
    assert sorted(set(phases.tolist())) == [0, 3]


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t.pop("states"), "mine.json = .*: expected a field 'states'"),
    (lambda t: t.update(state={}), "mine.json = 'state': expected only the fields completing_to"),
    (lambda t: t.update(name=""), 'mine.json: name = "": expected text'),
    (lambda t: t.update(states=[]), r"mine.json: states = \[\]: expected a JSON object"),
    (lambda t: t.update(states={}), r"mine.json: states = {}: expected a JSON object"),
    (
        lambda t: t["states"].update(thinking="thought"),
        'mine.json: states.thinking = "thought": expected one of think, act, tool, others',
    ),
    (
        lambda t: t.update(initial_state="start"),
        'mine.json: initial_state = "start": expected one of all, thinking',
    ),
    (lambda t: t.update(markers={}), "mine.json: markers = {}: expected a list"),
    (
        lambda t: t["markers"].append("<think>"),
        r'mine.json: markers\[3\] = "<think>": expected a JSON object',
    ),
    (lambda t: t["markers"][1].pop("to"), r"mine.json: markers\[1\] = .*: expected a field 'to'"),
    (
        lambda t: t["markers"][1].update(to="thnking"),
        r'mine.json: markers\[1\].to = "thnking": expected one of all, thinking',
    ),
    (
        lambda t: t["markers"][1].update({"in": ["all", 7]}),
        r"mine.json: markers\[1\].in\[1\] = 7: expected one of all, thinking",
    ),
    (
        lambda t: t["markers"][1].update({"in": []}),
        r"mine.json: markers\[1\].in = \[\]: expected a list with at least one entry",
    ),
    (
        lambda t: t["markers"][1].update(text=""),
        r'mine.json: markers\[1\].text = "": expected text that is not empty',
    ),
    (
        lambda t: t["markers"][0].update(text=["a", 5]),
        r"mine.json: markers\[0\].text\[1\] = 5: expected text",
    ),
    (lambda t: t["markers"][0].pop("text"), r"mine.json: markers\[0\] = .*either text or tokens"),
    (
        lambda t: t["markers"][2].update(text="a"),
        r"mine.json: markers\[2\] = .*either text or tokens",
    ),
    (
        lambda t: t["markers"][2].update(tokens=[[1, -2]]),
        r"mine.json: markers\[2\].tokens\[0\]\[1\] = -2: expected >= 0",
    ),
    (
        lambda t: t["markers"][2].update(tokens=[[True]]),
        r"mine.json: markers\[2\].tokens\[0\]\[0\] = true",
    ),
    (
        lambda t: t.update(completing_token="next"),
        'mine.json: completing_token = "next": expected one of left, entered',
    ),
    (lambda t: t.update(priority="high"), 'mine.json: priority = "high": expected an integer'),
    (lambda t: t.update(detect="<think>"), 'mine.json: detect = "<think>": expected a list'),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_tables_name_field_and_value(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(TABLE)
    change(content)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgumentError, match=message):
        load_table(path)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(InvalidArgumentError, match=r"mine\.json: expected a JSON file"):
        load_table(path)
    path.write_text('{"name": ')
    with pytest.raises(InvalidArgumentError, match=r"mine\.json: expected a JSON file"):
        load_table(path)
    path.write_text("[]")
    with pytest.raises(InvalidArgumentError, match=r"mine.json = \[\]: expected a JSON object"):
        load_table(path)
    with pytest.raises(InvalidArgumentError, match="'qwen': expected one of agentkv_published, "):
        choose_table(byte_level_tokenizer("a", [], []), override="qwen")


def test_every_table_of_ours_is_well_formed() -> None:
    for name in table_names():
        table = table_named(name)
        assert table.name == name
        assert table.description
        assert table.detect or name in ("agentkv_published", "single_phase")
        # Every state can be entered.
        reached = {table.initial_state, *(marker.to for marker in table.markers)}
        assert reached == set(table.states), name


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.table)
def test_a_family_is_known_by_its_tokens_and_its_template(family: Family) -> None:
    detect = table_named(family.table).detect
    tokens = [text for text in detect if text in family.control + family.tags]
    rest = " ".join(text for text in detect if text not in tokens)
    as_tokens = byte_level_tokenizer(family.text, tokens, [])
    assert choose_table(as_tokens, rest).table.name == family.table
    as_text = byte_level_tokenizer(family.text, [], [])
    choice = choose_table(as_text, {"default": "", "tool_use": " ".join(detect)})
    assert choice.table.name == family.table
    assert all(f"{text} (chat template)" in choice.reason for text in detect)


def test_a_model_without_markers_has_one_phase_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = byte_level_tokenizer("a", ["<s>"], [])
    with caplog.at_level(logging.WARNING, "phasekv"):
        choice = choose_table(tokenizer, "{{ messages }}")
    assert choice.table.name == "single_phase"
    assert "no known markers" in choice.reason
    assert choice.reason in caplog.text


def test_demo_model(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    choice = choose_table(tokenizer)
    assert choice.table.name == "smollm2"
    assert choice.reason == "found <|im_start|> (token), named SmolLM (chat template)"
    assert choose_table(token_vocabulary(tokenizer), tokenizer.chat_template) == choice


def test_chat_template_must_be_text() -> None:
    with pytest.raises(InvalidArgumentError, match="chat_template = int"):
        choose_table(byte_level_tokenizer("a", [], []), 7)  # type: ignore[arg-type]


def test_a_control_token_that_the_table_does_not_list() -> None:
    tokenizer = byte_level_tokenizer(QWEN3.text, QWEN3.control, [])
    table = MarkerTable(
        name="mine",
        states={"all": "others"},
        initial_state="all",
        markers=(Marker(("<|im_start|>user",), "all"),),
    )
    with pytest.raises(InvalidArgumentError, match=r"also '<\|im_start\|>', which marker"):
        compile_table(table, tokenizer)


def test_ids_beyond_the_vocabulary() -> None:
    table = MarkerTable(
        name="mine",
        states={"all": "others"},
        initial_state="all",
        markers=(Marker(((5, 100_000),), "all"),),
    )
    with pytest.raises(InvalidArgumentError, match="tokens of marker table mine = 100000"):
        compile_table(table, byte_level_tokenizer(MISTRAL.text, [], []))
