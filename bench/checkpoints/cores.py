"""Who used the machine while something was measured: the bench, or others beside it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from checkpoints.lines import Seconds

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
IDLE = (3, 4)
"""Of the fields in /proc/stat: idle, and idle while it waits for a disk."""


class Cores:
    """From the moment it is made."""

    def __init__(self) -> None:
        self._total, self._busy = _machine()
        self._own = _own()

    def used_by_others(self) -> float:
        """Their share of all cores since then. What the bench started and has ended is its own."""
        total, busy = _machine()
        others = (busy - self._busy) - (_own() - self._own)
        return max(0.0, others / (total - self._total)) if total > self._total else 0.0


def _machine() -> tuple[Seconds, Seconds]:
    """All cores' time so far, and what of it they were busy."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = [int(field) for field in fields]
    busy = sum(count for number, count in enumerate(ticks) if number not in IDLE)
    return sum(ticks) / TICKS_PER_S, busy / TICKS_PER_S


def _own() -> Seconds:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
