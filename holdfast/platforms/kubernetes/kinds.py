"""The kinds of resources that describe a job: ours, and DLRover's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.errors import UsageError
from holdfast.platforms.kubernetes import crd, dlrover
from holdfast.platforms.kubernetes.dlrover import PlannedNodes
from holdfast.platforms.kubernetes.objects import Owner
from holdfast.platforms.kubernetes.spec import JobSpec, Json, read_spec
from holdfast.platforms.kubernetes.status import JobStatus, read_status, to_json

Body = Mapping[str, Any]


class ResourceKind(NamedTuple):
    """How the jobs of one kind of resource are read and written."""

    group: str
    version: str
    plural: str
    read: Callable[[Body], tuple[JobSpec, tuple[str, ...]]]
    """Read a spec, with one sentence for each thing that was left out; or raise UsageError."""
    recall: Callable[[Any], JobStatus]
    """Read a status that an operator wrote before."""
    write: Callable[[JobStatus], Json]
    """Lay out a status as the resource has it."""

    def path(self, owner: Owner) -> str:
        return owner.path_in(f"{self.group}/{self.version}", self.plural, owner.name)


def _read(body: Body) -> tuple[JobSpec, tuple[str, ...]]:
    return read_spec(body["metadata"]["name"], dict(body.get("spec") or {})), ()


HOLDFAST = ResourceKind(crd.GROUP, crd.VERSION, crd.PLURAL, _read, read_status, to_json)


class ElasticJobs:
    """DLRover's jobs, each with the newest plan that somebody made for it."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, str], dict[str, tuple[str, PlannedNodes]]] = {}
        """By namespace and job, the plans by their uids, each with the time of its creation."""
        self.kind = ResourceKind(
            dlrover.GROUP, dlrover.VERSION, dlrover.JOBS, self._read, _recall, dlrover.job_status
        )

    def plan_seen(self, body: Body, gone: bool) -> PlannedNodes:
        """Take in a ScalePlan."""
        meta = body["metadata"]
        plan = dlrover.convert_plan(body.get("spec") or {})
        plans = self._plans.setdefault((meta["namespace"], plan.job), {})
        plans.pop(meta["uid"], None)
        if not gone:
            plans[meta["uid"]] = str(meta.get("creationTimestamp", "")), plan
        return plan

    def _read(self, body: Body) -> tuple[JobSpec, tuple[str, ...]]:
        meta = body["metadata"]
        converted = dlrover.convert_job(body.get("spec") or {})
        plans = self._plans.get((meta["namespace"], meta["name"]), {}).values()
        newest = max(plans, key=lambda one: one[0], default=(None, None))[1]
        spec = dlrover.with_plan(converted.spec, newest)
        try:
            return read_spec(meta["name"], spec), converted.warnings
        except UsageError as error:
            raise UsageError(f"as a HoldfastJob, it is refused: {error}") from None


def _recall(status: Any) -> JobStatus:
    """What is left of our status in theirs: the phase."""
    return read_status({"phase": (status or {}).get("phase", "Pending")})
