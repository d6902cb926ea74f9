"""Builds a memory agent's prompt so that every note is an exact range of tokens.

The pieces (what stands before the notes, each note, what stands after) are tokenised one by one
and then joined. A note's tokens are therefore the same in every prompt and alone, which is what
makes its KV reusable; a tokeniser run over the whole text could merge across a note's border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phasekv.evaluation.memory_notes import MemoryNote, render_note

SYSTEM_MESSAGE = "You answer questions about a conversation from the memory notes you are given."
_BEFORE_NOTES = "Based on the context: "
_AFTER_NOTES = (
    ", write an answer in the form of a short phrase for the following question. "
    "Answer with exact words from the context whenever possible.\n\nQuestion: {question}"
    " Short answer:"
)
_NOTES_MARK = "\u241enotes\u241e"
_QUESTION_MARK = "\u241equestion\u241e"


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: object

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of ``text``."""
        ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> object:
        """The conversation as one text."""
        ...


@dataclass(frozen=True)
class MemoryPrompt:
    """A prompt and where its notes are.

    Attributes
    ----------
    token_ids
        All tokens of the prompt.
    chunks
        [begin, end) of each note in ``token_ids``, ascending and disjoint.
    """

    token_ids: list[int]
    chunks: list[tuple[int, int]]

    def followed_by(self, tokens: Sequence[int]) -> MemoryPrompt:
        """The same prompt with ``tokens`` (such as a gold answer) at its end."""
        return MemoryPrompt([*self.token_ids, *tokens], self.chunks)


class PromptBuilder:
    """Makes prompts for one tokenizer, with its chat template where it has one."""

    def __init__(self, tokenizer: Tokenizer, system_message: str = SYSTEM_MESSAGE) -> None:
        self._tokenizer = tokenizer
        user = _BEFORE_NOTES + _NOTES_MARK + _AFTER_NOTES.format(question=_QUESTION_MARK)
        if tokenizer.chat_template:
            rendered = tokenizer.apply_chat_template(
                [
                    {"role": "system", "content": system_message},
                    {"role": "user", "content": user},
                ],
                tokenize=False,
                add_generation_prompt=True,
            )
        else:
            rendered = f"{system_message}\n\n{user}\n"
        if not isinstance(rendered, str):
            raise TypeError("the chat template did not give text")
        before, self._after = rendered.split(_NOTES_MARK)
        self._prefix = self.tokens(before)
        self._notes: dict[str, list[int]] = {}

    @property
    def prefix(self) -> list[int]:
        """The tokens before the first note; the same in every prompt."""
        return list(self._prefix)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text on its own."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def note(self, note: MemoryNote) -> list[int]:
        """The tokens of a rendered note."""
        text = render_note(note)
        if text not in self._notes:
            self._notes[text] = self.tokens(text)
        return list(self._notes[text])

    def prompt(self, notes: Sequence[MemoryNote], question: str) -> MemoryPrompt:
        """The prompt that asks ``question`` over ``notes``, in the order given."""
        ids = self.prefix
        chunks = []
        for note in notes:
            tokens = self.note(note)
            chunks.append((len(ids), len(ids) + len(tokens)))
            ids += tokens
        ids += self.tokens(self._after.replace(_QUESTION_MARK, question))
        return MemoryPrompt(ids, chunks)
