"""PhaseKV for models of Hugging Face transformers: eviction while they generate."""

from phasekv.transformers.evict import Eviction, evict
from phasekv.transformers.evicting_cache import EvictingCache

__all__ = ["EvictingCache", "Eviction", "evict"]
