"""Fault rates for the simulator.

Rates are per node and hour. `default` is a large cluster as operators have described theirs: a job on
16,384 GPUs (2,048 nodes of 8) is interrupted every 1.8 hours, so one node interrupts it every 3,700
hours; about half of that is software or single GPUs (a worker dies), the other half takes the node.
Broken streams, slow nodes and short pauses come on top and need not interrupt anything. `chaos` is no
cluster anybody has: it exists to find bugs in minutes of simulated time. In `faulty-node` one host ends
its ranks every minute, and the others fail as in a cluster that has seen better days. `data` kills
workers, agents and coordinators so often that worlds of all sizes follow each other. `inprocess` is for
restartable functions: they raise, ranks die and hang, and more goes wrong while the others leave. What
platforms do (`supply_rates` and below) only matters for jobs whose nodes a simulated platform provides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from holdfast.messages.units import Seconds


@dataclass(frozen=True)
class Schedule:
    """One fault schedule. Durations are (shortest, longest), drawn uniformly."""

    rates: dict[str, float]
    """Per node and hour, by the name of the fault."""
    coordinator_crashes: float = 0.0
    """Per hour."""
    handler_errors: float = 0.0
    """Share of events whose handler in the core raises."""
    crash_at_close: float = 0.0
    """How likely the coordinator dies between writing the job's last event and acting on it."""
    bad_hosts: float = 0.0
    """Share of hosts on which workers die again and again."""
    surely_bad: int = 0
    """Hosts, the first ones, that are bad in any case."""
    bad_host_rate: float = 0.0
    """How often a bad host fails, per hour."""
    unfit_hosts: float = 0.0
    """Share of hosts that fail every node check."""
    seal_failures: float = 0.0
    """Share of images that cannot be sealed."""
    skipped_saves: float = 0.0
    """Share of saves of which one rank has no image."""
    cascade: float = 0.0
    """Share of worker deaths after which all other ranks fail in their collective too."""
    exit_hangs: float = 0.0
    """Share of ranks whose process hangs after its script has ended."""
    bad_departures: float = 0.0
    """Share of ranks that do not leave their restartable function as they should."""
    departing_faults: float = 0.0
    """How likely something else happens to a node while a rank leaves its function."""
    away_s: tuple[Seconds, Seconds] = (1.0, 1.0)
    """How long a crashed host is away."""
    pause_s: tuple[Seconds, Seconds] = (1.0, 1.0)
    cut_s: tuple[Seconds, Seconds] = (1.0, 1.0)
    slow_s: tuple[Seconds, Seconds] = (1.0, 1.0)
    down_s: tuple[Seconds, Seconds] = (1.0, 1.0)
    """How long a crashed coordinator is away."""
    hiccups: float = 0.0
    """Share of messages that are late by up to a second."""
    return_excluded: float = 0.0
    """How likely an excluded host tries to come in again."""
    supply_rates: dict[str, float] = field(default_factory=dict)
    """Of a platform and its nodes, per wanted node and hour, by the name of the fault."""
    pending_s: tuple[Seconds, Seconds] = (0.5, 3.0)
    """How long a request is pending before its node runs."""
    lost_news: float = 0.0
    """Share of changes of which a platform says nothing; a list shows them later."""
    late_news: float = 0.0
    """Share of a supplier's messages that take up to 5 s."""
    doubled_news: float = 0.0
    """Share of a supplier's messages that come twice."""

    def times(self, factor: float) -> Schedule:
        """Return a schedule in which nodes and their platform fail so many times as often; 0: never."""
        return replace(
            self,
            rates=_multiplied(self.rates, factor),
            supply_rates=_multiplied(self.supply_rates, factor),
        )


def _multiplied(rates: dict[str, float], factor: float) -> dict[str, float]:
    return {name: factor * rate for name, rate in rates.items()} if factor else {}


_BAD_DEPARTURES: tuple[Literal["slowly", "late", "dies", "unfit", "never"], ...] = (
    *("slowly", "slowly", "late", "dies", "unfit", "never"),
)

BATCH_S: Seconds = 0.0005
"""How long arrivals gather before the coordinator takes them in together."""

