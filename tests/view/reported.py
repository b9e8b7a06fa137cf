"""Reports for tests to change."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.core import job as jobs
from holdfast.core import report
from holdfast.messages.events import JobOpened, NodeJoined
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.reports import IncidentReport, StatusReport
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time


def of_two_ranks() -> StatusReport:
    """The status of a job of two ranks on one node."""
    now = Time(1000.0)
    job = jobs.opened(JobOpened(at=now, job="j", terms=Terms()))
    spec = NodeSpec(host="h", address="10.0.0.1", slots=2, pid=1)
    jobs.handle(job, NodeJoined(at=now, node=NodeId("h:1"), spec=spec, store_port=1), now)
    return report.status(job, now, alive=True)


def an_incident(**changes: Any) -> IncidentReport:
    incident = IncidentReport(
        id=1,
        kind="exception",
        node=NodeId("n"),
        rank=Rank(0),
        round=RoundNumber(1),
        step=StepNumber(4),
        at=Time(1000.0),
        signature="ValueError: x",
        action="",
        phases={},
        lost_s=None,
        lost_steps=0,
        also=[],
        detail="",
        rung=None,
        cause="7",
        injected=None,
        line="rank 0 raised ValueError: x",
    )
    return replace(incident, **changes)
