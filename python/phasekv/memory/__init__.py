"""Memory of encoded chunks and of sessions: keys, stores in memory and on disk, new messages."""

from phasekv.memory.chunk import StoredChunk
from phasekv.memory.disk import DiskStatistics, DiskTier, ScannedChunk
from phasekv.memory.keys import ChunkKey, ModelIdentity, canonical_rope, chunk_key
from phasekv.memory.new_messages import render_new_messages
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
    "render_new_messages",
]
