"""Tells a training loop's pauses from its steps.

The time from one finished step to the next is a step, unless it took far longer than steps usually do:
then the loop did something else in between (an evaluation, an upload, a compilation), or waited for a
rank that did, and all beyond one usual step is a pause. The usual time is the median of the latest
steps, so that a pause, however long, does not change it. Nothing is said of the first few steps until
the usual time is known; then they are judged too.
"""

from __future__ import annotations

from collections import deque

PAUSE_STEPS = 4.0
"""A step longer than so many usual ones contains a pause."""
PAUSE_LEAST_S = 0.25
"""A shorter delay is no pause: schedulers and garbage collectors cause those."""
KNOWN_AFTER = 5
"""Steps after which the usual time is known."""
_RECENT = 31
_REFRESH = 8
"""Steps after which the median is taken anew: it costs more than a step may."""


class StepTimes:
    """The usual time of a step, the sum of all pauses, and the rest: the time of the steps."""

    def __init__(self) -> None:
        self.usual_s: float | None = None
        self.pause_s = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._count = 0
        self._total_s = 0.0

    @property
    def trained_s(self) -> float:
        """Time of the steps, without the pauses in them; it falls when first ones turn out to be
        pauses."""
        return self._total_s - self.pause_s

    def took(self, seconds: float) -> None:
        """Note a step; saving and restoring are no part of its time."""
        self._recent.append(seconds)
        self._total_s += seconds
        self._count += 1
        if self.usual_s is None:
            if self._count == KNOWN_AFTER:
                self.usual_s = self._median()
                self.pause_s = sum(pause_in(one, self.usual_s) for one in self._recent)
            return
        self.pause_s += pause_in(seconds, self.usual_s)
        if self._count % _REFRESH == 0:
            self.usual_s = self._median()

    def _median(self) -> float:
        return sorted(self._recent)[len(self._recent) // 2]


def pause_in(seconds: float, usual_s: float) -> float:
    """Return the pause that a step contains; 0 for an ordinary step."""
    pause_s = seconds - usual_s
    return pause_s if seconds > PAUSE_STEPS * usual_s and pause_s > PAUSE_LEAST_S else 0.0
