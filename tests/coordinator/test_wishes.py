"""What `holdfast scale` is told: why not, or what will come of it."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.wishes import refusal_of_scale, scale_line
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


@pytest.mark.parametrize(("fewest", "most"), [(0, 4), (5, 4), (0, 0)])
def test_impossible_numbers_are_refused(fewest: int, most: int) -> None:
    job = opened(min_nodes=1, max_nodes=2)
    assert f"{fewest}:{most}" in refusal_of_scale(job, asked(fewest, most))


def test_numbers_without_a_whole_unit_between_them_are_refused() -> None:
    job = opened(min_nodes=2, max_nodes=4, node_unit=2)
    assert "multiple of 2" in refusal_of_scale(job, asked(3, 3))
    assert refusal_of_scale(job, asked(3, 5)) == ""


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
