"""How long to wait, learnt from what the job was seen to do.

Each deadline is a factor times the longest time observed, and never below a floor. A flag may
override it; none needs to.
"""

from __future__ import annotations

from msgspec import Struct

from holdfast.messages.hangs import HangTerms, Paces
from holdfast.messages.units import Seconds

RECONNECT_S: Seconds = 0.3
"""An agent that lives is back on a new stream within milliseconds; one that died is not."""

RECONNECT_AFTER_RESTART_S: Seconds = 10.0
"""Agents notice a dead coordinator at once and knock with a backoff of at most a second."""

BEAT_FLOOR_S: Seconds = 1.0
BEATS_PER_S = 1000.0
SILENT_BEATS = 4.0
SILENCE_FACTOR = 2.0
SILENCE_MOST_S: Seconds = 60.0

JOIN_LIMIT_S: Seconds = 600.0
"""How long a job waits below its minimum for nodes that somebody else has to start."""

STOP_FACTOR = 3.0
STOP_FLOOR_S: Seconds = 3.0
STOP_UNKNOWN_S: Seconds = 30.0
PATIENCE_FACTOR = 5.0
PATIENCE_FLOOR_S: Seconds = 1.0


class Silence(Struct):
    """How often an agent beats, and how long it may be silent before its stream is cut off.

    The more nodes, the fewer beats of each, so that beats cost the coordinator the same however many
    there are. An agent that was silent for long and came back by itself runs on a busy machine:
    everybody is given twice that time from then on.
    """

    longest_s: Seconds = 0.0

    def beat_s(self, nodes: int) -> Seconds:
        return max(BEAT_FLOOR_S, nodes / BEATS_PER_S)

    def limit_s(self, nodes: int) -> Seconds:
        beats = SILENT_BEATS * self.beat_s(nodes)
        return min(max(beats, SILENCE_FACTOR * self.longest_s), max(beats, SILENCE_MOST_S))

    def observe(self, silent_s: Seconds) -> None:
        self.longest_s = max(self.longest_s, silent_s)


class StopPatience(Struct):
    """How long nodes that are stopping are waited for when spares could take their places.

    Survivors have seats and state, so they are preferred; but one whose worker cannot even be killed
    must not hold up the others.
    """

    longest_s: Seconds | None = None

    def observe(self, took_s: Seconds) -> None:
        self.longest_s = max(took_s, self.longest_s or 0.0)

    def limit_s(self) -> Seconds:
        if self.longest_s is None:
            return STOP_UNKNOWN_S
        return max(PATIENCE_FLOOR_S, PATIENCE_FACTOR * self.longest_s)


class StopGrace(Struct):
    """How long a worker that handles SIGTERM may take before SIGKILL.

    Only workers that installed a handler get it (the agent sees that in the process's signal mask);
    one that ignores SIGTERM is killed at once. Until a first one was seen to end by itself, it has
    torchrun's 30 s.
    """

    override_s: Seconds | None
    longest_s: Seconds | None = None

    def observe(self, took_s: Seconds) -> None:
        self.longest_s = max(took_s, self.longest_s or 0.0)

    def limit_s(self) -> Seconds:
        if self.override_s is not None:
            return self.override_s
        if self.longest_s is None:
            return STOP_UNKNOWN_S
        return max(STOP_FLOOR_S, STOP_FACTOR * self.longest_s)


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
