"""Does each core compute correctly?

Rarely, but at the scale of a cluster surely, there is a core that gets a sum wrong and says nothing.
So each core is given the same small piece of work, of which the result is known: a chaotic sequence
in floating point, a sequence of multiplications, and a digest of every number in them, so that no
wrong bit is lost on the way. A result that differs from what the other cores got fails the node.

It takes a few milliseconds of each core, and no more than two seconds in all.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Mapping

from holdfast.health.baseline import Seen
from holdfast.health.finding import Finding, Remark, summed, unknown
from holdfast.health.node import Node

KNOWN = "3a2972a309fd46fdac8ed0a0f878975b"
"""What `work` gives on every machine that computes as IEEE 754 says."""

STEPS = 1000
ROUNDS = 4
BUDGET_S = 2.0


def work(x: float = 0.4) -> str:
    n = 1
    fractions, numbers = [], []
    for _ in range(STEPS):
        x = 3.99 * x * (1.0 - x)
        n = (n * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        fractions.append(x)
        numbers.append(n)
    content = struct.pack(f"<{STEPS}d{STEPS}Q", *fractions, *numbers)
    return hashlib.sha512(content * 8).hexdigest()[:32]


def check_compute(node: Node, before: Seen | None) -> Finding:
    """On the cores of the machine we run on, whatever the root."""
    cores = os.sched_getaffinity(0)
    begun = time.monotonic()
    results: dict[int, set[str]] = {}
    try:
        for core in sorted(cores):
            if time.monotonic() - begun > BUDGET_S:
                break
            try:
                os.sched_setaffinity(0, {core})
            except OSError:
                continue  # It was switched off just now; the check of cores tells.
            results[core] = {work() for _ in range(ROUNDS)}
    finally:
        os.sched_setaffinity(0, cores)
    return judge_results(results, len(cores))


def judge_results(results: Mapping[int, set[str]], cores: int) -> Finding:
    """A core is wrong when it does not get the known result, unless all agree on another one."""
    got = set().union(*results.values())
    wrong = [core for core, values in results.items() if values != {KNOWN}]
    if not results:
        return unknown("no core could be tested")
    if wrong and len(got) == 1:
        return unknown(f"all {len(results)} cores agree, but on another result than is known")
    remarks = [Remark("fail", f"core {core} computes wrong results") for core in wrong[:8]]
    fine = f"{len(results)} of {cores} cores computed the known result"
    return summed(remarks, fine, {"tested": len(results), "wrong": len(wrong)})