PER_NODE_HOUR = 1.0 / (1.8 * 2048)
_SHARES = (
    *(("signal", 0.22), ("exception", 0.20), ("oom", 0.03), ("exit", 0.05), ("agent", 0.05)),
    *(("host", 0.30), ("switch", 0.001), ("pause", 0.04), ("cut", 0.04), ("reset", 4.0)),
    *(("slow", 0.2), ("flap", 0.01), ("leave", 0.05), ("exclude", 0.01)),
)

_SUPPLY_SHARES = (
    *(("node_preempted", 0.2), ("node_evicted", 0.1), ("node_oom", 0.03), ("node_broken", 0.1)),
    *(("node_deleted", 0.02), ("mass", 0.001), ("lie", 0.05), ("outage", 0.01), ("supplier", 0.01)),
)

_DEFAULT = Schedule(
    rates={name: share * PER_NODE_HOUR for name, share in _SHARES},
    supply_rates={name: share * PER_NODE_HOUR for name, share in _SUPPLY_SHARES},
    pending_s=(20.0, 180.0),
    lost_news=0.001,
    late_news=0.01,
    coordinator_crashes=1 / 12,
    bad_hosts=0.0001,
    bad_host_rate=0.2,
    cascade=0.05,
    away_s=(300.0, 7200.0),
    pause_s=(0.5, 120.0),
    cut_s=(0.5, 120.0),
    slow_s=(60.0, 1800.0),
    down_s=(0.5, 30.0),
    hiccups=0.0005,
)

_HEAVY = replace(
    _DEFAULT.times(10),
    coordinator_crashes=2.0,
    crash_at_close=0.1,
    bad_hosts=0.001,
    bad_host_rate=1.0,
    cascade=0.2,
    away_s=(60.0, 1800.0),
    down_s=(0.5, 60.0),
    hiccups=0.002,
    return_excluded=0.2,
)

_CHAOS_RATES = (
    *(("signal", 15.0), ("exception", 6.0), ("oom", 3.0), ("exit", 3.0), ("agent", 12.0)),
    *(("host", 8.0), ("switch", 3.0), ("pause", 15.0), ("cut", 15.0), ("reset", 60.0)),
    *(("slow", 10.0), ("flap", 5.0), ("leave", 6.0), ("exclude", 1.5), ("hang", 10.0)),
    *(("keeper", 10.0), ("disk", 6.0), ("bitflip", 6.0), ("health", 4.0), ("inject", 15.0)),
    *(("why", 5.0), ("decide", 5.0), ("isolate", 1.0), ("stand", 2.0), ("clone", 4.0)),
)

_CHAOS_SUPPLY = (
    *(("node_preempted", 6.0), ("node_evicted", 8.0), ("node_oom", 3.0), ("node_broken", 3.0)),
    *(("node_deleted", 6.0), ("mass", 3.0), ("lie", 6.0), ("outage", 4.0), ("supplier", 8.0)),
    *(("supplier_stream", 10.0), ("scale", 3.0), ("requeue", 0.7)),
)

_CHAOS = Schedule(
    rates=dict(_CHAOS_RATES),
    supply_rates=dict(_CHAOS_SUPPLY),
    pending_s=(0.1, 15.0),
    lost_news=0.2,
    late_news=0.1,
    doubled_news=0.1,
    coordinator_crashes=60.0,
    handler_errors=0.001,
    crash_at_close=0.2,
    bad_hosts=0.05,
    bad_host_rate=60.0,
    unfit_hosts=0.05,
    seal_failures=0.01,
    skipped_saves=0.05,
    cascade=0.5,
    exit_hangs=0.1,
    bad_departures=0.1,
    departing_faults=0.05,
    away_s=(0.1, 20.0),
    pause_s=(0.05, 20.0),
    cut_s=(0.05, 20.0),
    slow_s=(1.0, 30.0),
    down_s=(0.01, 8.0),
    hiccups=0.02,
    return_excluded=0.7,
)

_FAULTY_NODE = replace(
    _DEFAULT,
    rates={name: 30 * rate for name, rate in _DEFAULT.rates.items() if name != "exclude"},
    coordinator_crashes=2.0,
    bad_hosts=0.0,
    surely_bad=1,
    bad_host_rate=60.0,
    away_s=(10.0, 60.0),
)

_PARTITIONS = Schedule(
    rates={
        **{"cut": 30.0, "switch": 3.0, "isolate": 2.0, "reset": 60.0, "pause": 10.0, "stand": 5.0},
        **{"flap": 5.0, "agent": 5.0, "host": 3.0, "clone": 10.0, "signal": 2.0},
    },
    coordinator_crashes=30.0,
    away_s=(0.1, 60.0),
    pause_s=(0.05, 20.0),
    cut_s=(0.05, 40.0),
    down_s=(0.01, 20.0),
    hiccups=0.02,
)

