"""Memory of encoded chunks and of sessions: keys, stores in memory and on disk, new messages."""

from phasekv.memory.chunk import StoredChunk
from phasekv.memory.chunk_quantizer import ChunkQuantizer
from phasekv.memory.disk import DiskStatistics, DiskTier, ScannedChunk
from phasekv.memory.keys import ChunkKey, ModelIdentity, canonical_rope, chunk_key
from phasekv.memory.new_messages import render_new_messages
from phasekv.memory.quantized_tensor import QuantizedTensor
from phasekv.memory.store import ChunkStore, StoreStatistics
from phasekv.quantization import Quantization

__all__ = [
    "ChunkKey",
    "ChunkQuantizer",
    "ChunkStore",
    "DiskStatistics",
    "DiskTier",
    "ModelIdentity",
    "Quantization",
    "QuantizedTensor",
    "ScannedChunk",
    "StoreStatistics",
    "StoredChunk",
    "canonical_rope",
    "chunk_key",
    "render_new_messages",
]
