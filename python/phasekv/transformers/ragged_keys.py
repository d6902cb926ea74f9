"""Keys and values in blocks of one layer and head each: heads may hold unlike numbers of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phasekv import _core
from phasekv.transformers.held_keys import Step, token_rows
from phasekv.transformers.models import ModelShape, check_on_cpu
from phasekv.transformers.paged_blocks import PagedBlocks


@dataclass(frozen=True)
class _Lines:
    """The tokens of a forward pass, once for each KV head: row by row, head by head.

    ``heads`` counts the heads of all rows through; ``offsets`` is the token's place among the new
    ones of its row; ``flat`` its index in [batch, kv heads, columns].
    """

    heads: torch.Tensor
    offsets: torch.Tensor
    flat: torch.Tensor


class _Layer:
    """One layer's pool, in which every head of every row has blocks of its own."""

    def __init__(self, shape: ModelShape, heads: int, block_size: int) -> None:
        self.pool = PagedBlocks(1, 1, block_size, shape.head_size, shape.dtype, shape.device)
        self.blocks: list[list[int]] = [[] for _ in range(heads)]
        self.held = torch.zeros(heads, dtype=torch.int64)
        self.table = torch.zeros((heads, 0), dtype=torch.int32)

    def reserve(self, held: torch.Tensor) -> None:
        """Have blocks for so many keys of each head."""
        size = self.pool.block_size
        needed = (-(-held // size)).tolist()
        missing = [count - len(own) for count, own in zip(needed, self.blocks, strict=True)]
        if any(missing):
            new = iter(self.pool.allocate(sum(missing)))
            for own, count in zip(self.blocks, missing, strict=True):
                own += [next(new) for _ in range(count)]
            self._renew_table()

    def shrink(self) -> None:
        """Give back the blocks behind the keys that are held."""
        size = self.pool.block_size
        freed: list[int] = []
        for own, held in zip(self.blocks, self.held.tolist(), strict=True):
            count = -(-held // size)
            freed += own[count:]
            del own[count:]
        self.pool.release(freed)
        self._renew_table()

    def _renew_table(self) -> None:
        lists = [torch.tensor(own, dtype=torch.int32) for own in self.blocks]
        self.table = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)


class RaggedKeys:
    """Blocks per layer and head, and the evictor of a batch; see ``HeldKeys``.

    What a head holds takes ceil(held / block size) blocks. A prompt's blocks are taken when its
    layer runs, and given back before the next one does.

    Parameters
    ----------
    shape : ModelShape
        Of the model.
    batch, block_size : int
        Rows, and tokens in a block.
    policy, window, markers, rope
        Of every row; see ``EvictingCache``.

    Raises
    ------
    MissingCapabilityError
        For a model on a device.
    """

    def __init__(
        self,
        shape: ModelShape,
        batch: int,
        block_size: int,
        policy: _core.Policy,
        window: _core.Window,
        markers: _core.MarkerAutomaton | None,
        rope: _core.Rope | None,
    ) -> None:
        check_on_cpu(shape, "heads that hold unlike numbers of keys are there")
        self._shape = shape
        self._batch = batch
        heads = batch * shape.kv_heads
        self._layers = [_Layer(shape, heads, block_size) for _ in range(shape.layers)]
        self._evictor = _core.RaggedEvictor(
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
            kv=self._layers[0].pool.kv(0),
            scale=shape.scale,
            rope=rope,
        )
        for row in range(batch):
            self._evictor.add(row, policy=policy, window=window, markers=markers)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in use."""
        return sum(layer.pool.nbytes for layer in self._layers)

    @property
    def state_nbytes(self) -> int:
        """Bytes that the policy carries along."""
        return sum(self._evictor.nbytes(row) for row in range(self._batch))

    def positions(self, row: int, layer: int) -> torch.Tensor:
        """Positions of a row's held keys, [kv heads, most held]; -1 where a head holds fewer."""
        heads = [
            torch.tensor(self._evictor.positions(row, layer, head))
            for head in range(self._shape.kv_heads)
        ]
        return torch.nn.utils.rnn.pad_sequence(heads, batch_first=True, padding_value=-1)

    def begin(self, step: Step) -> None:
        """The tokens of a forward pass are there."""
        self._evictor.begin_step()
        kv_heads, columns = self._shape.kv_heads, step.shape[1]
        self._new = torch.tensor([len(tokens) for tokens in step.tokens])
        self._running = self._new > 0
        first_row = 0
        for row, (begin, tokens) in enumerate(zip(step.begins, step.tokens, strict=True)):
            if len(tokens):
                self._evictor.schedule(row, begin=begin, first_row=first_row, tokens=tokens)
            first_row += len(tokens)
        # Padding stands before a row's tokens.
        head, column = (
            torch.arange(columns) >= columns - self._new.repeat_interleave(kv_heads)[:, None]
        ).nonzero(as_tuple=True)
        self._lines = _Lines(
            heads=head,
            offsets=column - columns + self._new.repeat_interleave(kv_heads)[head],
            flat=head * columns + column,
        )
        self._step = step

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's new keys and values, [batch, kv heads, columns, head size]."""
        one = self._layers[layer]
        one.reserve(one.held + self._new.repeat_interleave(self._shape.kv_heads))
        index = one.held[self._lines.heads] + self._lines.offsets
        size = one.pool.block_size
        blocks = one.table[self._lines.heads, index // size].to(torch.int64)
        slots = blocks * size + index % size
        kv = one.pool.kv(0)
        for states, half in ((keys, kv.key), (values, kv.value)):
            rows = states.detach().flatten(0, 2)[self._lines.flat]
            _core.scatter_blocks(rows=rows[:, None], slots=slots, blocks=half)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention over what is held; an event follows where it is due."""
        one, lines = self._layers[layer], self._lines
        batch, columns = self._step.shape
        kv_heads, size = self._shape.kv_heads, self._shape.head_size
        # A KV head stands for a request, its group for the query heads of a model.
        grouped = query.detach().unflatten(1, (kv_heads, -1)).transpose(2, 3)
        rows = grouped.flatten(0, 2)[lines.flat]
        out = torch.empty_like(rows)
        kv = one.pool.kv(0)
        _core.attend_rows(
            query=rows,
            kv=kv,
            block_table=one.table,
            row_requests=lines.heads.to(torch.int32),
            row_limits=one.held[lines.heads] + lines.offsets + 1,
            scale=scale,
            out=out,
        )
        self._evict(layer, query)
        whole = rows.new_zeros((batch * kv_heads * columns, *rows.shape[1:]))
        whole[lines.flat] = out
        by_column = whole.view(batch, kv_heads, columns, -1, size).transpose(1, 2)
        attended: torch.Tensor = by_column.reshape(batch, columns, -1, size)
        return attended

    def finish(self) -> list[tuple[_core.EvictionReport, list[float]]]:
        """All layers ran; their blocks have been given back on the way."""
        return [
            (event, self._evictor.kept_by_phase(event.request)) for event in self._evictor.finish()
        ]

    def _evict(self, layer: int, query: torch.Tensor) -> None:
        one, kv_heads = self._layers[layer], self._shape.kv_heads
        tables = one.table.unflatten(0, (self._batch, kv_heads))[self._running].flatten(0, 1)
        self._evictor.layer(
            layer,
            query=token_rows(query, self._step),
            kv=one.pool.kv(0),
            block_tables=tables.contiguous(),
        )
        if not self._evictor.has_events():
            one.held += self._new.repeat_interleave(kv_heads)
            return
        one.held = torch.tensor(
            [count for row in range(self._batch) for count in self._evictor.held(row, layer)]
        )
        one.shrink()
