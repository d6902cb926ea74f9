"""Stands in for the serving engine where a test is about what is done with its answers."""

from __future__ import annotations

import math

import torch

from phasekv.evaluation.engine import Reply

VOCABULARY = 400
SECONDS = {"full_recompute": 4.0, "full_reuse": 0.5, "cacheblend": 2.0}
# How far a method moves probability from token 1 to token 0; full recompute says even odds.
SHIFT = {"full_recompute": 0.0, "full_reuse": 0.4, "cacheblend": -0.3}


class CharacterTokenizer:
    chat_template = None

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens is False
        return [min(ord(character), VOCABULARY - 1) for character in text]


def expected_kl(method):
    share = 0.5 + SHIFT.get(method, 0.1)
    return 0.5 * math.log(0.5 / share) + 0.5 * math.log(0.5 / (1 - share))


class FakeEngine:
    """Answers as told by the tables above and remembers in which order it was asked."""

    def __init__(self, *_, **__):
        self.tokenizer = CharacterTokenizer()
        self.stored = []
        self.calls = []

    def store(self, chunk, prefix=()):
        self.stored.append((tuple(prefix), tuple(chunk)))

    def ask(self, prompt, setting, max_tokens):
        self.calls.append(("ask", setting.method, max_tokens))
        text = " the <b>battery</b> was stolen\n" if setting.method == "full_recompute" else "no"
        return Reply(text, SECONDS.get(setting.method, 1.0), self._report(prompt, setting))

    def score(self, prompt, answer, setting):
        self.calls.append(("score", setting.method, len(answer)))
        share = 0.5 + SHIFT.get(setting.method, 0.1)
        row = torch.full((VOCABULARY,), -math.inf)
        row[0], row[1] = math.log(share), math.log(1 - share)
        for token in answer:
            row[token] = -700.0
        reply = Reply("", SECONDS.get(setting.method, 1.0), self._report(prompt, setting))
        return row.repeat(len(answer), 1), reply

    def _report(self, prompt, setting):
        if not setting.reuses:
            return None
        return {
            "charged_ratio": setting.ratio,
            "tokens_found": sum(end - begin for begin, end in prompt.chunks),
            "chunks_found": len(prompt.chunks),
            "chunks_missed": 0,
        }
