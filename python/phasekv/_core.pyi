"""Types of the C++ core's Python module.

Rows tensors are [tokens, heads, head size] with any strides for tokens and heads; index tensors are
contiguous int64 unless include/phasekv/ops says otherwise. An op runs where its tensors lie; on a
CUDA device ``stream`` is a cudaStream_t as an integer, None the default stream.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

from phasekv.errors import Error as Error
from phasekv.errors import InvalidArgumentError as InvalidArgumentError
from phasekv.errors import MissingCapabilityError as MissingCapabilityError
from phasekv.errors import UnsupportedError as UnsupportedError

class PagedView:
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def device(self) -> str: ...

class PagedKV:
    @property
    def key(self) -> PagedView: ...
    @property
    def value(self) -> PagedView: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def device(self) -> str: ...

def cpu_paged_kv(layout: str, kv_cache: Tensor) -> PagedKV: ...
def strided_paged_kv(*, key: Tensor, value: Tensor) -> PagedKV: ...

class RopeConfig:
    def __init__(
        self,
        *,
        type: str = "default",  # noqa: A002
        theta: float = 10000.0,
        rotary_dim: int,
        factor: float = 1.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_position: int = 8192,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        pairing: str = "neox",
    ) -> None: ...

def rope_frequencies(config: RopeConfig) -> list[float]: ...

class Rope:
    def __init__(self, frequencies: list[float], rotary_dim: int, pairing: str) -> None: ...
    @property
    def frequencies(self) -> list[float]: ...
    def on(self, frequencies: Tensor) -> Rope: ...

def gather_blocks(
    *, blocks: PagedView, slots: Tensor, out: Tensor, stream: int | None = None
) -> None: ...
def scatter_blocks(
    *, rows: Tensor, slots: Tensor, blocks: PagedView, stream: int | None = None
) -> None: ...
def rotate_keys(
    *, keys: Tensor, deltas: Tensor, rope: Rope, out: Tensor, stream: int | None = None
) -> None: ...
def divergence(
    *, fresh: Tensor, cached: Tensor, out: Tensor, stream: int | None = None
) -> None: ...
@overload
def select_top(
    *, scores: Tensor, segment_starts: Tensor, counts: Tensor, pinned: Tensor | None = None
) -> list[int]: ...
@overload
def select_top(
    *,
    scores: Tensor,
    segment_starts: Tensor,
    counts: Tensor,
    pinned: Tensor | None = None,
    chosen: Tensor,
    chosen_starts: Tensor,
    first_nan: Tensor,
    stream: int | None = None,
) -> None: ...
def mean_residual(
    *,
    fresh: Tensor,
    cached: Tensor,
    fresh_rows: Tensor,
    cached_rows: Tensor,
    segment_starts: Tensor,
    fresh_deltas: Tensor | None = None,
    cached_deltas: Tensor | None = None,
    rope: Rope | None = None,
    out: Tensor,
    stream: int | None = None,
) -> None: ...
def apply_shift(
    *,
    cached: Tensor,
    cached_rows: Tensor,
    slots: Tensor,
    segment_starts: Tensor,
    deltas: Tensor | None = None,
    rope: Rope | None = None,
    mean: Tensor | None = None,
    weights: Tensor | None = None,
    mean_deltas: Tensor | None = None,
    blocks: PagedView,
    stream: int | None = None,
) -> None: ...
def attend_rows(
    *,
    query: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    row_requests: Tensor,
    row_limits: Tensor,
    scale: float,
    out: Tensor,
    stream: int | None = None,
) -> None: ...
def push_queries(
    *, query: Tensor, rows: Tensor, entries: Tensor, buffer: Tensor, stream: int | None = None
) -> None: ...
def quantize(
    *,
    rows: Tensor,
    bits: int,
    group_size: int,
    axis: str,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    stream: int | None = None,
) -> None: ...
def dequantize(
    *,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bits: int,
    group_size: int,
    axis: str,
    tokens: int,
    first_token: int = 0,
    out: Tensor,
    stream: int | None = None,
) -> None: ...
def score_keys(
    *,
    query: Tensor,
    key: PagedView,
    block_table: Tensor,
    first_token: int,
    tokens: int,
    query_limits: Tensor | None = None,
    excluded_recent: int = 0,
    group: str = "max_logit",
    pooling: str = "none",
    pooling_kernel: int = 1,
    scale: float,
    scores: Tensor,
    stream: int | None = None,
) -> None: ...
def accumulate_attention(
    *,
    query: Tensor,
    query_limits: Tensor,
    query_phases: Tensor,
    key: PagedView,
    block_table: Tensor,
    first_token: int,
    tokens: int,
    scale: float,
    sums: Tensor,
    stream: int | None = None,
) -> None: ...

class CompactionMoves:
    def __len__(self) -> int: ...
    def on(
        self, *, starts: Tensor, from_indices: Tensor, to_indices: Tensor
    ) -> CompactionMoves: ...
    @property
    def starts(self) -> list[int]: ...
    @property
    def from_indices(self) -> list[int]: ...
    @property
    def to_indices(self) -> list[int]: ...

def plan_compaction(
    *, kept_indices: Tensor, tokens: int, sources: Tensor | None = None
) -> CompactionMoves: ...
def compact(
    *,
    kv: PagedKV,
    block_table: Tensor,
    first_token: int,
    moves: CompactionMoves,
    stream: int | None = None,
) -> None: ...
def key_redundancy(
    *,
    key: PagedView,
    block_table: Tensor,
    first_token: int,
    tokens: int,
    positions: Tensor | None = None,
    threshold: float = 0.5,
    redundancy: Tensor,
    stream: int | None = None,
) -> None: ...
def expected_attention_score(
    *,
    query: Tensor,
    query_positions: Tensor,
    kv: PagedKV,
    block_table: Tensor,
    first_token: int,
    tokens: int,
    positions: Tensor | None = None,
    sinks: int = 0,
    rope: Rope,
    next_position: int,
    horizon: int = 512,
    scale: float,
    scores: Tensor,
    stream: int | None = None,
) -> None: ...
def keydiff_score(
    *,
    key: PagedView,
    block_table: Tensor,
    first_token: int,
    tokens: int,
    scores: Tensor,
    stream: int | None = None,
) -> None: ...
def triattention_query(
    *,
    rope: Rope,
    mean_query: Tensor,
    mean_norm: Tensor,
    magnitude: float = 1.0,
    time: int,
    synthetic_query: Tensor,
    norm_weights: Tensor,
) -> None: ...
def triattention_score(
    *,
    key: PagedView,
    block_table: Tensor,
    first_token: int,
    tokens: int,
    synthetic_query: Tensor,
    norm_weights: Tensor,
    pairing: str = "neox",
    normalize: bool = False,
    group_mean: bool = False,
    scores: Tensor,
    stream: int | None = None,
) -> None: ...
def supported_cpu_isas() -> list[str]: ...
def cuda_is_built() -> bool: ...
def check_cuda_device(index: int) -> None: ...
def active_cpu_isa() -> str: ...
def set_active_cpu_isa(name: str) -> None: ...

class ChunkIndex:
    def __init__(self, min_match: int = 16, *, hash_base: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: str) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def add(self, key: str, tokens: Sequence[int] | Any) -> None: ...
    def remove(self, key: str) -> bool: ...
    def find(self, tokens: Sequence[int] | Any) -> list[tuple[str, int, int, int]]: ...

def method_names() -> list[str]: ...

class Method:
    def __init__(
        self,
        name: str,
        *,
        frame: str | None = None,
        weight: str | None = None,
        probes: str | None = None,
        boundary_tokens: int | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def check_layer(self) -> int: ...
    @property
    def keeps_fresh_at_check_layer(self) -> bool: ...
    @property
    def needs_attention(self) -> bool: ...
    @property
    def shifts(self) -> bool: ...
    @property
    def frame(self) -> str: ...
    def select(
        self,
        *,
        segments: Sequence[tuple[int, int, int]],
        key_divergence: Sequence[float],
        value_divergence: Sequence[float],
        ratio: float,
        attention: Sequence[float] = ...,
    ) -> tuple[list[int], list[int], list[float], list[float]]: ...

class MarkerAutomaton:
    def __init__(
        self,
        *,
        states: Sequence[tuple[str, str]],
        initial_state: int = 0,
        markers: Sequence[tuple[Sequence[Sequence[bytes | int]], Sequence[int], int]],
        completing_token: str = "left",
        vocabulary_bytes: bytes,
        vocabulary_offsets: Sequence[int],
    ) -> None: ...
    @property
    def state_names(self) -> list[str]: ...
    @property
    def vocabulary_size(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...

class PhaseTracker:
    def __init__(self, automaton: MarkerAutomaton) -> None: ...
    def advance(
        self, tokens: Sequence[int] | Any
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]: ...
    @property
    def phase(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def phase_tokens(self) -> dict[str, int]: ...
    def __copy__(self) -> PhaseTracker: ...
    def save(self) -> bytes: ...
    @staticmethod
    def restore(automaton: MarkerAutomaton, saved: bytes) -> PhaseTracker: ...

def phase_names() -> list[str]: ...
def label_stream(
    automaton: MarkerAutomaton, tokens: Sequence[int] | Any
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]: ...
def policy_names() -> list[str]: ...

class TriattentionStatistics:
    def __init__(
        self,
        *,
        model: str,
        rope: Rope,
        magnitude: float = 1.0,
        mean_query: Tensor,
        mean_norm: Tensor,
    ) -> None: ...

class Policy:
    def __init__(
        self,
        name: str,
        *,
        queries: int | None = None,
        sinks: int | None = None,
        recent: int | None = None,
        group: str | None = None,
        pooling: str | None = None,
        pooling_kernel: int | None = None,
        marker_queries: bool | None = None,
        phase_quota: float | None = None,
        redundancy: float | None = None,
        safeguard: float | None = None,
        steepness: float | None = None,
        statistics: TriattentionStatistics | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def is_ragged(self) -> bool: ...
    @property
    def needs_rope(self) -> bool: ...
    def protected_tokens(self, budget: int) -> tuple[int, int]: ...

class FunctionPolicy(Policy):
    def __init__(
        self,
        score: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        *,
        queries: int = 32,
        sinks: int = 4,
        recent: int = 0,
    ) -> None: ...

class Window:
    def __init__(
        self, *, budget: int, stride: int, held_from: int = 0, held_until: int = 0
    ) -> None: ...
    def start(self, computed: int) -> int: ...
    def check(self, *, block_size: int, protected_tokens: int) -> None: ...
    @property
    def budget(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def held_from(self) -> int: ...
    @property
    def held_until(self) -> int: ...

class EvictionReport:
    @property
    def request(self) -> int: ...
    @property
    def evicted_tokens(self) -> int: ...
    @property
    def freed_blocks(self) -> int: ...
    @property
    def scoring_seconds(self) -> float: ...
    @property
    def compacting_seconds(self) -> float: ...
    @property
    def failure(self) -> str: ...

class Evictor:
    def __init__(
        self,
        *,
        layers: int,
        query_heads: int,
        kv: PagedKV,
        scale: float,
        rope: Rope | None = None,
    ) -> None: ...
    def add(
        self,
        request: int,
        *,
        policy: Policy,
        window: Window,
        markers: MarkerAutomaton | None = None,
    ) -> None: ...
    def remove(self, request: int) -> None: ...
    def begin_step(self) -> None: ...
    def schedule(
        self,
        request: int,
        *,
        begin: int,
        first_row: int,
        tokens: Tensor,
        block_table: Tensor,
        computed: Tensor | None = None,
    ) -> None: ...
    def has_events(self) -> bool: ...
    def layer(
        self,
        layer: int,
        *,
        query: Tensor,
        kv: PagedKV,
        query_rows: Tensor | None = None,
        stream: int | None = None,
    ) -> None: ...
    def finish(self) -> list[EvictionReport]: ...
    def computed(self, request: int) -> int: ...
    def held(self, request: int) -> int: ...
    def kept_by_phase(self, request: int) -> list[float]: ...
    def positions(self, request: int, layer: int) -> list[int]: ...
    def nbytes(self, request: int) -> int: ...
    def save(self, request: int) -> bytes: ...
    def restore(self, request: int, state: bytes) -> None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def seconds(self) -> tuple[float, float, float]: ...

class RaggedEvictor:
    def __init__(
        self,
        *,
        layers: int,
        query_heads: int,
        kv_heads: int,
        kv: PagedKV,
        scale: float,
        rope: Rope | None = None,
    ) -> None: ...
    def add(
        self,
        request: int,
        *,
        policy: Policy,
        window: Window,
        markers: MarkerAutomaton | None = None,
    ) -> None: ...
    def remove(self, request: int) -> None: ...
    def begin_step(self) -> None: ...
    def schedule(self, request: int, *, begin: int, first_row: int, tokens: Tensor) -> None: ...
    def has_events(self) -> bool: ...
    def layer(self, layer: int, *, query: Tensor, kv: PagedKV, block_tables: Tensor) -> None: ...
    def finish(self) -> list[EvictionReport]: ...
    def computed(self, request: int) -> int: ...
    def held(self, request: int, layer: int) -> list[int]: ...
    def positions(self, request: int, layer: int, head: int) -> list[int]: ...
    def kept_by_phase(self, request: int) -> list[float]: ...
    def nbytes(self, request: int) -> int: ...
    @property
    def seconds(self) -> tuple[float, float, float]: ...
