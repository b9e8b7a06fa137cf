"""Reports what the steps of this node's ranks consist of, and whether there were CPUs for them.

Each rank's vital signs hold the latest durations of its phases. A report has those since the last
report: how many, and their median; of a phase's own work where that is timed, which on a GPU happens
only now and then. The first few steps of a process are not reported: they take long for reasons of
their own. A script's own sections are reported only if it has no phases: sections lie within or
around phases, and may contain waits for other ranks.

How long a rank had no CPU is read with each report: a rank is not slow if its node had no time for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from holdfast.agent import contention
from holdfast.agent.contention import Reading
from holdfast.messages.timings import BETWEEN, OPTIMIZER, STEP, CpuShortage, RankTimings, Timing
from holdfast.messages.units import Rank
from holdfast.shm.vital_signs import (
    ALSO_IN_FORWARD,
    LEFT_OUT,
    PHASES,
    WITH_GRADIENTS,
    Times,
    Vitals,
)

WAITING: Final = {
    LEFT_OUT: frozenset({STEP}),
    WITH_GRADIENTS: frozenset({STEP, "backward", "optimizer"}),
    ALSO_IN_FORWARD: frozenset({STEP, "backward", "optimizer", "forward", BETWEEN}),
}
"""Phases whose durations may include waits for other ranks."""

Read = Callable[[int, float], Reading]
"""Reads a process's CPU counters, with the time."""


class TrainingProcess(NamedTuple):
    """A worker that takes steps."""

    rank: Rank
    pid: int
    vitals: Vitals


@dataclass
class TimedRank:
    """One worker's durations, and how many of them were reported."""

    vitals: Vitals
    counters: Reading
    """The CPU counters at the last report."""
    reported: dict[str, int] = field(default_factory=dict)
    """Count of each phase when its timings were last reported."""
    own_reported: dict[str, int] = field(default_factory=dict)
    """The same for the own work of phases."""

    def timings(self) -> tuple[Timing, ...]:
        """Return what its steps consisted of since the last call."""
        own, times = self.vitals.own_times(), self.vitals.times()
        fresh_own, fresh = _fresh(own, self.own_reported), _fresh(times, self.reported)
        counts = {
            name: fresh_own.get(name, 0) if name == BETWEEN else count
            for name, count in fresh.items()
            if name != "start" and (name in PHASES or OPTIMIZER not in times)
        }
        waiting = WAITING[self.vitals.waiting]
        found = []
        for name, count in counts.items():
            timed = fresh_own.get(name, 0) if name in own else count
            latest = (own if name in own else times)[name].latest_s[-timed:] if timed else ()
            if latest and count:
                median_s = statistics.median(latest)
                timing = Timing(
                    section=name,
                    count=count,
                    median_s=median_s,
                    total_s=median_s * count,
                    waits=name in waiting,
                )
                found.append(timing)
        return tuple(found)

    def shortage(self, counters: Reading) -> CpuShortage:
        """Return how long it had no CPU since the last call."""
        before, self.counters = self.counters, counters
        return contention.shortage(before, counters)


def _fresh(times: Mapping[str, Times], reported: dict[str, int]) -> dict[str, int]:
    """Return how many durations of each name are new, and count them as reported."""
    fresh = {name: one.count - reported.get(name, 0) for name, one in times.items()}
    reported.update({name: one.count for name, one in times.items()})
    return {name: count for name, count in fresh.items() if count > 0}


class StepTimings:
    """The durations of one round's workers on this node."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._ranks: dict[int, TimedRank] = {}
        """By process id."""

    def begin_round(self) -> None:
        self._ranks.clear()

    def read(self, processes: Iterable[TrainingProcess], now: float) -> tuple[RankTimings, ...]:
        """Return what the steps of warm ranks consisted of since the last call."""
        found = []
        for rank, pid, vitals in processes:
            counters = self._read(pid, now)
            timed = self._ranks.setdefault(pid, TimedRank(vitals, counters))
            timings = timed.timings()
            if not timings:
                continue  # It is in a long step, whose shortage is reported with it.
            shortage = timed.shortage(counters)
            if vitals.warm:
                found.append(RankTimings(rank=rank, timings=timings, shortage=shortage))
        return tuple(found)
