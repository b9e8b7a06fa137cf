"""Fuzzes the authenticated channel: agents with the job's token that send anything.

    make fuzz                                               one minute
    python fuzz/authenticated.py --frames 1000000           as many frames as that
    python fuzz/authenticated.py --seconds 600 --seed 40    for ten minutes, from that seed on

Each episode has a coordinator of its own, a healthy agent, and attackers that wait for a place or have
one; `tests/coordinator/hostile.py` says what they do and what must hold after it. A failure names its
seed, which repeats it as far as the kernel's scheduling allows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "coordinator"))

from hostile import Episode

FRAMES_PER_EPISODE = 5000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--frames", type=int, help="this many, however long it takes")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began, sent = time.monotonic(), 0
    for seed in itertools.count(given.seed):
        took_s = time.monotonic() - began
        if sent >= given.frames if given.frames is not None else took_s >= given.seconds:
            print(f"{sent} frames in {took_s:.0f} s ({sent / took_s:.0f} per s), no harm done")
            return 0
        sent += _episode(seed)
    return 0


def _episode(seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="hf-fuzz-") as folder:
        episode = Episode(Path(folder) / "journal.db", seed, as_member=seed % 2 == 1)
        try:
            return asyncio.run(episode.run(FRAMES_PER_EPISODE))
        except BaseException:
            print(f"seed {seed} failed", file=sys.stderr)
            raise


if __name__ == "__main__":
    sys.exit(main())
