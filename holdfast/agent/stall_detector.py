"""Sees when a rank stands still for longer than it should.

It looks at each worker's vitals shortly after the moment at which its deadline would pass, and at
least once a second; nothing is asked of the worker, which may not be able to answer. How long it may
stand still is decided by `core.hangs.deadlines`, from what ranks of this and earlier rounds
were seen to do. What it means for the job is for the coordinator to decide.

A rank is in one or more of: its first step, a phase of a step, sections. Each has a deadline, and the
one whose time is up first decides. A section of the training thread takes the place of the phase,
unless steps are finished within it: then it is one around the training.

When this agent itself did not get its turn (the machine was suspended, or starved), nothing that it
sees then says anything about its ranks: they get their time again.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from holdfast.agent import stall_kinds as stance
from holdfast.agent.stall_kinds import Effort, Lately
from holdfast.core.hangs.deadlines import FIRST_STEP, HANG_BASE_S, Deadline, HangLimits
from holdfast.messages.hangs import HangTerms, Paces, Stall
from holdfast.messages.records import Part
from holdfast.messages.timings import RankTimings, Timing
from holdfast.messages.units import Rank
from holdfast.shm.vital_signs import (
    ALSO_IN_FORWARD,
    LEFT_OUT,
    PHASES,
    WITH_GRADIENTS,
    Open,
    Signs,
    Times,
    Vitals,
    section_name,
)

LOOK_EVERY_S = 1.0
LOOK_SOONEST_S = 0.05
LOOK_AGAIN_S = 0.25
"""At a rank that is past its deadline."""
LATE_S = 1.0
"""An agent whose turn comes so much too late was not running."""
REPEAT_S = 2.0
REPEAT_MOST_S = 60.0
"""Who stands still is told again now and then: the others may have ended meanwhile."""
NEWS = 1.2
"""A longest time is told again when it has grown by that factor."""
WAITING = {
    LEFT_OUT: frozenset({"step", "between"}),
    WITH_GRADIENTS: frozenset({"step", "between", "backward", "optimizer"}),
    ALSO_IN_FORWARD: frozenset({"step", "between", "backward", "optimizer", "forward"}),
}
"""Phases in whose times ranks may have waited for each other."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Outside(Protocol):
    """What a watch sees of the world, besides vitals."""

    def now(self) -> float: ...
    def later(self, delay_s: float, act: Callable[[], None]) -> Timer: ...
    def state(self, pid: int) -> str: ...
    def effort(self, pid: int, thread: int) -> Effort: ...


class World:
    """The real one."""

    def now(self) -> float:
        return time.monotonic()

    def later(self, delay_s: float, act: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, act)

    def state(self, pid: int) -> str:
        return stance.process_state(pid)

    def effort(self, pid: int, thread: int) -> Effort:
        return stance.effort(pid, thread)


@dataclass
class Watched:
    """One worker, as far as its standing still is concerned."""

    rank: Rank
    pid: int
    vitals: Vitals
    began_at: float
    stepped: bool = False
    stopped_at: float | None = None
    """When it was first seen to be stopped, if it still is."""
    looked_at: float = 0.0
    effort: Effort = field(default_factory=Effort)
    """How much it had done when it was last looked at."""
    moved_at: float = 0.0
    """When it was last seen to read or write between two marks."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of each phase, how many had ended when its timings were last told."""
    own_counts: dict[str, int] = field(default_factory=dict)
    """The same of what they took the rank itself."""

    def news(self) -> list[tuple[str, int, float]]:
        """What ended since the last time: how often, and how long it took in the median; the rank
        itself where that is known, which on a device is looked at only now and then."""
        found = []
        own = self.vitals.own_times()
        fresh_own = _fresh(own, self.own_counts)
        times = self.vitals.times()
        for name, fresh in _fresh(times, self.counts).items():
            latest = times[name].latest_s[-fresh:]
            if name in own:
                looked = fresh_own.get(name, 0)
                latest = own[name].latest_s[-looked:] if looked else ()
            if latest and name != "start":
                found.append((name, fresh, statistics.median(latest)))
        return found


