"""Detects ranks that show no progress for longer than they should.

The detector reads each worker's vital signs shortly after the moment its deadline would pass, and
at least once a second; nothing is asked of the worker, which may be unable to answer.
`core.hangs.deadlines` sets the deadlines, from what ranks of this and earlier rounds were seen to
do. What a stall means for the job is for the coordinator to decide.

A rank is in one or more of: its first step, a phase of a step, sections. Each has a deadline, and
the one that passes first decides. A section of the training thread replaces the phase, unless steps
finish within it: then it surrounds the training.

How a stalled rank stands (`StallKind`) is seen from within, by its vital signs, and from outside:
the kernel knows whether the process is stopped, and what its training thread did since the last
look. So a backward pass that computes is told from one that waits for the others' gradients, and a
save to slow storage from a rank that does nothing: it moves bytes now and then, or it waits in
state D.

When the agent itself did not run (the machine was suspended, or starved), nothing that it sees then
says anything about its ranks: their deadlines start again.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec.structs import replace

from holdfast import proc
from holdfast.core.hangs.deadlines import HANG_BASE_S, OLD_BEAT_S, Deadline, HangLimits
from holdfast.messages.hangs import FIRST_STEP, LINES, HangTerms, Paces, Stall, StallKind
from holdfast.messages.records import Part
from holdfast.messages.units import Rank
from holdfast.proc import Effort
from holdfast.shm.vital_signs import (
    PHASES,
    OpenSection,
    Signs,
    Vitals,
    section_name,
)

LOOK_EVERY_S = 1.0
LOOK_SOONEST_S = 0.05
LOOK_AGAIN_S = 0.25
"""Interval between looks at a stalled rank."""
LATE_S = 1.0
"""A timer this late means that the agent was not running."""
REPEAT_S = 2.0
REPEAT_MOST_S = 60.0
"""Unchanged stalls are reported again at growing intervals: other ranks may have ended since."""
NEWS_FACTOR = 1.2
"""A longest duration is reported again when it has grown by this factor."""
BUSY_CODES: Final = 3
"""A thread seen in this many code objects since its last mark is not stuck in one."""
BUSY_SHARE: Final = 0.5
ROOTED_S: Final = 1.0
"""A thread seen at one line for this long stands there."""


class System(Protocol):
    """What the detector needs besides vital signs: a monotonic clock, timers, and the kernel's
    view."""

    def now(self) -> float: ...
    def call_later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle: ...
    def process_state(self, pid: int) -> str: ...
    def effort(self, pid: int, thread: int) -> Effort: ...


class KernelSystem:
    """The event loop's clock, and real processes."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_later(self, delay_s: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, act)

    process_state = staticmethod(proc.process_state)
    effort = staticmethod(proc.effort)


# ---- how a rank stands still ----


@dataclass(frozen=True)
class Activity:
    """What a thread did since the last look at it."""

    cpu_share: float = 0.0
    moved: bool = False
    """Whether it read or wrote since the last look, or in the later half of its silence."""


def stall_kind(state: str, signs: Signs, did: Activity, now: float, for_s: float) -> StallKind:
    """Classify a rank that made no progress for `for_s` seconds."""
    if state == "T":
        return "stopped"
    if state in ("t", "D"):
        return "busy"  # A debugger holds it, or storage does not answer.
    if now - signs.beat_at > max(OLD_BEAT_S, for_s / 2):
        return "gil"
    computes = signs.in_backward and did.cpu_share > BUSY_SHARE
    if signs.waits and not computes and _is_rooted(signs, now):
        return "waits"
    busy = signs.waits or did.moved or signs.codes >= BUSY_CODES
    return "busy" if busy else "still"


def _place(signs: Signs, now: float) -> int:
    """Return where a still rank stands (see `Stall.place`)."""
    if _is_rooted(signs, now):
        return signs.place
    return signs.place // LINES * LINES if signs.codes == 1 else 0


def _is_rooted(signs: Signs, now: float) -> bool:
    """Return whether the training thread was seen at one and the same line for a while."""
    return now - signs.place_at > ROOTED_S


# ---- what is watched ----


