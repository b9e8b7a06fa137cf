"""How often what goes wrong.

Rates are per node and hour. `default` is a large cluster as operators have described theirs: a job on
16,384 GPUs (2,048 nodes of 8) is interrupted every 1.8 hours, so one node interrupts it every 3,700
hours; about half of that is software or single GPUs (a worker dies), the other half takes the node.
Broken streams, slow nodes and short pauses come on top and need not interrupt anything. `chaos` is no
cluster anybody has: it exists to find bugs in minutes of simulated time.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from holdfast.messages.units import Seconds

FaultName = Literal[
    "signal",
    "exception",
    "oom",
    "exit",
    "agent",
    "host",
    "switch",
    "pause",
    "cut",
    "reset",
    "slow",
    "flap",
    "leave",
    "exclude",
]


@dataclass(frozen=True)
class Schedule:
    """One fault schedule. Durations are (shortest, longest), drawn uniformly."""

    rates: dict[FaultName, float]
    """Per node and hour."""
    coordinator_crashes: float
    """Per hour."""
    crash_at_close: float
    """How likely the coordinator dies between writing the job's last event and acting on it."""
    bad_hosts: float
    """Share of hosts on which workers die again and again."""
    bad_host_rate: float
    """How often a bad host fails, per hour."""
    cascade: float
    """Share of worker deaths after which all other ranks fail in their collective too."""
    away_s: tuple[Seconds, Seconds]
    """How long a crashed host is away."""
    pause_s: tuple[Seconds, Seconds]
    cut_s: tuple[Seconds, Seconds]
    slow_s: tuple[Seconds, Seconds]
    down_s: tuple[Seconds, Seconds]
    """How long a crashed coordinator is away."""
    hiccups: float
    """Share of messages that are late by up to a second."""
    return_excluded: float
    """How likely an excluded host tries to come in again."""


BATCH_S: Seconds = 0.0005
"""How long arrivals gather before the coordinator takes them in together."""

PER_NODE_HOUR = 1.0 / (1.8 * 2048)

_DEFAULT = Schedule(
    rates={
        "signal": 0.22 * PER_NODE_HOUR,
        "exception": 0.20 * PER_NODE_HOUR,
        "oom": 0.03 * PER_NODE_HOUR,
        "exit": 0.05 * PER_NODE_HOUR,
        "agent": 0.05 * PER_NODE_HOUR,
        "host": 0.30 * PER_NODE_HOUR,
        "switch": 0.001 * PER_NODE_HOUR,
        "pause": 0.04 * PER_NODE_HOUR,
        "cut": 0.04 * PER_NODE_HOUR,
        "reset": 4.0 * PER_NODE_HOUR,
        "slow": 0.2 * PER_NODE_HOUR,
        "flap": 0.01 * PER_NODE_HOUR,
        "leave": 0.05 * PER_NODE_HOUR,
        "exclude": 0.01 * PER_NODE_HOUR,
    },
    coordinator_crashes=1 / 12,
    crash_at_close=0.0,
    bad_hosts=0.0001,
    bad_host_rate=0.2,
    cascade=0.05,
    away_s=(300.0, 7200.0),
    pause_s=(0.5, 120.0),
    cut_s=(0.5, 120.0),
    slow_s=(60.0, 1800.0),
    down_s=(0.5, 30.0),
    hiccups=0.0005,
    return_excluded=0.0,
)

_HEAVY = Schedule(
    rates={name: 10 * rate for name, rate in _DEFAULT.rates.items()},
    coordinator_crashes=2.0,
    crash_at_close=0.1,
    bad_hosts=0.001,
    bad_host_rate=1.0,
    cascade=0.2,
    away_s=(60.0, 1800.0),
    pause_s=(0.5, 120.0),
    cut_s=(0.5, 120.0),
    slow_s=(60.0, 1800.0),
    down_s=(0.5, 60.0),
    hiccups=0.002,
    return_excluded=0.2,
)

_NONE = Schedule(
    rates={},
    coordinator_crashes=0.0,
    crash_at_close=0.0,
    bad_hosts=0.0,
    bad_host_rate=0.0,
    cascade=0.0,
    away_s=(1.0, 1.0),
    pause_s=(1.0, 1.0),
    cut_s=(1.0, 1.0),
    slow_s=(1.0, 1.0),
    down_s=(1.0, 1.0),
    hiccups=0.0,
    return_excluded=0.0,
)

_CHAOS = Schedule(
    rates={
        "signal": 15.0,
        "exception": 6.0,
        "oom": 3.0,
        "exit": 3.0,
        "agent": 12.0,
        "host": 8.0,
        "switch": 3.0,
        "pause": 15.0,
        "cut": 15.0,
        "reset": 60.0,
        "slow": 10.0,
        "flap": 5.0,
        "leave": 6.0,
        "exclude": 1.5,
    },
    coordinator_crashes=60.0,
    crash_at_close=0.2,
    bad_hosts=0.05,
    bad_host_rate=60.0,
    cascade=0.5,
    away_s=(0.1, 20.0),
    pause_s=(0.05, 20.0),
    cut_s=(0.05, 20.0),
    slow_s=(1.0, 30.0),
    down_s=(0.01, 8.0),
    hiccups=0.02,
    return_excluded=0.7,
)

SCHEDULES: dict[str, Schedule] = {
    "default": _DEFAULT,
    "heavy": _HEAVY,
    "none": _NONE,
    "chaos": _CHAOS,
}


class Chance:
    """Every duration that is left to chance, from the run's one source of it."""

    def __init__(self, rng: Random, schedule: Schedule) -> None:
        self._rng = rng
        self._schedule = schedule

    def start_s(self, warm: bool) -> Seconds:
        """From the order until the scripts run: standbys are there, or not yet."""
        return self._rng.uniform(0.02, 0.12) if warm else self._rng.uniform(2.0, 9.0)

    def warm_up_s(self) -> Seconds:
        return self._rng.uniform(3.0, 10.0)

    def stop_s(self, grace_s: Seconds) -> tuple[Seconds, bool]:
        """How long workers take to end, and whether one took its time to end by itself."""
        draw = self._rng.random()
        if draw < 0.001:
            return grace_s, False
        if draw < 0.05:
            took_s = self._rng.uniform(0.1, 2.0)
            return min(took_s, grace_s), took_s < grace_s
        return self._rng.uniform(0.002, 0.05), False

    def batch_s(self) -> Seconds:
        """How long arrivals wait for the coordinator: it is quick, or has a bad moment."""
        if self._rng.random() < self._schedule.hiccups:
            return self._rng.uniform(0.01, 0.6)
        return BATCH_S

    def away_s(self) -> Seconds:
        return self._rng.uniform(*self._schedule.away_s)

    def coordinator_down_s(self) -> Seconds:
        return self._rng.uniform(*self._schedule.down_s)
