"""Detects ranks that are late, and looks at what of them still moves.

The detector reads each worker's vital signs shortly after the moment at which it would be late, and at
least four times a second; nothing is asked of the worker, which may be unable to answer. Late
(`core.hangs.deadlines`) is only a suspicion. The coordinator decides what it means for the job, from
what the detector reports: how the rank stands (`StallKind`), where, which signs of life there are and
for how long there were none. All that is read only while a rank is late, or waits for a lock.

A rank is in one or more of: its first step, a phase of a step, sections. It is late in the one whose
limit passes first. A section of the training thread replaces the phase, unless steps finish within it:
then it surrounds the training. A limit that the user set makes a rank late too.

A rank whose script has ended is watched until its process is gone. A pause in which nothing moved, and
that ended by itself, is reported, so that the next one at that place is known for what it is. A rank
that waited for others says nothing of that kind.

When the agent itself did not run (the machine was suspended, or starved), nothing that it sees then
says anything about its ranks: they have their time again.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from holdfast import cgroups, proc
from holdfast.agent import contention
from holdfast.agent.contention import Reading
from holdfast.agent.life import Life, Look, Observer, Observes
from holdfast.core.hangs.deadlines import (
    ENDED_LATE_S,
    LATE_UNKNOWN_S,
    OLD_BEAT_S,
    late_between_marks,
    late_in_collective,
    late_in_section,
)
from holdfast.messages.hangs import FIRST_STEP, HangTerms, Paces, Pause, Stall, StallKind
from holdfast.messages.records import Part
from holdfast.messages.units import Rank, Seconds
from holdfast.shm.vital_signs import (
    PHASES,
    UNWATCHED,
    OpenSection,
    Signs,
    Times,
    Vitals,
    section_name,
)

LOOK_EVERY_S = 0.25
LOOK_SOONEST_S = 0.05
LOOK_COST = 0.01
"""Share of the agent's time that looks at one rank may take; with more, they come less often."""
AGENT_LATE_S = 1.0
"""A timer this late means that the agent was not running."""
REPEAT_S = 2.0
REPEAT_MOST_S = 15.0
"""Unchanged stalls are reported again at growing intervals: other ranks may have ended since."""
NEWS_FACTOR = 1.2
"""A duration is reported again when it has changed by this factor."""
SILENT_S: Final = 0.4
"""A heartbeat this old is a reason to ask whether the process is frozen."""
AT_LOCK_S: Final = 0.1
"""A thread that waits for a lock this long is looked at, so that a proof is there when it is late."""
BUSY_SHARE: Final = 0.5
ROOTED_S: Final = 0.95
"""A thread seen at one line for this long stands there."""
PAUSE_S: Final = 1.0
"""Shortest pause that is reported."""
PAUSES_AT_ONCE: Final = 32
AFTER_END = "exit"
"""Where a rank is whose script has ended."""
LEARNS: Final = frozenset({"gil", "locked", "elsewhere"})
"""Kinds of stalls in which a pause is the rank's own."""

Report = Callable[[tuple[Stall, ...], tuple[Pause, ...]], None]


class System(Protocol):
    """What the detector needs besides vital signs: a monotonic clock, timers, and the kernel's
    view."""

    def now(self) -> float: ...
    def call_later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle: ...
    def process_state(self, pid: int) -> str: ...
    def is_frozen(self, pid: int) -> bool: ...
    def observer(self, pid: int, store_port: int) -> Observes: ...
    def contention(self, pid: int, now: float) -> Reading: ...


