"""Waits for a process whose script raised, and ends it if it does not exit by itself.

Exit handlers, threads that are no daemons and the interpreter's own end are still to come then: a file
may be half written, an upload half done. The process has time for that while something of it moves; but
the other ranks wait for the repair, so its time is limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from holdfast import proc
from holdfast.agent.life import NOT_THE_SCRIPTS

LOOK_EVERY_S: Final = 1.0
STILL_LOOKS: Final = 10
"""Looks in a row at which nothing had moved, after which a process is ended."""
LIMIT_S: Final = 60.0


class Timers(Protocol):
    """What is needed of an event loop."""

    def time(self) -> float: ...
    def call_later(self, delay: float, callback: Callable[[], object]) -> asyncio.TimerHandle: ...


class Teardown:
    """Calls `end`, with the reason, once a process has had its time."""

    def __init__(
        self,
        pid: int,
        end: Callable[[str], None],
        footprint: Callable[[int], object] | None = None,
        timers: Timers | None = None,
    ) -> None:
        self._pid = pid
        self._end = end
        self._footprint = footprint or footprint_of
        self._timers = timers or asyncio.get_running_loop()
        self._ends_at = self._timers.time() + LIMIT_S
        self._seen = self._footprint(pid)
        self._still = 0
        self._timer = self._timers.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Wait no longer."""
        self._timer.cancel()

    def _look(self) -> None:
        # First, so that a look that raises is not the last one.
        self._timer = self._timers.call_later(LOOK_EVERY_S, self._look)
        seen = self._footprint(self._pid)
        self._still = self._still + 1 if seen == self._seen else 0
        self._seen = seen
        if self._still >= STILL_LOOKS:
            self._timer.cancel()
            self._end(f"nothing of it has moved for {STILL_LOOKS * LOOK_EVERY_S:g} s")
        elif self._timers.time() >= self._ends_at:
            self._timer.cancel()
            self._end(f"it is still busy after {LIMIT_S:g} s")


def footprint_of(pid: int) -> object:
    """Return what changes whenever the script's threads or its child processes do something."""
    threads = [
        (thread, proc.cpu_time(pid, thread).ran_ns, proc.moved_bytes(pid, thread))
        for thread in proc.threads(pid)
        if not proc.thread_name(pid, thread).startswith(NOT_THE_SCRIPTS)
    ]
    children = [
        (child, proc.cpu_time(child, child).ran_ns, proc.moved_bytes(child))
        for child in proc.descendants(pid)
    ]
    return threads, children
