"""Eviction while a transformers model generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phasekv._core import MarkerAutomaton, Rope
from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.eviction.settings import EvictionChoice, parse_engine_choice
from phasekv.phases import choose_table, compile_table, token_vocabulary
from phasekv.transformers.attention import ATTENTION
from phasekv.transformers.cache_owner import claim
from phasekv.transformers.evicting_cache import EvictingCache
from phasekv.transformers.models import ModelShape, shape_of
from phasekv.transformers.one_context import one_context
from phasekv.transformers.rotation import rope_of_model

BLOCK_SIZE = 16


@dataclass
class Eviction:
    """What ``evict`` gives: how the newest cache stands.

    Attributes
    ----------
    cache : EvictingCache or None
        Of the generation that began last; pass it to ``generate`` as ``past_key_values`` to go on
        with it in the next turn.
    """

    cache: EvictingCache | None = None


@contextmanager
def evict(
    model: Any,
    *,
    policy: str = "phase_balanced",
    budget: int,
    stride: int = 128,
    tokenizer: Any = None,
    phases: str | None = None,
    **options: Any,
) -> Iterator[Eviction]:
    """Inside this context the model's forward passes keep at most ``budget`` keys a row.

    ``generate``, chat turns with a cache that is passed on, and pipelines work as ever.

    Parameters
    ----------
    model : transformers model
        A decoder of full attention, on the CPU or a CUDA device, in float32, bfloat16 or float16.
        Policies whose heads hold unlike numbers of keys run on the CPU only.
    policy : str
        One of ``docs/eviction.md``.
    budget, stride : int
        In tokens, multiples of 16: a row holds at most ``budget`` keys after each event, and an
        event comes at every multiple of ``stride``.
    tokenizer : transformers tokenizer or None
        Tells the phases of tokens; None: one phase for everything.
    phases : str or None
        Name of a marker table; None: chosen by the tokenizer and its chat template.
    options
        The policy's own, as in the ``eviction`` object of vLLM's requests.

    Raises
    ------
    UnsupportedError
        For models and ways of generating that eviction cannot be combined with, and inside of
        another context.
    InvalidArgumentError
        For a bad option, by its name.
    """
    choice = parse_engine_choice({"policy": policy, "budget": budget, "stride": stride, **options})
    assert choice is not None
    shape = shape_of(model)
    choice.check(BLOCK_SIZE, model.config.get_text_config(decoder=True).max_position_embeddings)
    eviction = Eviction()
    rope = rope_of_model(model, shape) if choice.build().needs_rope else None
    before = _Before(shape, choice, _markers_of(tokenizer, phases), rope, eviction)
    with one_context(model, "evict"):
        previous = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        handle = model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield eviction
        finally:
            handle.remove()
            model.set_attn_implementation(previous)


def _markers_of(tokenizer: Any, phases: str | None) -> MarkerAutomaton | None:
    if tokenizer is None:
        if phases is not None:
            raise InvalidArgumentError("phases", phases, "given together with a tokenizer")
        return None
    vocabulary = token_vocabulary(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    return compile_table(choose_table(vocabulary, template, phases).table, vocabulary)


@dataclass
class _Before:
    """Runs before each forward pass: gives it our cache, and the cache the pass's tokens."""

    shape: ModelShape
    choice: EvictionChoice
    markers: MarkerAutomaton | None
    rope: Rope | None
    eviction: Eviction

    def __call__(
        self, model: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens = named.get("input_ids", arguments[0] if arguments else None)
        if tokens is None:
            raise UnsupportedError("inputs_embeds", "given", "phases are told from input_ids")
        cache = named.get("past_key_values")
        if not isinstance(cache, EvictingCache):
            if cache is not None and cache.get_seq_length() > 0:
                raise InvalidArgumentError(
                    "past_key_values", type(cache).__name__, "absent, or of an evict() context"
                )
            cache = EvictingCache(self.shape, self.choice, self.markers, BLOCK_SIZE, self.rope)
        if cache.choice != self.choice:
            raise InvalidArgumentError(
                "past_key_values",
                "a cache of other settings",
                f"one with {self.choice.policy}, budget {self.choice.budget}, stride "
                f"{self.choice.stride} and the same options",
            )
        claim(cache, model)
        self.eviction.cache = cache
        mask = named.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise UnsupportedError("attention_mask", f"{mask.dim()} dimensions", "it needs two")
        cache.begin(tokens, mask)
        return arguments, {**named, "past_key_values": cache, "use_cache": True}
