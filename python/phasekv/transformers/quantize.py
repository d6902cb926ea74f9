"""A quantised cache while a transformers model generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phasekv.errors import InvalidArgumentError
from phasekv.quantization import Quantization
from phasekv.transformers.cache_owner import claim
from phasekv.transformers.models import shape_of
from phasekv.transformers.one_context import one_context
from phasekv.transformers.quantized_cache import RESIDUAL, QuantizedCache


@dataclass
class QuantizedGeneration:
    """What ``quantize`` gives: the newest cache.

    Attributes
    ----------
    cache : QuantizedCache or None
        Of the generation that began last; pass it to ``generate`` as ``past_key_values`` to go on
        with it in the next turn.
    """

    cache: QuantizedCache | None = None


@contextmanager
def quantize(
    model: Any, *, bits: int, group_size: int = 32, residual: int = RESIDUAL
) -> Iterator[QuantizedGeneration]:
    """Inside this context the model's forward passes keep keys and values in a few bits.

    ``generate``, chat turns with a cache that is passed on, beams and pipelines work as ever.

    Parameters
    ----------
    model : transformers model
        A decoder of full attention, on the CPU or a CUDA device, in float32, bfloat16 or float16.
    bits : int
        2 or 4.
    group_size : int
        Elements that share a scale and a zero point: a multiple of ``32 / bits``.
    residual : int
        Tokens, a multiple of the group size: so many newest values stay exact, and up to so many
        keys.

    Raises
    ------
    UnsupportedError
        For models that it cannot be combined with, and inside of another context.
    InvalidArgumentError
        For a bad option, by its name.
    """
    quantization = Quantization(bits, group_size)
    layers = shape_of(model).layers
    QuantizedCache(layers, quantization, residual)  # a bad residual is refused here
    settings = (quantization, residual, layers)
    generation = QuantizedGeneration()

    def give_cache(
        model: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = named.get("past_key_values")
        if not isinstance(cache, QuantizedCache):
            if cache is not None and cache.get_seq_length() > 0:
                raise InvalidArgumentError(
                    "past_key_values", type(cache).__name__, "absent, or of a quantize() context"
                )
            cache = QuantizedCache(layers, quantization, residual)
        if (cache.quantization, cache.residual, len(cache.layers)) != settings:
            raise InvalidArgumentError(
                "past_key_values",
                "a cache of other settings",
                f"one of {bits} bits, groups of {group_size}, residual {residual}, {layers} layers",
            )
        claim(cache, model)
        generation.cache = cache
        return arguments, {**named, "past_key_values": cache, "use_cache": True}

    with one_context(model, "quantize"):
        handle = model.register_forward_pre_hook(give_cache, with_kwargs=True)
        try:
            yield generation
        finally:
            handle.remove()
