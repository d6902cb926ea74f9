"""Memory of encoded chunks: content keys, and a store in memory and on disk."""

from phasekv.memory.chunk import StoredChunk
from phasekv.memory.disk import DiskStatistics, DiskTier, ScannedChunk
from phasekv.memory.keys import ChunkKey, ModelIdentity, canonical_rope, chunk_key
from phasekv.memory.store import ChunkStore, StoreStatistics

__all__ = [
    "ChunkKey",
    "ChunkStore",
    "DiskStatistics",
    "DiskTier",
    "ModelIdentity",
    "ScannedChunk",
    "StoreStatistics",
    "StoredChunk",
    "canonical_rope",
    "chunk_key",
]
