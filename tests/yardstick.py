"""Measures costs in units of what this machine's Python needs for something known.

A bound in seconds fails where the machine is slow or busy, which is no fault of ours. Both sides are
measured by turns and the best of each counts, so that whatever slows the machine down slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 40


def _nothing() -> None:
    pass


def mean_s(act: Callable[[], object], number: int) -> float:
    """Return what a call takes, in a loop of so many."""
    began = time.perf_counter()
    for _ in range(number):
        act()
    return (time.perf_counter() - began) / number


def cost_in_calls(act: Callable[[], object], number: int = 1000) -> float:
    """Return how many calls of an empty function take as long as one of this."""
    return cost_relative_to(_nothing, act, number)


def cost_relative_to(
    known: Callable[[], object], act: Callable[[], object], number: int = 1
) -> float:
    """Return how many times as long as something known it takes."""
    pairs = [(mean_s(known, number), mean_s(act, number)) for _ in range(TRIES)]
    return min(acted for _, acted in pairs) / min(knew for knew, _ in pairs)
