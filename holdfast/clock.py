"""Defines job time: it starts as the wall clock, then follows the monotonic clock.

The coordinator owns the job's time, and an agent adopts it from its `Welcome`. The latency of that
message is neglected, since only the request may take long, while the coordinator starts or serves a
thousand other nodes. A coordinator that restarts continues from the journal's last time, so job time
never goes back even if the wall clock did.
"""

from __future__ import annotations

import time

from holdfast.messages.units import Time


def machine_time() -> Time:
    """The machine's monotonic clock, by which events are dated where there is no job time."""
    return Time(time.monotonic())


class JobClock:
    """One process's view of job time."""

    def __init__(self, not_before: Time = Time(0.0)) -> None:
        self._base = max(time.time(), not_before) - time.monotonic()

    def now(self) -> Time:
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> Time:
        """Convert a time of this machine's monotonic clock."""
        return Time(self._base + monotonic)

    def adopt(self, theirs: Time, heard: float) -> None:
        """Adopt another process's clock, which read `theirs` when ours (monotonic) read `heard`."""
        self._base = theirs - heard
