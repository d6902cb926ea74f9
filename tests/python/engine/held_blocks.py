"""A program for test_eviction.py: counts the blocks a request holds, in the scheduler's own pool.

The engine core runs in this process, so that its block manager can be watched. vLLM remembers that
setting for the life of a process; the tests' own must not have it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from tiny_models import random_tokens

from conftest import Engine
from phasekv.vllm.eviction.window_cache import WindowManager


def main() -> None:
    """Print the most blocks held at once, the steps, free blocks at the end, and all blocks."""
    folder, budget, stride, chunk = Path(sys.argv[1]), *map(int, sys.argv[2:])
    held, managers = [], []
    allocate = WindowManager.allocate_new_blocks

    def watch(manager, request_id, *args, **kwargs):
        result = allocate(manager, request_id, *args, **kwargs)
        blocks = manager.req_to_blocks[request_id]
        held.append(sum(block is not manager._null_block for block in blocks))
        managers.append(manager)
        return result

    WindowManager.allocate_new_blocks = watch
    engine = Engine(
        folder,
        {"eviction": {"budget": 512, "stride": stride}},
        max_num_batched_tokens=chunk,
    )
    engine.one(random_tokens(900, 5), max_tokens=100, eviction={"budget": budget})
    engine.one(random_tokens(5, 6))  # a further step: by now the first request's are free
    pool = managers[0].block_pool
    counts = [max(held), len(held), pool.get_num_free_blocks(), pool.num_gpu_blocks]
    print(json.dumps(counts), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
