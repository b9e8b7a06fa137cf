"""Simulated time: a heap of things to come, taken out in order.

Two things at the same moment happen in the order in which they were asked for, so a run depends on
nothing but its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from holdfast.messages.units import Seconds, Time

START = Time(1000.0)


class SimClock:
    def __init__(self) -> None:
        self.now = START
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, act: Callable[..., None], *arguments: Any) -> None:
        """Have something done at that time, or now if that is past."""
        self._asked += 1
        heapq.heappush(self._heap, (max(when, self.now), self._asked, act, arguments))

    def after(self, delay: Seconds, act: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay, act, *arguments)

    def step(self, until: float) -> bool:
        """Do the next thing; False, with the time at `until`, when there is none before that."""
        if not self._heap or self._heap[0][0] > until:
            self.now = Time(max(self.now, until))
            return False
        when, _, act, arguments = heapq.heappop(self._heap)
        self.now = Time(when)
        act(*arguments)
        return True
