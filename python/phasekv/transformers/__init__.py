"""PhaseKV for models of Hugging Face transformers: eviction while they generate, reuse of notes."""

from phasekv.transformers.chunk_memory import Chunk, ChunkMemory, Prefill
from phasekv.transformers.evict import Eviction, evict
from phasekv.transformers.evicting_cache import EvictingCache

__all__ = ["Chunk", "ChunkMemory", "EvictingCache", "Eviction", "Prefill", "evict"]