@dataclass
class WatchedRank:
    """A worker, and what was seen of it so far."""

    rank: Rank
    pid: int
    vitals: Vitals
    began_at: float
    stepped: bool = False
    stopped_at: float | None = None
    """When it was first seen stopped, if it still is."""
    looked_at: float = 0.0
    effort: Effort = field(default_factory=Effort)
    """What it had done at the last look."""
    moved_at: float = 0.0
    """When it was last seen to read or write between two marks."""

    def activity(self, signs: Signs, effort: Effort, now: float) -> Activity:
        """Return what the training thread did since the last look, which this is from now on."""
        before, since = self.effort, self.looked_at
        self.effort, self.looked_at = effort, now
        share = (effort.cpu_s - before.cpu_s) / (now - since) if now > since else 0.0
        moved = effort.moved_bytes > before.moved_bytes
        if moved and since >= signs.mark_at:
            self.moved_at = now
        return Activity(share, moved or self.moved_at > (signs.mark_at + now) / 2)


@dataclass(frozen=True)
class Due:
    """Something that a rank is in, and its deadline."""

    where: str
    since: float
    deadline: Deadline
    own: bool = True
    """Whether the training thread is in it."""


class StallDetector:
    """Watches the ranks of one node; `report` gets the stalled ones whenever that changes."""

    def __init__(
        self,
        terms: HangTerms,
        report: Callable[[tuple[Stall, ...]], None],
        system: System | None = None,
    ) -> None:
        named = {section_name(name): s for name, s in terms.rank_section_timeouts.items()}
        self._terms = replace(terms, rank_section_timeouts=named)
        self._report = report
        self._system = system or KernelSystem()
        self._limits = HangLimits(self._terms, Paces(), {})
        self._watched: dict[Rank, WatchedRank] = {}
        self._reported: tuple[Stall, ...] = ()
        self._reported_at = 0.0
        self._repeat_s = REPEAT_S
        self._reported_longest: dict[str, float] = {}
        self._first_step_s = 0.0
        """Longest time that a rank took to its first step."""
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._not_before = 0.0
        """Signs count as not older than this."""

    def begin_round(self, part: Part) -> None:
        """Take over what earlier rounds have learnt."""
        self.stop()
        self._limits = HangLimits(self._terms, part.paces, part.alarms)

    def add(self, rank: Rank, pid: int, vitals: Vitals) -> None:
        """Watch a rank from now on."""
        now = self._system.now()
        self._watched[rank] = WatchedRank(rank, pid, vitals, now, looked_at=now)
        if self._terms.detect and self._timer is None:
            self._look_at(now + LOOK_EVERY_S)

    def stepped(self, rank: Rank) -> None:
        """Note that a rank finished its first step."""
        if one := self._watched.get(rank):
            one.stepped = True
            self._first_step_s = max(self._first_step_s, self._system.now() - one.began_at)

    def remove(self, rank: Rank) -> None:
        """Watch a rank no longer."""
        self._watched.pop(rank, None)

    def stop(self) -> None:
        """Watch nothing until the next round."""
        self._watched.clear()
        self._reported = ()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- looking ----

    def _look_at(self, at: float) -> None:
        self._due_at = at
        self._timer = self._system.call_later(max(0.0, at - self._system.now()), self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._watched:
            return
        now = self._system.now()
        if now - self._due_at > LATE_S:
            self._not_before = now
        paces = self._paces()
        looks = [self._judge(one, paces, now) for one in self._watched.values()]
        self._tell(tuple(stall for stall, _ in looks if stall is not None), now)
        if self._watched:
            soonest = min([now + LOOK_EVERY_S, *(due_at for _, due_at in looks)])
            self._look_at(max(soonest, now + LOOK_SOONEST_S))

    def _judge(self, one: WatchedRank, paces: Paces, now: float) -> tuple[Stall | None, float]:
        """Return the rank's stall, if it is stalled, and when to look again."""
        signs = one.vitals.read()
        state = self._system.process_state(one.pid)
        did = one.activity(signs, self._system.effort(one.pid, signs.thread), now)
        dues = self._dues(one, signs, paces)
        due = min(dues, key=lambda due: due.since + due.deadline.limit_s)
        since, limit_s = max(due.since, self._not_before), due.deadline.limit_s
        for_s = now - since
        if for_s > limit_s:
            kind = stall_kind(state, signs, did, now, for_s) if due.own else "busy"
            overdue = for_s > due.deadline.overdue_s
            place = _place(signs, now) if kind == "still" else 0
            stall = Stall(one.rank, kind, due.where, for_s, limit_s, overdue, place)
            return stall, now + LOOK_AGAIN_S
        if state != "T":
            one.stopped_at = None
            return None, since + limit_s
        # A stopped process has no use for the rest of its deadline.
        one.stopped_at = max(one.stopped_at or now, self._not_before)
        for_s = now - one.stopped_at
        if for_s <= HANG_BASE_S:
            return None, min(since + limit_s, one.stopped_at + HANG_BASE_S)
        return Stall(one.rank, "stopped", due.where, for_s, HANG_BASE_S), now + LOOK_AGAIN_S

    def _tell(self, stalls: tuple[Stall, ...], now: float) -> None:
        """Report stalls when they have changed, and unchanged ones at growing intervals."""
        if _gist(stalls) != _gist(self._reported):
            self._repeat_s = REPEAT_S
        elif not stalls or now - self._reported_at < self._repeat_s:
            return
        else:
            self._repeat_s = min(REPEAT_MOST_S, 2 * self._repeat_s)
        self._reported, self._reported_at = stalls, now
        self._report(stalls)

    # ---- deadlines ----

    def _dues(self, one: WatchedRank, signs: Signs, paces: Paces) -> Iterator[Due]:
        """Yield everything that the rank is in: at least one thing."""
        for section in signs.sections:
            yield self._section(section, signs, paces)
        own = [section for section in signs.sections if section.own]
        if not one.stepped and not own:
            yield self._first_step(one, signs)
        elif one.stepped and (not own or signs.step_at > own[-1].entered_at):
            yield self._phase(one, signs, paces)

    def _section(self, section: OpenSection, signs: Signs, paces: Paces) -> Due:
        name, entered_at = section.name, section.entered_at
        longest_s = paces.longest_s.get(name, 0.0)
        deadline = self._limits.in_section(name, paces.step_s, longest_s)
        # While its usual duration is unknown, marks within it count as progress.
        since = entered_at if deadline.known else max(entered_at, signs.mark_at)
        return Due(name, since, deadline, section.own)

    def _first_step(self, one: WatchedRank, signs: Signs) -> Due:
        deadline, since = self._limits.until_first_step(), one.began_at
        if self._terms.initial_rank_heartbeat_timeout is None:
            since = max(since, signs.mark_at)
        if not deadline.known:  # It may be a script that takes no steps at all.
            since = max(since, signs.place_at)
        return Due(FIRST_STEP, since, deadline)

    def _phase(self, one: WatchedRank, signs: Signs, paces: Paces) -> Due:
        own = one.vitals.times().get(signs.phase)
        longest_s = max(paces.longest_s.get(signs.phase, 0.0), own.longest_s if own else 0.0)
        deadline = self._limits.between_marks(signs.phase, paces.step_s, longest_s, signs.warm)
        return Due(signs.phase, max(signs.mark_at, one.began_at), deadline)

    # ---- how long things take ----

    def _paces(self) -> Paces:
        """Return the durations on this node, without those of warming up."""
        longest: dict[str, float] = {}
        steps: list[float] = []
        for one in self._watched.values():
            warm = one.vitals.read().warm
            for name, taken in one.vitals.times().items():
                if warm or name not in PHASES:
                    longest[name] = max(taken.longest_s, longest.get(name, 0.0))
                if name == "step":
                    steps += taken.latest_s
        return Paces(statistics.median(steps) if steps else None, longest)

    def news(self) -> Paces | None:
        """Return the durations that have grown since they were last reported."""
        paces = self._paces()
        fresh = {
            name: longest
            for name, longest in {**paces.longest_s, FIRST_STEP: self._first_step_s}.items()
            if longest > NEWS_FACTOR * self._reported_longest.get(name, 0.0)
        }
        if not fresh:
            return None
        self._reported_longest |= fresh
        return Paces(paces.step_s, fresh)


def _gist(stalls: Iterable[Stall]) -> list[tuple[Rank, str, bool]]:
    return [(stall.rank, stall.kind, stall.overdue) for stall in stalls]
