"""Gathers what a report of a job says, once, whatever it is written as.

Everything in it is bounded, so that the report of a job of thousands of ranks and weeks is a page too:
lanes are grouped, curves have a few hundred points, and of many incidents the newest are told in full.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from msgspec import Struct

from holdfast import __version__
from holdfast.config.values import Price
from holdfast.messages.losses import Loss
from holdfast.messages.records import Cause
from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport
from holdfast.messages.units import Seconds, Time
from holdfast.view.follower import Follower
from holdfast.view.history.checkpoints import SaveEntry
from holdfast.view.history.nodes import UsagePoint
from holdfast.view.history.timeline import RankBlock, ShownLane

MOST_LANES = 64
LANE_WIDTH = 320
"""Spans of one lane, at most."""
BUCKETS = 144
MOST_INCIDENTS = 100
"""Incidents that are told in full: the newest."""
MOST_NODES = 100
MOST_SAVES = 400
DETAIL_CHARS = 4000


class GoodputBucket(Struct, frozen=True):
    """What the ranks did in a part of the time."""

    begin: Time
    end: Time
    seconds: dict[Cause, Seconds]


class SpeedSample(Struct, frozen=True):
    at: Time
    step: int
    steps_per_s: float | None
    samples_per_s: float | None


class LossSample(Struct, frozen=True):
    at: Time
    step: int
    loss: Loss
    """A number, or "NaN", "Infinity" or "-Infinity"."""


class NodeLoad(NamedTuple):
    """How much of a node was in use, over time."""

    node: str
    points: list[tuple[float, UsagePoint]]


class JobReport(Struct, frozen=True, kw_only=True):
    """A job as a report tells it: what `holdfast report -o report.json` writes."""

    version: str
    """Version of Holdfast that made the report."""
    made_at: float
    """When the report was made, in seconds since 1970."""
    until: Time
    """Time up to which it tells: the job's end, or that of the report."""
    status: StatusReport
    goodput: GoodputReport
    price: Price | None
    """What a rank costs in an hour, and in which unit; null if it was not given."""
    incidents: list[IncidentReport]
    """The newest, oldest first; `incident_count` has all."""
    incident_count: int
    incident_kinds: dict[str, int]
    """All incidents by kind."""
    repaired: int
    """Faults that broke a round and were repaired."""
    recovery_s: float | None
    """Median time from a fault to the first step after it; null if nothing was repaired."""
    slowest_recovery_s: float | None
    goodput_over_time: list[GoodputBucket]
    timeline: list[ShownLane]
    rounds: list[tuple[float, int]]
    """When each round began, and its number; the newest few hundred."""
    saves: list[SaveEntry]
    speed: list[SpeedSample]
    loads: list[NodeLoad]
    losses: list[LossSample] = []
    """Losses that the script told, over time."""


def gather(follower: Follower, price: Price | None = None) -> JobReport:
    """Gather the report of a job as it is known now."""
    status, goodput = follower.status(), follower.goodput()
    history, opened = follower.history, status.opened_at
    until = Time(opened + status.wall_s)
    incidents = follower.incidents()
    took = sorted(i.lost_s for i in incidents if i.rung is not None and i.lost_s is not None)
    kinds: dict[str, int] = {}
    for incident in incidents:
        kinds[incident.kind] = kinds.get(incident.kind, 0) + 1
    return JobReport(
        version=__version__,
        made_at=time.time(),
        until=until,
        status=status,
        goodput=goodput,
        price=price,
        incidents=incidents[-MOST_INCIDENTS:],
        incident_count=len(incidents),
        incident_kinds=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        repaired=len(took),
        recovery_s=took[len(took) // 2] if took else None,
        slowest_recovery_s=took[-1] if took else None,
        goodput_over_time=_buckets(follower, opened, until),
        timeline=_lanes(follower, opened, until),
        rounds=[(float(at), int(number)) for at, number in history.rounds][-400:],
        saves=history.checkpoints.saves()[-MOST_SAVES:],
        speed=[
            SpeedSample(Time(at), one.step, one.steps_per_s, one.samples_per_s)
            for at, one in history.speed.points()
        ],
        loads=_loads(follower, status),
        losses=[LossSample(Time(at), one.step, one.value) for at, one in history.loss.points()],
    )


def _buckets(follower: Follower, opened: Time, until: Time) -> list[GoodputBucket]:
    if until <= opened:
        return []
    parts = follower.history.timeline.seconds(opened, until, BUCKETS, until)
    step = (until - opened) / BUCKETS
    return [
        GoodputBucket(Time(opened + i * step), Time(opened + (i + 1) * step), seconds)
        for i, seconds in enumerate(parts)
    ]


def _lanes(follower: Follower, opened: Time, until: Time) -> list[ShownLane]:
    timeline = follower.history.timeline
    ranks = timeline.ranks
    each = max(1, -(-ranks // MOST_LANES))
    blocks = [
        RankBlock(
            f"rank {first}" if each == 1 else f"ranks {first}–{min(first + each, ranks) - 1}",
            first,
            min(each, ranks - first),
        )
        for first in range(0, ranks, each)
    ]
    return timeline.lanes(opened, until, LANE_WIDTH, blocks, until)


def _loads(follower: Follower, status: StatusReport) -> list[NodeLoad]:
    series = follower.history.usage.nodes
    there = [node.node for node in status.nodes if node.node in series]
    chosen = there or list(series)
    return [NodeLoad(node, series[node].points()) for node in chosen[:MOST_NODES]]
