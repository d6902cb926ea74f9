"""Keys and values in blocks of all layers and heads: every head holds a window's worth of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phasekv import _core
from phasekv.reuse.stream import current_stream
from phasekv.transformers.held_keys import Step, token_rows, with_padding
from phasekv.transformers.models import ModelShape
from phasekv.transformers.paged_blocks import PagedBlocks


@dataclass(frozen=True)
class _Places:
    """Where the tokens of a forward pass stand, on the model's device."""

    requests: torch.Tensor
    slots: torch.Tensor
    limits: torch.Tensor
    block_table: torch.Tensor


class WindowedKeys:
    """Blocks and the evictor of a batch, as in vLLM; see ``HeldKeys``.

    Parameters
    ----------
    shape : ModelShape
        Of the model.
    batch, block_size : int
        Rows, and tokens in a block.
    policy, window, markers, rope
        Of every row; see ``EvictingCache``.
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
        self._shape = shape
        self._window = window
        self._pool = PagedBlocks(
            shape.layers,
            shape.kv_heads,
            block_size,
            shape.head_size,
            shape.dtype,
            shape.device,
        )
        self._evictor = _core.Evictor(
            layers=shape.layers,
            query_heads=shape.query_heads,
            kv=self._pool.kv(0),
            scale=shape.scale,
            rope=rope,
        )
        for row in range(batch):
            self._evictor.add(row, policy=policy, window=window, markers=markers)
        # Of each row, those of [window.start(computed), computed).
        self._blocks: list[list[int]] = [[] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in use."""
        return self._pool.nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes that the policy carries along."""
        return sum(self._evictor.nbytes(row) for row in range(len(self._blocks)))

    def positions(self, row: int, layer: int) -> torch.Tensor:
        """Positions of a row's held keys, [kv heads, held]."""
        return torch.tensor(self._evictor.positions(row, layer)).view(self._shape.kv_heads, -1)

    def begin(self, step: Step) -> None:
        """The tokens of a forward pass are there."""
        self._evictor.begin_step()
        size = self._pool.block_size
        requests, slots, limits, tables = [], [], [], []
        first_row = 0
        for row, (begin, tokens) in enumerate(zip(step.begins, step.tokens, strict=True)):
            first_held = self._window.start(begin)
            end = begin + len(tokens)
            own = self._blocks[row]
            own += self._pool.allocate(-(-(end - first_held) // size) - len(own))
            blocks = torch.tensor(own, dtype=torch.int32)
            tables.append(blocks)
            index = torch.arange(begin, end) - first_held
            slots.append(blocks[index // size].to(torch.int64) * size + index % size)
            limits.append(index + 1)
            requests.append(torch.full((len(tokens),), row, dtype=torch.int32))
            if len(tokens):
                before = torch.zeros(first_held // size, dtype=torch.int32)
                self._evictor.schedule(
                    row,
                    begin=begin,
                    first_row=first_row,
                    tokens=tokens,
                    block_table=torch.cat([before, blocks]),
                )
            first_row += len(tokens)
        self._step = step
        self._places = _Places(
            requests=torch.cat(requests).to(self._shape.device),
            slots=torch.cat(slots).to(self._shape.device),
            limits=torch.cat(limits).to(self._shape.device),
            block_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(
                self._shape.device
            ),
        )

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take a layer's new keys and values, [batch, kv heads, columns, head size]."""
        kv, slots = self._pool.kv(layer), self._places.slots
        stream = current_stream(self._shape.device)
        for states, blocks in ((keys, kv.key), (values, kv.value)):
            rows = token_rows(states, self._step)
            _core.scatter_blocks(rows=rows, slots=slots, blocks=blocks, stream=stream)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention over what is held; an event follows where it is due."""
        kv, places = self._pool.kv(layer), self._places
        rows = token_rows(query, self._step)
        out = torch.empty_like(rows)
        stream = current_stream(self._shape.device)
        _core.attend_rows(
            query=rows,
            kv=kv,
            block_table=places.block_table,
            row_requests=places.requests,
            row_limits=places.limits,
            scale=scale,
            out=out,
            stream=stream,
        )
        self._evictor.layer(layer, query=rows, kv=kv, stream=stream)
        return with_padding(out, self._step)

    def finish(self) -> list[tuple[_core.EvictionReport, list[float]]]:
        """All layers ran: give back the blocks before each window."""
        events = []
        for event in self._evictor.finish():
            row = event.request
            events.append((event, self._evictor.kept_by_phase(row)))
            before = self._window.start(self._step.begins[row])
            freed = (self._window.start(self._evictor.computed(row)) - before) // (
                self._pool.block_size
            )
            blocks, self._blocks[row] = self._blocks[row][:freed], self._blocks[row][freed:]
            moved = self._pool.release(blocks)
            if moved:
                self._blocks = [[moved[block] for block in own] for own in self._blocks]
        return events
