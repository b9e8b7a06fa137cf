"""Sets how long a rank may show no progress, learnt from what the job was seen to do.

Each deadline is a factor times the longest time observed, and never below a floor. A flag may
override it; none needs to. The limits for heartbeats are here too, for the worker that beats, the
agent that detects stalls and the verdict that explains them.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.hangs import FIRST_STEP, HangTerms, Paces
from holdfast.messages.units import Seconds

BEAT_EVERY_S: Seconds = 0.1
OLD_BEAT_S: Seconds = 1.25
"""A heartbeat older than this means that no other thread got the GIL. Shorter than any hang
deadline."""
HANG_BASE_S: Seconds = 1.5
HANG_STEPS = 2.7
HANG_FACTOR = 3.0
WARM_UP_FLOOR_S: Seconds = 10.0
"""Floor during a process's first few steps, which compile, allocate and connect."""
SECTION_FACTOR = 5.0
SECTION_UNKNOWN_S: Seconds = 600.0
"""Deadline of a section that was never seen to end."""
ASIDE = frozenset({"checkpoint", "restore"})
ASIDE_FLOOR_S: Seconds = 300.0
"""Floor for saving and restoring: slow storage is not a hang."""
FIRST_UNKNOWN_S: Seconds = 1800.0
"""Deadline of the first step of a job that never finished one: it may prepare data or compile."""
FIRST_FLOOR_S: Seconds = 60.0
FIRST_FACTOR = 10.0
ALARM_FACTOR = 4.0
ALARMS_AT_MOST = 4
OVERDUE_FACTOR = 10.0
OVERDUE_FLOOR_S: Seconds = 300.0
"""A busy rank, or one that no other waits for, may show no progress for minutes."""


class Deadline(Struct, frozen=True):
    """How long a rank may stay in one phase or section."""

    limit_s: Seconds
    """From here on the rank is stalled; its kind and the other ranks decide whether it hangs."""
    overdue_s: Seconds
    """From here on it hangs whatever its kind."""
    known: bool = True
    """Whether the deadline was set by the user or learnt, rather than assumed."""


class HangLimits(Struct, frozen=True):
    """The deadlines of one round: between two marks, in a section, until the first step.

    A deadline set by the user holds for every kind of stall and is not stretched by alarms.
    """

    terms: HangTerms
    before: Paces
    """Paces of all ranks in earlier rounds."""
    alarms: dict[str, int]

    def between_marks(
        self, phase: str, step_s: Seconds | None, longest_s: Seconds, warm: bool = True
    ) -> Deadline:
        """Return the deadline after the first step; a process is warm after a few more."""
        said = self.terms.rank_heartbeat_timeout
        if said is None:
            said = self.terms.rank_out_of_section_timeout
        if said is not None:
            return Deadline(said, said)
        usual = step_s if step_s is not None else self.before.step_s or 0.0
        longest = max(longest_s, self.before.longest_s.get(phase, 0.0))
        factor = self.terms.safety_factor or HANG_FACTOR
        floor = 0.0 if warm else WARM_UP_FLOOR_S
        return self._learnt(phase, max(floor, HANG_BASE_S + HANG_STEPS * usual, factor * longest))

    def until_first_step(self) -> Deadline:
        """Return the deadline of a process's first step."""
        said = self.terms.initial_rank_heartbeat_timeout
        if said is not None:
            return Deadline(said, said)
        first = self.before.longest_s.get(FIRST_STEP)
        limit_s = FIRST_UNKNOWN_S if first is None else max(FIRST_FLOOR_S, FIRST_FACTOR * first)
        return self._learnt(FIRST_STEP, limit_s, first is not None)

    def in_section(self, name: str, step_s: Seconds | None, longest_s: Seconds) -> Deadline:
        """Return the deadline of a section."""
        said = self.terms.rank_section_timeouts.get(name)
        if said is not None:
            return Deadline(said, said)
        longest = max(longest_s, self.before.longest_s.get(name, 0.0))
        floor = ASIDE_FLOOR_S if name in ASIDE else HANG_BASE_S + HANG_STEPS * (step_s or 0.0)
        if longest == 0.0:
            return self._learnt(name, max(floor, SECTION_UNKNOWN_S), False)
        factor = self.terms.safety_factor or SECTION_FACTOR
        return self._learnt(name, max(floor, factor * longest))

    def _learnt(self, name: str, limit_s: Seconds, known: bool = True) -> Deadline:
        """Stretch a learnt deadline by past alarms, which may have been false."""
        factor = ALARM_FACTOR ** min(self.alarms.get(name, 0), ALARMS_AT_MOST)
        overdue_s = max(OVERDUE_FLOOR_S, OVERDUE_FACTOR * limit_s)
        return Deadline(factor * limit_s, factor * overdue_s, known)