class KernelSystem:
    """The event loop's clock, and real processes."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, act)

    process_state = staticmethod(proc.process_state)
    is_frozen = staticmethod(cgroups.is_frozen)
    observer = Observer
    contention = staticmethod(contention.read)


# ---- how a late rank stands ----


class Condition(NamedTuple):
    """What is known of a rank beyond its vital signs."""

    ended: bool
    """Whether its script has ended."""
    locked: bool
    """Whether every thread waits for a lock that only this process could release."""
    still_s: Seconds | None
    """How long nothing of it has moved; None if it was not looked at, because it is not late."""


def late_kind(state: str, signs: Signs, look: Look, now: float, for_s: float) -> StallKind:
    """Classify a rank without a mark for `for_s` seconds, whose process runs and whose script too."""
    storage_or_debugger = state in ("t", "D")
    silent_s = now - signs.beat_at if signs.beat_at else 0.0
    if not storage_or_debugger and silent_s > max(OLD_BEAT_S, for_s / 2):
        return "gil"
    computes = signs.in_backward and look.cpu_share > BUSY_SHARE
    if signs.waits and not computes and now - signs.line_at >= ROOTED_S:
        return "waits"
    return "locked" if look.locked else "elsewhere"


# ---- what is watched ----


@dataclass
class WatchedRank:
    """A worker, and what was seen of it so far."""

    rank: Rank
    pid: int
    vitals: Vitals
    began_at: float
    observer: Observes
    stepped: bool = False
    ended_at: float | None = None
    """When its script ended."""
    stopped_at: float | None = None
    """When it was first seen stopped or frozen, if it still is."""
    life: Life | None = None
    """What moves of it, while it is looked at."""
    kind: StallKind | None = None
    """How it stood at the last look, if it was late."""
    place: str = ""
    look: Look | None = None
    looked_at: float = 0.0
    settled: str = ""
    """The last place at which it stayed for a while: one that moves between two lines is not new each
    time."""

    def look_away(self) -> None:
        """Forget what was seen to move."""
        self.life = self.look = self.kind = None
        self.place = self.settled = ""

    def pause(self, now: float) -> Pause | None:
        """Return the pause that ends now, if there was one."""
        if self.look is None or self.kind not in LEARNS or self.look.still_s < PAUSE_S:
            return None
        return Pause(self.place, self.look.still_s + now - self.looked_at)


@dataclass(frozen=True)
class Due:
    """Something that a rank is in, and when it is late there."""

    where: str
    since: float
    late_at: float
    own: bool = True
    """Whether the training thread is in it."""


class StallDetector:
    """Watches the ranks of one node; `report` gets the late ones whenever that changes."""

    def __init__(self, terms: HangTerms, report: Report, system: System) -> None:
        named = {section_name(name): s for name, s in terms.rank_section_timeouts.items()}
        self._terms = replace(terms, rank_section_timeouts=named)
        self._report = report
        self._system = system
        self._store_port = 0
        self._watched: dict[Rank, WatchedRank] = {}
        self._reported: tuple[Stall, ...] = ()
        self._gist: object = ()
        self._reported_at = 0.0
        self._repeat_s = REPEAT_S
        self._pauses: list[Pause] = []
        """Pauses to report."""
        self._reported_longest: dict[str, float] = {}
        self._reported_step_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._not_before = 0.0
        """Signs count as not older than this."""
        self._examinations = 0
        self._examined_at = float("-inf")
        self._held = False

    def begin_round(self, part: Part) -> None:
        """Prepare for the ranks of a round."""
        self.stop()
        self._store_port = part.store_port

    def add(self, rank: Rank, pid: int, vitals: Vitals) -> None:
        """Watch a rank from now on."""
        now = self._system.now()
        observer = self._system.observer(pid, self._store_port)
        self._watched[rank] = WatchedRank(rank, pid, vitals, now, observer)
        if self._terms.detect and self._timer is None:
            self._look_at(now + LOOK_EVERY_S)

    def stepped(self, rank: Rank) -> None:
        """Note that a rank finished its first step."""
        if one := self._watched.get(rank):
            one.stepped = True

    def script_ended(self, rank: Rank) -> None:
        """Note that a rank's script has ended. Its process is watched until it is gone."""
        if one := self._watched.get(rank):
            now = self._system.now()
            self._note_pause(one, now)
            one.look_away()
            one.ended_at = now

    def remove(self, rank: Rank) -> None:
        """Watch a rank no longer."""
        self._watched.pop(rank, None)

    def stop(self) -> None:
        """Watch nothing until the next round."""
        self._watched.clear()
        self._pauses.clear()
        self._reported, self._gist = (), ()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def hold(self) -> None:
        """Look at no rank: they are paused, and it is not their fault."""
        self._held = True

    def release(self) -> None:
        """Look again: all deadlines begin anew."""
        self._held = False

    @contextmanager
    def disturbing(self) -> Iterator[None]:
        """Do not take for signs of life what an examination does to the ranks meanwhile."""
        self._examinations += 1
        try:
            yield
        finally:
            self._examinations -= 1
            self._examined_at = self._system.now()

    def condition(self, rank: Rank) -> Condition | None:
        """Return what is known of a rank, for an examination; None if it is not watched."""
        one = self._watched.get(rank)
        if one is None:
            return None
        locked = one.look is not None and one.look.locked
        return Condition(one.ended_at is not None, locked, one.look.still_s if one.look else None)

    # ---- looking ----

    def _look_at(self, at: float) -> None:
        self._due_at = at
        self._timer = self._system.call_later(max(0.0, at - self._system.now()), self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._watched:
            return
        now = self._system.now()
        if self._held or now - self._due_at > AGENT_LATE_S:
            self._not_before = now
            for one in self._watched.values():
                one.look_away()
                one.stopped_at = None
        self._look_at(now + LOOK_EVERY_S)  # First, so that a look that raises is not the last one.
        looks = [self._judge(one, now) for one in self._watched.values()]
        self._tell(tuple(stall for stall, _ in looks if stall is not None), now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watched:
            self._look_at(max(min(at for _, at in looks), now + LOOK_SOONEST_S))

    def _judge(self, one: WatchedRank, now: float) -> tuple[Stall | None, float]:
        """Return the rank's stall, if it is late, and when to look again."""
        signs, state = one.vitals.read(), self._system.process_state(one.pid)
        if now == self._not_before:
            return None, now + LOOK_EVERY_S
        due = self._due(one, signs)
        if one.ended_at is None and self._is_stopped(one, signs, state, now):
            one.look_away()
            stopped_at = one.stopped_at = one.stopped_at or now
            for_s = now - stopped_at
            stall = Stall(one.rank, "stopped", due.where, for_s, signs.place, for_s)
            return stall, now + LOOK_EVERY_S
        one.stopped_at = None
        if now < due.late_at:
            return None, self._not_late(one, signs, due, now)
        if not due.own:
            stall = Stall(one.rank, "elsewhere", due.where, now - due.since)
            return stall, now + LOOK_EVERY_S
        return self._late(one, signs, state, due, now)

    def _is_stopped(self, one: WatchedRank, signs: Signs, state: str, now: float) -> bool:
        if state == "T":
            return True
        silent = signs.beat_at > 0.0 and now - signs.beat_at > SILENT_S
        return silent and self._system.is_frozen(one.pid)

    def _not_late(self, one: WatchedRank, signs: Signs, due: Due, now: float) -> float:
        """Look at a rank that is not late yet, if it may be at a lock; return when to look again."""
        if one.kind is not None:
            self._note_pause(one, now)
            one.look_away()
        stands = now - max(signs.line_at, signs.mark_at) >= AT_LOCK_S
        if stands and not signs.waits and one.observer.is_at_lock(signs.thread):
            self._see(one, signs, False, now)
        else:
            one.look_away()
        return min(due.late_at, now + LOOK_EVERY_S)

    def _late(
        self, one: WatchedRank, signs: Signs, state: str, due: Due, now: float
    ) -> tuple[Stall, float]:
        ended, for_s = one.ended_at is not None, now - due.since
        silent = signs.beat_at > 0.0 and now - signs.beat_at > OLD_BEAT_S
        look, took_s = self._see(one, signs, ended or silent, now)
        if ended:
            one.kind = "locked" if look.locked else "ended"
        else:
            one.kind = late_kind(state, signs, look, now, for_s)
        one.place = "" if ended else signs.place
        if now - signs.line_at >= ROOTED_S or not one.settled:
            one.settled = one.place
        stall = Stall(one.rank, one.kind, due.where, for_s, one.place, look.still_s, look.recent)
        return stall, now + max(LOOK_EVERY_S, took_s / LOOK_COST)

    def _see(
        self, one: WatchedRank, signs: Signs, strictly: bool, now: float
    ) -> tuple[Look, Seconds]:
        """Look at what moves of a rank; note the pause that ends with that."""
        if one.life is None:
            one.life = Life()
        sample = one.observer.sample(signs.thread, now, strictly, not signs.waits)
        disturbed = self._examinations > 0 or self._examined_at >= one.looked_at
        look = one.life.look(signs, sample, now, strictly, disturbed)
        if look.moved:
            self._note_pause(one, now)
        one.look, one.looked_at = look, now
        return look, sample.took_s

    def _note_pause(self, one: WatchedRank, now: float) -> None:
        pause = one.pause(now)
        if pause is not None and len(self._pauses) < PAUSES_AT_ONCE:
            self._pauses.append(pause)

    def _tell(self, stalls: tuple[Stall, ...], now: float) -> None:
        """Report stalls when they have changed, and unchanged ones at growing intervals."""
        gist = [self._gist_of(stall) for stall in stalls]
        if gist != self._gist and (gist or self._reported):
            self._repeat_s = REPEAT_S
        elif not stalls or now - self._reported_at < self._repeat_s:
            return
        else:
            self._repeat_s = min(REPEAT_MOST_S, 2 * self._repeat_s)
        pauses, self._pauses = tuple(self._pauses), []
        self._reported, self._gist, self._reported_at = stalls, gist, now
        self._report(stalls, pauses)

    def _gist_of(self, stall: Stall) -> tuple[object, ...]:
        settled = self._watched[stall.rank].settled
        silent = stall.still_s >= self._terms.silent_s
        return stall.rank, stall.kind, settled, silent, bool(stall.signs)

    # ---- when it is late ----

    def _due(self, one: WatchedRank, signs: Signs) -> Due:
        """Return that of everything the rank is in which it is late in first."""
        if one.ended_at is not None:
            return self._at(AFTER_END, one.ended_at, ENDED_LATE_S)
        unwatched = next((s for s in signs.sections if s.own and s.name == UNWATCHED), None)
        if unwatched is not None:
            return self._at(UNWATCHED, unwatched.entered_at, math.inf)
        return min(self._dues(one, signs), key=lambda due: due.late_at)

    def _dues(self, one: WatchedRank, signs: Signs) -> Iterator[Due]:
        """Yield everything that the rank is in: at least one thing."""
        times = one.vitals.times()
        for section in signs.sections:
            yield from self._section(section, signs, _usual_s(times, section.name))
        own = [section for section in signs.sections if section.own]
        if not one.stepped:
            yield from self._first_step(one, signs, bool(own))
        elif not own or signs.step_at > own[-1].entered_at:
            usual_s = _usual_s(times, signs.phase, "step")
            yield from self._phase(one, signs, usual_s, bool(own))

    def _section(self, section: OpenSection, signs: Signs, usual_s: float | None) -> Iterator[Due]:
        name, entered_at, own = section.name, section.entered_at, section.own
        said_s = self._terms.rank_section_timeouts.get(name)
        if said_s is not None:
            yield self._at(name, entered_at, said_s, own=own)
        if own:
            # While its usual duration is unknown, marks within it count as progress.
            since = entered_at if usual_s is not None else max(entered_at, signs.mark_at)
            yield self._at(name, since, late_in_section(usual_s))

    def _first_step(self, one: WatchedRank, signs: Signs, in_section: bool) -> Iterator[Due]:
        said_s = self._terms.initial_rank_heartbeat_timeout
        if said_s is not None:
            yield self._at(FIRST_STEP, one.began_at, said_s)
        if not in_section:
            since = max(one.began_at, signs.mark_at, signs.line_at)
            yield self._at(FIRST_STEP, since, LATE_UNKNOWN_S)

    def _phase(
        self, one: WatchedRank, signs: Signs, usual_s: float | None, in_section: bool
    ) -> Iterator[Due]:
        since = max(signs.mark_at, one.began_at)
        terms = self._terms
        outside_s = None if in_section else terms.rank_out_of_section_timeout
        for limit_s in (late_between_marks(usual_s), terms.rank_heartbeat_timeout, outside_s):
            if limit_s is not None:
                yield self._at(signs.phase, since, limit_s)
        if signs.waits:
            waits_since = max(since, signs.line_at)
            yield self._at(signs.phase, since, late_in_collective(usual_s), waits_since)

    def _at(
        self,
        where: str,
        since: float,
        limit_s: Seconds,
        counted_from: float | None = None,
        own: bool = True,
    ) -> Due:
        begins = max(since if counted_from is None else counted_from, self._not_before)
        return Due(where, max(since, self._not_before), begins + limit_s, own)

    # ---- how long things take ----

    def _paces(self) -> Paces:
        """Return the median step time on this node, and the longest durations of sections."""
        longest: dict[str, float] = {}
        steps: list[float] = []
        for one in self._watched.values():
            for name, taken in one.vitals.times().items():
                if name not in PHASES:
                    longest[name] = max(taken.longest_s, longest.get(name, 0.0))
                if name == "step":
                    steps += taken.latest_s
        return Paces(statistics.median(steps) if steps else None, longest)

    def news(self) -> Paces | None:
        """Return the median step time, and the longest durations that have grown since they were last
        reported; None if nothing is new."""
        paces = self._paces()
        fresh = {
            name: longest
            for name, longest in paces.longest_s.items()
            if longest > NEWS_FACTOR * self._reported_longest.get(name, 0.0)
        }
        before_s = self._reported_step_s or 0.0
        if not fresh and abs((paces.step_s or 0.0) - before_s) <= (NEWS_FACTOR - 1.0) * before_s:
            return None
        self._reported_longest |= fresh
        self._reported_step_s = paces.step_s
        return Paces(paces.step_s, fresh)


def _usual_s(times: Mapping[str, Times], *names: str) -> float | None:
    """Return the median of the latest durations of the first of these that has any."""
    known = (times[name].latest_s for name in names if name in times)
    return next((statistics.median(latest) for latest in known if latest), None)
