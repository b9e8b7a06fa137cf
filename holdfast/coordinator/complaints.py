"""Logs what peers do wrong, without letting them fill the log.

A stranger decides how often it is complained about, so lines are rationed: a few for each peer and a
few dozen for all of them in a window of time. What is left out is counted, and the number is logged
when the next window begins.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

log = logging.getLogger("holdfast.coordinator")

WINDOW_S = 10.0
LINES_PER_PEER = 3
LINES_IN_ALL = 30


class Complaints:
    """Rationed log lines about peers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lines: Counter[str] = Counter()
        self._left_out = 0

    def say(self, who: object, what: str) -> None:
        """Log one line about a peer, or count it."""
        now = self._clock()
        if now - self._began >= WINDOW_S:
            self._begin_window(now)
        peer = str(who)
        if self._lines[peer] >= LINES_PER_PEER or self._lines.total() >= LINES_IN_ALL:
            self._left_out += 1
            return
        self._lines[peer] += 1
        log.warning("%s: %s", peer, what)

    def _begin_window(self, now: float) -> None:
        if self._left_out:
            log.warning(
                "%d more complaints about peers were left out in %.0f s",
                self._left_out,
                now - self._began,
            )
        self._began, self._left_out = now, 0
        self._lines.clear()
