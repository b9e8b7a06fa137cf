"""Reports what the steps of this node's ranks consist of, for the straggler findings.

Each rank's vital signs hold the latest durations of its phases. A report has those since the last
report: how many, and their median; of a phase's own work where that is timed, which on a GPU happens
only now and then. The first few steps of a process are not reported: they take long for reasons of
their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.messages.timings import RankTimings, Timing
from holdfast.messages.units import Rank
from holdfast.shm.vital_signs import ALSO_IN_FORWARD, LEFT_OUT, WITH_GRADIENTS, Times, Vitals

WAITING = {
    LEFT_OUT: frozenset({"step", "between"}),
    WITH_GRADIENTS: frozenset({"step", "between", "backward", "optimizer"}),
    ALSO_IN_FORWARD: frozenset({"step", "between", "backward", "optimizer", "forward"}),
}
"""Phases whose durations may include waits for other ranks."""


class TrainingProcess(NamedTuple):
    """A worker that takes steps."""

    rank: Rank
    pid: int
    vitals: Vitals


@dataclass
class TimedRank:
    """One worker's durations, and how many of them were reported."""

    vitals: Vitals
    reported: dict[str, int] = field(default_factory=dict)
    """Count of each phase when its timings were last reported."""
    own_reported: dict[str, int] = field(default_factory=dict)
    """The same for the own work of phases."""

    def timings(self) -> tuple[Timing, ...]:
        """Return what its steps consisted of since the last call."""
        found = []
        own = self.vitals.own_times()
        fresh_own = _fresh(own, self.own_reported)
        times = self.vitals.times()
        waiting = WAITING[self.vitals.waiting]
        for name, count in _fresh(times, self.reported).items():
            latest = times[name].latest_s[-count:]
            if name in own:
                timed = fresh_own.get(name, 0)
                latest = own[name].latest_s[-timed:] if timed else ()
            if latest and name != "start":
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


def _fresh(times: Mapping[str, Times], reported: dict[str, int]) -> dict[str, int]:
    """Return how many durations of each name are new, and count them as reported."""
    fresh = {name: one.count - reported.get(name, 0) for name, one in times.items()}
    reported.update({name: one.count for name, one in times.items()})
    return {name: count for name, count in fresh.items() if count > 0}


class StepTimings:
    """The durations of one round's workers on this node."""

    def __init__(self) -> None:
        self._ranks: dict[int, TimedRank] = {}
        """By process id."""

    def begin_round(self) -> None:
        self._ranks.clear()

    def read(self, processes: Iterable[TrainingProcess]) -> tuple[RankTimings, ...]:
        """Return what the steps of warm ranks consisted of since the last call."""
        found = []
        for rank, pid, vitals in processes:
            timings = self._ranks.setdefault(pid, TimedRank(vitals)).timings()
            if timings and vitals.warm:
                found.append(RankTimings(rank=rank, timings=timings))
        return tuple(found)
