"""Takes a shard each step of ten milliseconds, and notes how long it waited for them.

shard_each_step.py STEPS FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import holdfast
from holdfast.data import ShardClient

STEP_S = 0.01
SETTLING = 50
"""First steps that are not counted: a process starts, and the agent learns how much it needs."""


def work(seconds: float) -> None:
    """Compute for a time, as a step does: a process that sleeps wakes up slowly."""
    until = time.perf_counter() + seconds
    block = bytes(1 << 16)
    while time.perf_counter() < until:
        hashlib.sha256(block).digest()  # Without the GIL, like most of a training step.


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    client = ShardClient("bench", size=1 << 40, shard=100, exact=False)
    waited = longest = 0.0
    began = time.perf_counter()
    for step in range(steps + SETTLING):
        if step == SETTLING:
            waited, longest, began = 0.0, 0.0, time.perf_counter()
        asked = time.perf_counter()
        shard = client.fetch()
        took = time.perf_counter() - asked
        waited, longest = waited + took, max(longest, took)
        assert shard is not None
        work(STEP_S)
        shard.finish()
        holdfast.progress(step + 1)
    found = {
        "waited_s": waited,
        "longest_s": longest,
        "took_s": time.perf_counter() - began,
        "shards": steps,
    }
    (folder / f"waits_{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
