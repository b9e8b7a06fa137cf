"""How long a rank may show no progress, learnt from what the job was seen to do.

Each deadline is a factor times the longest time observed, and never below a floor. A flag may
override it; none needs to.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.hangs import HangTerms, Paces
from holdfast.messages.units import Seconds

HANG_BASE_S: Seconds = 1.5
HANG_STEPS = 2.7
HANG_FACTOR = 3.0
WARM_UP_FLOOR_S: Seconds = 10.0
"""While a process takes its first few steps, which are like no others."""
SECTION_FACTOR = 5.0
SECTION_UNKNOWN_S: Seconds = 600.0
"""For a section that was never seen to end."""
ASIDE_FLOOR_S: Seconds = 300.0
"""For saving and restoring: storage may be slow without anything being wrong."""
FIRST_STEP = "first step"
FIRST_UNKNOWN_S: Seconds = 1800.0
"""Until the first step, in a job that never finished one: data may be prepared, models compiled."""
FIRST_FLOOR_S: Seconds = 60.0
FIRST_FACTOR = 10.0
ALARM_FACTOR = 4.0
ALARMS_AT_MOST = 4
OVERDUE_FACTOR = 10.0
OVERDUE_FLOOR_S: Seconds = 300.0
"""A rank that is busy, or that nobody waits for, may be so for minutes without a sign for us."""
ASIDE = frozenset({"checkpoint", "restore"})


class Deadline(Struct, frozen=True):
    limit_s: Seconds
    """After that, it matters how the rank stands and what the others do."""
    overdue_s: Seconds
    """After that, it does not."""
    known: bool = True
    """How long it takes was said, or seen before."""


class HangLimits(Struct, frozen=True):
    """How long a rank may stand still: between two marks, in a section, until its first step.

    What a user says is meant: it holds however the rank stands, and however often there were alarms.
    """

    terms: HangTerms
    before: Paces
    """What was learnt in earlier rounds, of all ranks."""
    alarms: dict[str, int]

    def between_marks(
        self, phase: str, step_s: Seconds | None, longest_s: Seconds, warm: bool = True
    ) -> Deadline:
        """Once the process has finished a step; it is warm when it has finished a few."""
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
        said = self.terms.initial_rank_heartbeat_timeout
        if said is not None:
            return Deadline(said, said)
        first = self.before.longest_s.get(FIRST_STEP)
        limit_s = FIRST_UNKNOWN_S if first is None else max(FIRST_FLOOR_S, FIRST_FACTOR * first)
        return self._learnt(FIRST_STEP, limit_s, first is not None)

    def in_section(self, name: str, step_s: Seconds | None, longest_s: Seconds) -> Deadline:
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
        """After an alarm, which may have been false, it is several times as long."""
        factor = ALARM_FACTOR ** min(self.alarms.get(name, 0), ALARMS_AT_MOST)
        overdue_s = max(OVERDUE_FLOOR_S, OVERDUE_FACTOR * limit_s)
        return Deadline(factor * limit_s, factor * overdue_s, known)
