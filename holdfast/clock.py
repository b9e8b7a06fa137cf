"""Job time: starts as the wall clock, then counts with a clock that nobody can set back.

The coordinator has the job's time; an agent takes it over when it is welcomed. The way back is taken
to be short: what may take long is until a coordinator that is just starting, or has a thousand nodes
at its door, comes to answer. A coordinator that restarts goes on from the journal's last time, so
job time never goes back even if the wall clock did meanwhile.
"""

from __future__ import annotations

import time

from holdfast.messages.units import Time


def machine_time() -> Time:
    """The machine's monotonic clock, by which events are dated where there is no job time."""
    return Time(time.monotonic())


class JobClock:
    def __init__(self, not_before: Time = Time(0.0)) -> None:
        self._base = max(time.time(), not_before) - time.monotonic()

    def now(self) -> Time:
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> Time:
        """The job time of a moment on this machine's monotonic clock."""
        return Time(self._base + monotonic)

    def adopt(self, theirs: Time, heard: float) -> None:
        """Take over the clock of someone from whom `theirs` was heard at that moment of ours."""
        self._base = theirs - heard
