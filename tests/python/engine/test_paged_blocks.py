"""The pool of blocks: contents stay, ids are given once, and pages really go back."""

import ctypes
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasekv.transformers.block_memory import SystemBlocks
from phasekv.transformers.paged_blocks import PagedBlocks

CPU = torch.device("cpu")
LIBC = ctypes.CDLL(None, use_errno=True)


def resident_bytes(memory):
    """Of the mapping behind the blocks, as the kernel says."""
    length = memory.blocks.nbytes
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    address = ctypes.c_void_p(memory.blocks.data_ptr())
    assert LIBC.mincore(address, ctypes.c_size_t(length), pages) == 0, ctypes.get_errno()
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 3, 16, 80), (1000,), (7,)])
def test_only_what_is_written_takes_memory(shape):
    memory = SystemBlocks(64, shape, torch.float32)
    assert resident_bytes(memory) == 0
    memory.blocks[:40] = 1
    assert 0 <= resident_bytes(memory) - 40 * memory.block_nbytes < mmap.PAGESIZE
    memory.give_back(5, 33)
    kept = 12 * memory.block_nbytes
    assert 0 <= resident_bytes(memory) - kept < 4 * mmap.PAGESIZE
    assert bool((memory.blocks[:5] == 1).all())
    assert bool((memory.blocks[33:40] == 1).all())
    memory.blocks[5:33] = 2
    assert float(memory.blocks.sum()) == memory.blocks[0].numel() * (12 + 28 * 2)


def test_less_than_a_page_stays():
    memory = SystemBlocks(4, (3,), torch.float32)
    memory.blocks[:] = 1
    memory.give_back(1, 3)
    assert bool((memory.blocks == 1).all())


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.randoms()), max_size=25),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    head_size=st.sampled_from([8, 24, 64]),
)
def test_contents_stay_through_any_order_of_steps(steps, dtype, head_size):
    layers, kv_heads, block_size = 2, 3, 16
    pool = PagedBlocks(layers, kv_heads, block_size, head_size, dtype, CPU)
    block_bytes = layers * 2 * kv_heads * block_size * head_size * dtype.itemsize
    written: dict[int, int] = {}
    for stamp, (allocates, count, random) in enumerate(steps, start=1):
        if allocates:
            new = pool.allocate(count)
            assert len(set(new)) == count
            assert written.keys().isdisjoint(new)
            for block in new:
                for layer in range(layers):
                    pool._memory.blocks[block, layer, 0] = stamp + layer
                    pool._memory.blocks[block, layer, 1] = -stamp - layer
            written.update(dict.fromkeys(new, stamp))
        else:
            released = random.sample(sorted(written), min(count, len(written)))
            pool.release(released)
            for block in released:
                del written[block]
        assert pool.nbytes == len(written) * block_bytes
        # Each run of free blocks may share a page with a used one at both of its ends.
        assert resident_bytes(pool._memory) <= pool.nbytes + 2 * mmap.PAGESIZE * (len(written) + 1)
    slots = torch.tensor([block * block_size + 5 for block in written], dtype=torch.int64)
    stamps = torch.tensor(list(written.values()))[:, None, None]
    for layer in range(layers):
        keys, values = pool.rows(layer, slots)
        assert bool((keys == stamps + layer).all())
        assert bool((values == -stamps - layer).all())


def test_growing_leaves_nothing_behind():
    """What is copied while a pool grows is given back, piece by piece."""
    pool = PagedBlocks(1, 1, 16, 64, torch.float32, CPU)
    blocks = pool.allocate(400)
    pool._memory.blocks[blocks] = 3
    old = pool._memory
    pool.release(blocks[100:200])
    pool.allocate(2000)
    assert pool._memory is not old
    assert resident_bytes(old) == 0
    assert bool((pool._memory.blocks[blocks[:100] + blocks[200:]] == 3).all())
    assert resident_bytes(pool._memory) <= 300 * old.block_nbytes + 4 * mmap.PAGESIZE
