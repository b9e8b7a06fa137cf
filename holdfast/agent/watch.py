"""Sees when a rank stands still for longer than it should.

It looks at each worker's vitals shortly after the moment at which its deadline would pass, and at
least once a second; nothing is asked of the worker, which may not be able to answer. How long it may
stand still is for `core.deadlines` to say, from what this node's ranks and those of earlier rounds
were seen to do. What it means for the job is for the coordinator to decide.

When this agent itself did not get its turn (the machine was suspended, or starved), nothing that it
sees then says anything about its ranks: they get their time again.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.core.deadlines import HangLimits
from holdfast.messages.hangs import HangTerms, Paces, Stall, StallKind
from holdfast.messages.records import Part
from holdfast.messages.timings import RankTimings, Timing
from holdfast.messages.units import Rank
from holdfast.vitals import Signs, Times, Vitals

LOOK_EVERY_S = 1.0
LOOK_SOONEST_S = 0.05
LATE_S = 1.0
"""An agent whose turn comes so much too late was not running."""
OLD_BEAT_S = 1.0
BUSY_CODES = 3
"""A main thread that was seen in so many pieces of code is not stuck in one."""
NEWS = 1.2
"""A longest time is told again when it has grown by that factor."""
WAITING_PHASES = frozenset({"backward", "optimizer", "step", "between"})
"""Phases in which ranks may wait for each other."""


@dataclass
class Watched:
    """One worker, as far as its standing still is concerned."""

    rank: Rank
    pid: int
    vitals: Vitals
    began_at: float
    stepped: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    """Of each phase, how many had ended when its timings were last told."""


class Watch:
    def __init__(self, terms: HangTerms, report: Callable[[tuple[Stall, ...]], None]) -> None:
        self._terms = terms
        self._report = report
        self._limits = HangLimits(terms, Paces(), {})
        self._watched: dict[Rank, Watched] = {}
        self._told: tuple[Stall, ...] = ()
        self._told_longest: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._not_before = 0.0
        """Marks count as not older than that."""

    def begin_round(self, part: Part) -> None:
        self.stop()
        self._limits = HangLimits(self._terms, part.paces, part.alarms)

    def add(self, rank: Rank, pid: int, vitals: Vitals) -> None:
        self._watched[rank] = Watched(rank, pid, vitals, time.monotonic())
        if self._terms.detect and self._timer is None:
            self._look_at(time.monotonic() + LOOK_EVERY_S)

    def stepped(self, rank: Rank) -> None:
        if rank in self._watched:
            self._watched[rank].stepped = True

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
        delay = at - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._watched:
            return
        now = time.monotonic()
        if now - self._due_at > LATE_S:
            self._not_before = now
        times = {rank: one.vitals.times() for rank, one in self._watched.items()}
        paces = _paces(times.values())
        stalls = []
        soonest = now + LOOK_EVERY_S
        for one in self._watched.values():
            stall, due = self._judge(one, paces, now)
            if stall is not None:
                stalls.append(stall)
            soonest = min(soonest, due)
        self._tell(tuple(stalls))
        if self._watched:
            self._look_at(max(soonest, now + LOOK_SOONEST_S))

    def _judge(self, one: Watched, paces: Paces, now: float) -> tuple[Stall | None, float]:
        """How it stands, and when to look again."""
        signs = one.vitals.read()
        where, since, limit_s = self._deadline(one, signs, paces)
        since = max(since, self._not_before)
        for_s = now - since
        if for_s <= limit_s:
            return None, since + limit_s
        overdue = for_s > self._limits.overdue(limit_s)
        kind = "overdue" if overdue else _kind(one.pid, signs, now)
        return Stall(one.rank, kind, where, for_s, limit_s), now + LOOK_EVERY_S / 4

    def _deadline(self, one: Watched, signs: Signs, paces: Paces) -> tuple[str, float, float]:
        """What it is in, since when, and how long it may be."""
        if signs.sections:
            return self._section_deadline(signs, paces)
        mark_at = max(signs.mark_at, one.began_at)
        if not one.stepped:
            return "its first step", one.began_at, self._limits.until_first_step()
        longest = paces.longest_s.get(signs.phase, 0.0)
        limit_s = self._limits.between_marks(signs.phase, paces.step_s, longest)
        return signs.phase, mark_at, limit_s

    def _section_deadline(self, signs: Signs, paces: Paces) -> tuple[str, float, float]:
        """Of all open sections the one whose time is up first."""
        deadlines = []
        for name, entered_at in signs.sections:
            longest = paces.longest_s.get(name, 0.0)
            limit_s = self._limits.in_section(name, paces.step_s, longest)
            deadlines.append((entered_at + limit_s, name, entered_at, limit_s))
        _, name, entered_at, limit_s = min(deadlines)
        return name, entered_at, limit_s

    def _tell(self, stalls: tuple[Stall, ...]) -> None:
        """Say who stands still; again only when that has changed."""
        if [(s.rank, s.kind) for s in stalls] != [(s.rank, s.kind) for s in self._told]:
            self._told = stalls
            self._report(stalls)

    # ---- telling how long things take ----

    def news(self) -> Paces | None:
        """How long things take, if that is not known yet."""
        paces = _paces([one.vitals.times() for one in self._watched.values()])
        fresh = {
            name: longest
            for name, longest in paces.longest_s.items()
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
            timings = []
            for name, times in one.vitals.times().items():
                new = times.count - one.counts.get(name, 0)
                if new > 0 and name != "start":
                    timings.append(_timing(name, times, new))
                one.counts[name] = times.count
            if timings:
                found.append(RankTimings(rank=one.rank, timings=tuple(timings)))
        return tuple(found)


def _timing(name: str, times: Times, new: int) -> Timing:
    median_s = statistics.median(times.latest_s[-new:])
    return Timing(
        section=name,
        count=new,
        median_s=median_s,
        total_s=median_s * new,
        waits=name in WAITING_PHASES,
    )


def _paces(all_times: Iterable[dict[str, Times]]) -> Paces:
    longest: dict[str, float] = {}
    steps: list[float] = []
    for times in all_times:
        for name, taken in times.items():
            longest[name] = max(taken.longest_s, longest.get(name, 0.0))
        if "step" in times:
            steps += times["step"].latest_s
    return Paces(statistics.median(steps) if steps else None, longest)


def _kind(pid: int, signs: Signs, now: float) -> StallKind:
    state = process_state(pid)
    if state in ("T", "t"):
        return "stopped"
    if now - signs.beat_at > OLD_BEAT_S:
        return "gil"
    if signs.waits:
        return "waits"
    return "busy" if signs.codes >= BUSY_CODES else "still"


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"