_DATA = Schedule(
    rates={
        **{"signal": 60.0, "agent": 30.0, "host": 15.0, "leave": 15.0, "exception": 10.0},
        **{"reset": 60.0, "cut": 10.0, "pause": 10.0, "keeper": 10.0},
    },
    coordinator_crashes=60.0,
    cascade=0.5,
    away_s=(0.1, 40.0),
    pause_s=(0.05, 10.0),
    cut_s=(0.05, 10.0),
    down_s=(0.01, 5.0),
    hiccups=0.02,
)

_INPROCESS = Schedule(
    rates={
        **{
            "exception": 60.0,
            "signal": 40.0,
            "oom": 5.0,
            "exit": 5.0,
            "hang": 20.0,
            "parked": 20.0,
        },
        **{"agent": 15.0, "host": 8.0, "leave": 8.0, "reset": 60.0, "cut": 15.0, "pause": 15.0},
        **{"flap": 5.0, "keeper": 5.0, "stand": 2.0},
    },
    coordinator_crashes=60.0,
    handler_errors=0.001,
    cascade=0.5,
    exit_hangs=0.1,
    bad_departures=0.2,
    departing_faults=0.1,
    away_s=(0.1, 20.0),
    pause_s=(0.05, 10.0),
    cut_s=(0.05, 10.0),
    down_s=(0.01, 5.0),
    hiccups=0.02,
)

SCHEDULES: dict[str, Schedule] = {
    "default": _DEFAULT,
    "heavy": _HEAVY,
    "none": Schedule(rates={}),
    "chaos": _CHAOS,
    "partitions": _PARTITIONS,
    "faulty-node": _FAULTY_NODE,
    "data": _DATA,
    "inprocess": _INPROCESS,
}


@dataclass(frozen=True)
class SimDeparture:
    """How a process leaves its restartable function."""

    how: Literal["at once", "slowly", "late", "dies", "unfit", "never"]
    """`late`: at the end of an atomic section; `unfit`: a hook raises then, and its process ends."""
    took_s: Seconds
    raises: bool
    """Whether the function raises because its process groups are aborted."""


class Chance:
    """Draws every random duration, from the run's one source of randomness."""

    def __init__(self, rng: Random, schedule: Schedule) -> None:
        self._rng = rng
        self._schedule = schedule

    def start_s(self, warm: bool) -> Seconds:
        """Draw the time from the order until the scripts run: standbys are there, or not yet."""
        return self._rng.uniform(0.02, 0.12) if warm else self._rng.uniform(2.0, 9.0)

    def warm_up_s(self) -> Seconds:
        return self._rng.uniform(3.0, 10.0)

    def stop_s(self, grace_s: Seconds = float("inf")) -> tuple[Seconds, bool]:
        """Draw how long workers take to end, and whether one took its time to end by itself."""
        draw = self._rng.random()
        if draw < 0.001:
            return grace_s, False
        if draw < 0.05:
            took_s = self._rng.uniform(0.1, 2.0)
            return min(took_s, grace_s), took_s < grace_s
        return self._rng.uniform(0.002, 0.05), False

    def departure(self) -> SimDeparture:
        """Draw how a process leaves its function."""
        raises = self._rng.random() < 0.3
        if self._rng.random() >= self._schedule.bad_departures:
            return SimDeparture("at once", self._rng.uniform(0.002, 0.05), raises)
        how = self._rng.choice(_BAD_DEPARTURES)
        return SimDeparture(how, self._rng.uniform(0.01, 1.5 if how == "slowly" else 0.5), raises)

    def batch_s(self) -> Seconds:
        """Draw how long arrivals wait for the coordinator: it is quick, or has a bad moment."""
        if self._rng.random() < self._schedule.hiccups:
            return self._rng.uniform(0.01, 0.6)
        return BATCH_S

    def away_s(self) -> Seconds:
        return self._rng.uniform(*self._schedule.away_s)

    def coordinator_down_s(self) -> Seconds:
        return self._rng.uniform(*self._schedule.down_s)

    def seal_fails(self) -> bool:
        return self._rng.random() < self._schedule.seal_failures
