"""What `holdfast scale` is told."""

from __future__ import annotations

from typing import Any

from holdfast.coordinator.wishes import scale_line
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.messages.events import AnyEvent, JobOpened, NodeJoined, SupplierJoined
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.units import NodeId, Time
from holdfast.messages.wire import AskScale

NOW = Time(1000.0)


def opened(**terms: Any) -> Job:
    return jobs.opened(JobOpened(at=NOW, job="j", terms=Terms(**terms)))


def take(job: Job, event: AnyEvent) -> None:
    jobs.decide(job, event, NOW)


def asked(fewest: int, most: int, spares: int | None = None) -> AskScale:
    return AskScale(min_nodes=fewest, max_nodes=most, spares=spares)


def test_it_is_said_who_is_asked_for_what_is_missing() -> None:
    job = opened(min_nodes=1, max_nodes=2)
    by_hand = "nodes: from 1:2 to 4; no platform provides nodes for this job"
    assert scale_line(job, asked(4, 4)).startswith(by_hand)
    take(job, SupplierJoined(at=NOW, platform="slurm"))
    line = "nodes: from 1:2 to 2:4 and 1 spare; slurm is asked for what is missing"
    assert scale_line(job, asked(2, 4, 1)) == line
    spec = NodeSpec(host="h", address="127.0.0.1", slots=1, pid=1)
    take(job, NodeJoined(at=NOW, node=NodeId("a"), spec=spec, store_port=1))
    assert scale_line(job, asked(1, 1)) == "nodes: from 1:2 to 1"
