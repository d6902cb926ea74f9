"""A memory agent's view of a transformers model, with the methods that vLLM has no place for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phasekv.evaluation.engine import Reply, ReuseSetting
from phasekv.evaluation.prompts import MemoryPrompt
from phasekv.memory.keys import chunk_key


class TransformersEngine:
    """Stands where ``MemoryEngine`` does.

    Parameters
    ----------
    model
        Folder of a Hugging Face model; it runs in float32.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from phasekv.transformers import ChunkMemory

        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._memory = ChunkMemory(self._model, self.tokenizer)

    def store(self, chunk: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """Encodes ``chunk`` alone, or after ``prefix``; one that is stored already is replaced."""
        self._memory.store.drop(chunk_key(self._memory.identity, chunk))
        self._memory.encode(chunk, prefix)

    def ask(self, prompt: MemoryPrompt, setting: ReuseSetting, max_tokens: int) -> Reply:
        """Greedy answer of at most ``max_tokens`` tokens; its first token's time is not taken."""
        prefill = self._prefill(prompt, setting)
        answer = self._model.generate(**prefill.inputs, max_new_tokens=max_tokens, do_sample=False)
        text = self.tokenizer.decode(answer[0, len(prompt.token_ids) :], skip_special_tokens=True)
        return Reply(text, prefill.seconds, prefill.report if setting.reuses else None)

    @torch.no_grad()
    def score(
        self, prompt: MemoryPrompt, answer: Sequence[int], setting: ReuseSetting
    ) -> tuple[torch.Tensor, Reply]:
        """The distributions that predict each token of a given ``answer`` (teacher forcing).

        A method sees the prompt alone, without the answer.

        Returns
        -------
        log_probs
            float32 [len(answer), vocabulary], in nats. Row i predicts ``answer[i]``.
        reply
            Without text.
        """
        begin = time.perf_counter()
        prefill = self._prefill(prompt, setting)
        first = self._model(prefill.input_ids[:, -1:], past_key_values=prefill.past_key_values)
        seconds = time.perf_counter() - begin
        rows = [first.logits[0]]
        if len(answer) > 1:
            given = torch.tensor([list(answer[:-1])])
            rows.append(self._model(given, past_key_values=prefill.past_key_values).logits[0])
        report = prefill.report if setting.reuses else None
        return torch.cat(rows).float().log_softmax(-1), Reply("", seconds, report)

    def _prefill(self, prompt: MemoryPrompt, setting: ReuseSetting) -> Any:
        from phasekv.transformers import Chunk

        parts: list[Any] = []
        at = 0
        for begin, end in prompt.chunks if setting.reuses else ():
            tokens = prompt.token_ids[begin:end]
            chunk = Chunk(tuple(tokens), chunk_key(self._memory.identity, tokens))
            parts += [prompt.token_ids[at:begin], chunk]
            at = end
        return self._memory.prefill(
            [*parts, prompt.token_ids[at:]],
            method=setting.method,
            recompute_ratio=setting.ratio,
            **setting.switches,
        )
