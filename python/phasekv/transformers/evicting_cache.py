"""A transformers cache whose rows hold a part of their tokens, chosen by an eviction policy.

The core does the work: keys and values lie in blocks, `attend_rows` attends them, and an evictor
chooses survivors and moves them, as in vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from phasekv import _core
from phasekv.errors import InvalidArgumentError, UnsupportedError
from phasekv.eviction.report import EvictionReport
from phasekv.eviction.settings import EvictionChoice
from phasekv.transformers.held_keys import HeldKeys, Step
from phasekv.transformers.models import ModelShape, check_same_device
from phasekv.transformers.ragged_keys import RaggedKeys
from phasekv.transformers.windowed_keys import WindowedKeys
from phasekv.transformers_versions import new_tokens_of


class EvictingCache(Cache):  # type: ignore[misc]
    """Keys and values of a batch, at most the budget of each row after an event.

    ``phasekv.transformers.evict`` makes it and tells it of each forward pass.

    Parameters
    ----------
    shape : ModelShape
        Of the model.
    choice : EvictionChoice
        Policy, budget and stride.
    markers : phasekv._core.MarkerAutomaton or None
        Tells phases from tokens; None: one phase for everything.
    block_size : int
        Tokens in a block; budget and stride are multiples of it.
    rope : phasekv._core.Rope or None
        The model's rotation, for a policy that needs it.
    """

    def __init__(
        self,
        shape: ModelShape,
        choice: EvictionChoice,
        markers: _core.MarkerAutomaton | None = None,
        block_size: int = 16,
        rope: _core.Rope | None = None,
    ) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(shape.layers)])
        self._shape = shape
        self._choice = choice
        self._markers = markers
        self._rope = rope
        self._block_size = block_size
        self._policy = choice.build()
        self._window = choice.window(0)
        self._keys: HeldKeys | None = None
        self._computed: list[int] = []
        self._reports: list[EvictionReport] = []
        self._seen = 0
        self._columns = 0  # of the forward pass that runs

    @property
    def choice(self) -> EvictionChoice:
        """Policy, budget and stride."""
        return self._choice

    @property
    def kv_nbytes(self) -> int:
        """Bytes of the blocks of keys and values that are in use."""
        return 0 if self._keys is None else self._keys.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, and what the policy carries along."""
        return 0 if self._keys is None else self._keys.nbytes + self._keys.state_nbytes

    @property
    def reports(self) -> list[dict[str, Any]]:
        """For each row the ``eviction`` object that vLLM's responses have."""
        return [
            report.as_response(self._choice, computed, computed - self._window.start(computed))
            for report, computed in zip(self._reports, self._computed, strict=True)
        ]

    def positions(self, row: int, layer: int) -> torch.Tensor:
        """Positions of a row's held keys, [kv heads, held]; padding does not count.

        Where heads hold different numbers of keys, -1 follows those of the others.
        """
        assert self._keys is not None
        return self._keys.positions(row, layer)

    def begin(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
        """A forward pass of ``tokens`` begins.

        Parameters
        ----------
        tokens : torch.Tensor
            int64 [batch, new tokens].
        mask : torch.Tensor or None
            [batch, seen and new tokens]: 0 for padding, which stands before a row's tokens.

        Raises
        ------
        InvalidArgumentError
            For tokens or a mask of another shape, tokens on another device than the model was when
            the context opened, and where an error ended the pass before.
        UnsupportedError
            For padding that stands elsewhere.
        """
        check_same_device(tokens.device, self._shape.device)
        if tokens.dim() != 2 or tokens.shape[1] == 0:
            raise InvalidArgumentError(
                "input_ids", str(list(tokens.shape)), "[rows, tokens], one token at least"
            )
        if self._columns:
            raise InvalidArgumentError(
                "past_key_values", "a cache whose last pass was ended by an error", "a new one"
            )
        batch, count = tokens.shape
        if self._keys is None:
            kind: type[RaggedKeys | WindowedKeys] = (
                RaggedKeys if self._policy.is_ragged else WindowedKeys
            )
            self._keys = kind(
                self._shape,
                batch,
                self._block_size,
                self._policy,
                self._window,
                self._markers,
                self._rope,
            )
            self._computed = [0] * batch
            self._reports = [EvictionReport() for _ in range(batch)]
        if batch != len(self._computed):
            raise InvalidArgumentError(
                "input_ids", str(list(tokens.shape)), f"{len(self._computed)} rows, as before"
            )
        is_token = torch.ones((batch, count), dtype=torch.bool)
        if mask is not None:
            if mask.shape[0] != batch or mask.shape[1] < count:
                raise InvalidArgumentError(
                    "attention_mask", str(list(mask.shape)), f"[{batch}, {self._seen + count}]"
                )
            is_token = mask[:, -count:].bool().cpu()
        self._refuse_later_padding(is_token)
        places = None
        if not bool(is_token.all()):
            places = is_token.flatten().nonzero()[:, 0].to(self._shape.device)
        on_cpu = tokens.to("cpu", torch.int32)
        rows = [on_cpu[row][is_token[row]] for row in range(batch)]
        self._keys.begin(Step((batch, count), places, rows, list(self._computed)))
        self._computed = [begin + len(row) for begin, row in zip(self._computed, rows, strict=True)]
        self._columns = count

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's new keys and values ``[batch, kv heads, new tokens, head size]``."""
        check_same_device(keys.device, self._shape.device)
        self._running().store(layer, keys, values)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of ``query`` [batch, query heads, new tokens, head size] over what is held.

        Returns ``[batch, new tokens, query heads, head size]``, zero for padding. An event follows
        where it is due.
        """
        keys = self._running()
        out = keys.attend(layer, query, scale)
        if layer == self._shape.layers - 1:
            for event, kept in keys.finish():
                self._reports[event.request].add(EvictionReport.of_event(event, kept))
            self._seen += self._columns
            self._columns = 0
        return out

    def seen(self) -> int:
        """Tokens of a row so far, padding included."""
        return self._seen

    def reset(self) -> None:
        """Forget everything."""
        self._keys, self._computed, self._reports = None, [], []
        self._seen, self._columns = 0, 0

    def crop(self, *_: Any, **__: Any) -> None:
        """Refused: evicted keys do not come back (assisted decoding)."""
        raise UnsupportedError("assisted decoding", "on", "evicted keys do not come back")

    def reorder_cache(self, *_: Any, **__: Any) -> None:
        """Refused (beam search)."""
        raise UnsupportedError("num_beams", "more than 1", "rows keep windows of their own")

    def batch_repeat_interleave(self, *_: Any, **__: Any) -> None:
        """Refused: repeat the prompts instead."""
        raise UnsupportedError("cache", "repeated", "repeat the prompts instead")

    def batch_select_indices(self, *_: Any, **__: Any) -> None:
        """Refused (contrastive search)."""
        raise UnsupportedError("cache", "selected rows", "rows keep windows of their own")

    def _refuse_later_padding(self, is_token: torch.Tensor) -> None:
        has_begun = torch.tensor([computed > 0 for computed in self._computed])
        goes_on = is_token.cummax(1).values if is_token.numel() else is_token
        if bool((~is_token & (has_begun[:, None] | goes_on)).any()):
            raise UnsupportedError(
                "attention_mask", "padding after tokens", "pad batches on the left"
            )

    def _running(self) -> HeldKeys:
        if self._keys is None or self._columns == 0:
            raise InvalidArgumentError(
                "past_key_values",
                "an EvictingCache",
                "used inside of phasekv.transformers.evict only",
            )
        return self._keys


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of a layer."""

    is_sliding = False

    def __init__(self, cache: EvictingCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing: the cache has its sizes from the model."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes into the blocks; the attention function finds the cache by the keys returned."""
        self._cache.store(self._index, key_states, value_states)
        key_states.phasekv_cache = self._cache  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self._cache.seen()

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Length and offset of what a mask would cover."""
        return self._cache.seen() + new_tokens_of(query), 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1
