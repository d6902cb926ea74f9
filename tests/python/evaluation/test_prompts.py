"""Prompts whose notes are exact ranges of tokens, with a small tokenizer made here."""

import re

import pytest

from phasekv.evaluation.memory_notes import MemoryNote, render_note
from phasekv.evaluation.prompts import PromptBuilder


class WordTokenizer:
    """Splits like a BPE tokenizer that merges across a note's border would: ". talk" is a token."""

    def __init__(self, chat_template=None):
        self.chat_template = chat_template
        self.words = []

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        pieces = re.findall(r"\]\ntalk|\w+|\s+|.", text, flags=re.DOTALL)
        for piece in pieces:
            if piece not in self.words:
                self.words.append(piece)
        return [self.words.index(piece) for piece in pieces]

    def decode(self, ids):
        return "".join(self.words[index] for index in ids)

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert tokenize is False
        assert add_generation_prompt is True
        turns = "".join(f"<{turn['role']}>{turn['content']}</s>" for turn in conversation)
        return turns + "<assistant>"


NOTES = [
    MemoryNote(str(index), f"time {index}", f"Speaker says {index}", "context", ("k",), ("g",))
    for index in range(3)
]


@pytest.fixture(params=[None, "template"])
def tokenizer(request):
    return WordTokenizer(request.param)


def test_text_is_that_of_the_pieces(tokenizer):
    prompt = PromptBuilder(tokenizer, "System.").prompt(NOTES, "Who?")
    text = tokenizer.decode(prompt.token_ids)
    notes = "".join(render_note(note) for note in NOTES)
    assert (
        f"Based on the context: {notes}, write an answer in the form of a short phrase for the "
        "following question. Answer with exact words from the context whenever possible.\n\n"
        "Question: Who? Short answer:"
    ) in text
    if tokenizer.chat_template:
        assert text.startswith("<system>System.</s><user>Based on")
        assert text.endswith("Short answer:</s><assistant>")


def test_chunks_are_the_notes_whatever_the_order(tokenizer):
    builder = PromptBuilder(tokenizer)
    alone = {note.id: builder.note(note) for note in NOTES}
    for order in (NOTES, NOTES[::-1]):
        prompt = builder.prompt(order, "Who?")
        assert prompt.chunks[0][0] == len(builder.prefix)
        for note, (begin, end) in zip(order, prompt.chunks, strict=True):
            assert prompt.token_ids[begin:end] == alone[note.id]


def test_tokenising_the_whole_text_would_cross_borders(tokenizer):
    prompt = PromptBuilder(tokenizer).prompt(NOTES, "Who?")
    whole = tokenizer.encode(tokenizer.decode(prompt.token_ids), add_special_tokens=False)
    assert whole != prompt.token_ids


def test_every_prompt_begins_with_the_prefix(tokenizer):
    builder = PromptBuilder(tokenizer)
    for question in ("Who?", "When?"):
        ids = builder.prompt(NOTES[:1], question).token_ids
        assert ids[: len(builder.prefix)] == builder.prefix


def test_answer_goes_to_the_end(tokenizer):
    prompt = PromptBuilder(tokenizer).prompt(NOTES, "Who?")
    longer = prompt.followed_by([7, 8])
    assert longer.token_ids == [*prompt.token_ids, 7, 8]
    assert longer.chunks == prompt.chunks


def test_question_may_hold_braces_and_marks(tokenizer):
    prompt = PromptBuilder(tokenizer).prompt(NOTES, "What is {x}?")
    assert "Question: What is {x}? Short" in tokenizer.decode(prompt.token_ids)
