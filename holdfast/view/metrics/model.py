"""Defines what a metric is, apart from any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport
from holdfast.view.follower import Follower

BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Buckets of the time from a fault to the first step after it."""

Kind = Literal["gauge", "counter", "histogram", "info"]
Unit = Literal["", "seconds", "bytes", "ratio"]
Labels = tuple[tuple[str, str], ...]


class MetricValue(NamedTuple):
    """One value of a metric."""

    labels: Labels
    value: float


class Distribution(NamedTuple):
    """The values of a histogram."""

    labels: Labels
    counts: tuple[int, ...]
    """In each bucket of `BOUNDS`, and beyond; not cumulated."""
    total: float


class Family(NamedTuple):
    """A metric with all its values."""

    name: str
    """Without the suffix that its kind asks for."""
    kind: Kind
    help: str
    unit: Unit
    samples: Sequence[MetricValue]
    distributions: Sequence[Distribution] = ()


class Facts(NamedTuple):
    """What all metrics of one job are made of."""

    follower: Follower
    status: StatusReport
    goodput: GoodputReport
    incidents: Sequence[IncidentReport]
    now: float


Values = Callable[[Facts], Iterable[tuple[dict[str, str], float | None]]]


class Metric(NamedTuple):
    """The definition of a metric."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    values: Values
    labels: tuple[str, ...] = ()
    """Besides that of the job."""
