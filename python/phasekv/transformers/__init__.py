"""PhaseKV for models of Hugging Face transformers: eviction, quantised caches, reuse of notes."""

from phasekv.transformers.chunk_memory import Chunk, ChunkMemory, Prefill
from phasekv.transformers.evict import Eviction, evict
from phasekv.transformers.evicting_cache import EvictingCache
from phasekv.transformers.quantize import QuantizedGeneration, quantize
from phasekv.transformers.quantized_cache import QuantizedCache

__all__ = [
    "Chunk",
    "ChunkMemory",
    "EvictingCache",
    "Eviction",
    "Prefill",
    "QuantizedCache",
    "QuantizedGeneration",
    "evict",
    "quantize",
]