def _fresh(times: Mapping[str, Times], told: dict[str, int]) -> dict[str, int]:
    """Of what there is more than was told, how much; it is told with this."""
    fresh = {name: one.count - told.get(name, 0) for name, one in times.items()}
    told.update({name: one.count for name, one in times.items()})
    return {name: count for name, count in fresh.items() if count > 0}


@dataclass(frozen=True)
class Due:
    """Something that a rank is in, and when its time is up."""

    where: str
    since: float
    deadline: Deadline
    own: bool = True
    """It is the training thread that is in it."""

    @property
    def at(self) -> float:
        return self.since + self.deadline.limit_s


class Watch:
    def __init__(
        self,
        terms: HangTerms,
        report: Callable[[tuple[Stall, ...]], None],
        outside: Outside | None = None,
    ) -> None:
        named = {section_name(name): s for name, s in terms.rank_section_timeouts.items()}
        self._terms = replace(terms, rank_section_timeouts=named)
        self._report = report
        self._outside = outside or World()
        self._limits = HangLimits(self._terms, Paces(), {})
        self._watched: dict[Rank, Watched] = {}
        self._told: tuple[Stall, ...] = ()
        self._told_at = 0.0
        self._repeat_s = REPEAT_S
        self._told_longest: dict[str, float] = {}
        self._first_s = 0.0
        """The longest that a rank took to its first step."""
        self._timer: Timer | None = None
        self._due_at = 0.0
        self._not_before = 0.0
        """Signs count as not older than that."""

    def begin_round(self, part: Part) -> None:
        self.stop()
        self._limits = HangLimits(self._terms, part.paces, part.alarms)

    def add(self, rank: Rank, pid: int, vitals: Vitals) -> None:
        now = self._outside.now()
        self._watched[rank] = Watched(rank, pid, vitals, now, looked_at=now)
        if self._terms.detect and self._timer is None:
            self._look_at(now + LOOK_EVERY_S)

    def stepped(self, rank: Rank) -> None:
        """It has finished its first step."""
        if rank in self._watched:
            one = self._watched[rank]
            one.stepped = True
            self._first_s = max(self._first_s, self._outside.now() - one.began_at)

    def remove(self, rank: Rank) -> None:
        self._watched.pop(rank, None)

    def stop(self) -> None:
        """Nobody is to be watched until the next round."""
        self._watched.clear()
        self._told = ()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- looking ----

    def _look_at(self, at: float) -> None:
        self._due_at = at
        self._timer = self._outside.later(max(0.0, at - self._outside.now()), self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._watched:
            return
        now = self._outside.now()
        if now - self._due_at > LATE_S:
            self._not_before = now
        paces = self._paces()
        stalls = []
        soonest = now + LOOK_EVERY_S
        for one in self._watched.values():
            stall, due_at = self._judge(one, paces, now)
            if stall is not None:
                stalls.append(stall)
            soonest = min(soonest, due_at)
        self._tell(tuple(stalls), now)
        if self._watched:
            self._look_at(max(soonest, now + LOOK_SOONEST_S))

    def _judge(self, one: Watched, paces: Paces, now: float) -> tuple[Stall | None, float]:
        """How it stands, and when to look again."""
        signs = one.vitals.read()
        state, did = self._outside.state(one.pid), self._lately(one, signs, now)
        due = min(self._dues(one, signs, paces), key=lambda due: due.at)
        since, limit_s = max(due.since, self._not_before), due.deadline.limit_s
        for_s = now - since
        if for_s > limit_s:
            kind = stance.kind(state, signs, did, now, for_s) if due.own else "busy"
            overdue = for_s > due.deadline.overdue_s
            place = stance.place(signs, now) if kind == "still" else 0
            stall = Stall(one.rank, kind, due.where, for_s, limit_s, overdue, place)
            return stall, now + LOOK_AGAIN_S
        return self._judge_stopped(one, state, due.where, since + limit_s, now)

    def _judge_stopped(
        self, one: Watched, state: str, where: str, due_at: float, now: float
    ) -> tuple[Stall | None, float]:
        """One that is stopped has no use for the time that it would have."""
        if state != "T":
            one.stopped_at = None
            return None, due_at
        one.stopped_at = max(one.stopped_at or now, self._not_before)
        for_s = now - one.stopped_at
        if for_s <= HANG_BASE_S:
            return None, min(due_at, one.stopped_at + HANG_BASE_S)
        return Stall(one.rank, "stopped", where, for_s, HANG_BASE_S), now + LOOK_AGAIN_S

    def _lately(self, one: Watched, signs: Signs, now: float) -> Lately:
        before, since = one.effort, one.looked_at
        one.effort, one.looked_at = self._outside.effort(one.pid, signs.thread), now
        did = stance.lately(before, one.effort, now - since)
        if did.moved and since >= signs.mark_at:
            one.moved_at = now
        moved = did.moved or one.moved_at > (signs.mark_at + now) / 2
        return Lately(did.cpu_share, moved)

    # ---- deadlines ----

    def _dues(self, one: Watched, signs: Signs, paces: Paces) -> Iterator[Due]:
        """All that it is in; never nothing."""
        for section in signs.sections:
            yield self._section(section, signs, paces)
        own = [section for section in signs.sections if section.own]
        if not one.stepped and not own:
            yield self._first_step(one, signs)
        elif one.stepped and (not own or signs.step_at > own[-1].entered_at):
            yield self._phase(one, signs, paces)

    def _section(self, section: Open, signs: Signs, paces: Paces) -> Due:
        name, entered_at = section.name, section.entered_at
        longest_s = paces.longest_s.get(name, 0.0)
        deadline = self._limits.in_section(name, paces.step_s, longest_s)
        # As long as it is not known how long it takes, all is well while there are signs within it.
        since = entered_at if deadline.known else max(entered_at, signs.mark_at)
        return Due(name, since, deadline, section.own)

    def _first_step(self, one: Watched, signs: Signs) -> Due:
        deadline = self._limits.until_first_step()
        since = one.began_at
        if self._terms.initial_rank_heartbeat_timeout is None:
            since = max(since, signs.mark_at)
        if not deadline.known:  # It may be a script that takes no steps at all.
            since = max(since, signs.place_at)
        return Due(FIRST_STEP, since, deadline)

    def _phase(self, one: Watched, signs: Signs, paces: Paces) -> Due:
        own = one.vitals.times().get(signs.phase)
        longest_s = max(paces.longest_s.get(signs.phase, 0.0), own.longest_s if own else 0.0)
        deadline = self._limits.between_marks(signs.phase, paces.step_s, longest_s, signs.warm)
        return Due(signs.phase, max(signs.mark_at, one.began_at), deadline)

    def _tell(self, stalls: tuple[Stall, ...], now: float) -> None:
        """Say who stands still, when that has changed; and again, ever more seldom."""
        if _gist(stalls) != _gist(self._told):
            self._repeat_s = REPEAT_S
        elif not stalls or now - self._told_at < self._repeat_s:
            return
        else:
            self._repeat_s = min(REPEAT_MOST_S, 2 * self._repeat_s)
        self._told, self._told_at = stalls, now
        self._report(stalls)

    # ---- telling how long things take ----

    def _paces(self) -> Paces:
        """How long things take on this node; what a rank took to warm up is left out."""
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
        """How long things take, if that is not known yet."""
        paces = self._paces()
        longest_s = paces.longest_s | ({FIRST_STEP: self._first_s} if self._first_s else {})
        fresh = {
            name: longest
            for name, longest in longest_s.items()
            if longest > NEWS * self._told_longest.get(name, 0.0)
        }
        if not fresh:
            return None
        self._told_longest |= fresh
        return Paces(paces.step_s, fresh)

    def timings(self) -> tuple[RankTimings, ...]:
        """What the ranks' steps consisted of since the last time."""
        found = []
        for one in self._watched.values():
            news = one.news()
            if not one.vitals.warm:
                continue  # Its first steps say nothing about its speed.
            waiting = WAITING[one.vitals.waiting]
            timings = [
                Timing(
                    section=name,
                    count=count,
                    median_s=median_s,
                    total_s=median_s * count,
                    waits=name in waiting,
                )
                for name, count, median_s in news
            ]
            if timings:
                found.append(RankTimings(rank=one.rank, timings=tuple(timings)))
        return tuple(found)


def _gist(stalls: Iterable[Stall]) -> list[tuple[Rank, str, bool]]:
    return [(stall.rank, stall.kind, stall.overdue) for stall in stalls]
