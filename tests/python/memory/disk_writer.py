"""Starts processes that store chunks until they are killed; run by the tests of the disk tier.

Each line on standard input is a job in JSON and starts one process, forked from this one, which has
loaded everything already. Its number is the line that is written back. The process stores the
chunks of the seeds [first, last), each at the position of its seed, and notes each seed in the
file `log` once it is stored. With `again` it drops them and begins anew, with `stall` it stops
before the first file is renamed, and makes the file `log`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from memory_samples import LARGE, sample_chunk

from phasekv.memory import DiskTier


def store_chunks(job: dict[str, Any]) -> None:
    log = Path(job["log"])
    if job.get("stall"):

        def stall(_: int) -> None:
            log.touch()
            time.sleep(600)

        os.fsync = stall
    tier = DiskTier(job["directory"], LARGE)
    while True:
        for seed in range(job["first"], job["last"]):
            chunk = sample_chunk(seed, length=30, position=seed, identity=LARGE)
            if job.get("again"):
                tier.drop(chunk.key)
            if tier.put(chunk)[0]:
                with log.open("a") as file:
                    file.write(f"{seed}\n")
        if not job.get("again"):
            time.sleep(600)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # killed children need no wait()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            store_chunks(json.loads(line))
        print(child, flush=True)


if __name__ == "__main__":
    main()
