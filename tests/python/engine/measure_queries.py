"""Program of the tests: calibrates a tiny model, in a process of its own.

vLLM remembers for good that an engine core runs in its process, which later engines of a test's
process must not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from conftest import Engine
from phasekv.vllm.calibrate import measure


def main(folder: str, out: str, tokens: str, context: str) -> None:
    """Run ``tokens`` (a JSON list) in pieces of ``context`` and save the calibration.

    It is measured twice: the second must give the same, or a hook was left behind.
    """
    # Several requests share a step, and a piece may be longer than one.
    engine = Engine(Path(folder), None, max_num_batched_tokens=64)
    first = measure(engine.llm, json.loads(tokens), int(context))
    second = measure(engine.llm, json.loads(tokens), int(context))
    assert first.mean_norm.allclose(second.mean_norm, rtol=1e-4)
    second.save(Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
