"""What the user reads of a job: phase, conditions, numbers, in the status of its resource.

All of it follows from three things: the spec, the coordinator's pod, and what the coordinator answers.
The operator also finds here what it has to know again after a restart: how often the job was resumed,
and with how many nodes it was last scaled.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.messages.endnote import EndNote
from holdfast.messages.exits import EXIT_TRY_AGAIN
from holdfast.messages.reports import StatusReport
from holdfast.messages.wire import StatusTold

Phase = Literal["Pending", "Running", "Suspending", "Suspended", "Succeeded", "Failed"]
ConditionType = Literal["Accepted", "CoordinatorReady", "NodesProvided", "Training", "Ended"]
TrueFalse = Literal["True", "False", "Unknown"]

SUSPENDED: Final = "suspended by spec.suspend"
"""Reason of the end of a job that was suspended."""
_TRAINING: Final = {
    "gathering": "the job waits for nodes",
    "running": "the job trains",
    "stopping": "a round has ended; the next one is being formed",
    "ending": "the job is ending",
    "ended": "the job has ended",
    "lost": "no process runs the job",
}


class JobCondition(Struct, frozen=True, kw_only=True, rename="camel"):
    """One aspect of a job, in the form that all of Kubernetes uses."""

    type: ConditionType
    """Aspect of the job."""
    status: TrueFalse
    """Whether it is so."""
    reason: str
    """Why, in one word."""
    message: str
    """Why, in one sentence, with what to do if something is wrong."""
    last_transition_time: str
    """When the status became so."""


class JobStatus(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Where a job stands, as the operator last saw it."""

    phase: Phase = "Pending"
    """Where the job stands, in one word."""
    conditions: tuple[JobCondition, ...] = ()
    """Aspects of the job, each with the reason."""
    nodes: int = 0
    """Nodes that are in the job."""
    round: int = 0
    """Number of the newest round."""
    step: int = 0
    """Highest step that was ever finished."""
    goodput: str = ""
    """Share of productive seconds, in percent."""
    last_incident: str = ""
    """The newest fault in one line."""
    exit_code: int | None = None
    """Exit code of the job: 0 finished, 1 failed, 75 try again, 93 do not."""
    reason: str = ""
    """Why the job ended."""
    requeues: int = 0
    """How often the job was resumed."""
    scale: str = ""
    """Numbers of nodes that the job has: MIN:MAX+SPARES."""
    selector: str = ""
    """Label selector of the job's worker pods."""
    observed_generation: int = 0
    """Generation of the spec that this is about."""
    warning: str = ""
    """What the operator left out of the spec, and why."""


def read_status(status: Any) -> JobStatus:
    """Read a status that an operator wrote, maybe one of another version."""
    try:
        return msgspec.convert(status or {}, JobStatus)
    except msgspec.ValidationError:
        return JobStatus()


def with_condition(
    status: JobStatus, type: ConditionType, is_so: bool | None, reason: str, message: str, now: str
) -> JobStatus:
    """Set a condition; its time stays while its status does. `is_so` is None if nobody knows."""
    word: TrueFalse = "Unknown" if is_so is None else "True" if is_so else "False"
    before = next((one for one in status.conditions if one.type == type), None)
    since = before.last_transition_time if before is not None and before.status == word else now
    made = JobCondition(
        type=type, status=word, reason=reason, message=message, last_transition_time=since
    )
    others = [one for one in status.conditions if one.type != type]
    order = list(ConditionType.__args__)  # type: ignore[attr-defined]
    return replace(
        status, conditions=tuple(sorted([*others, made], key=lambda one: order.index(one.type)))
    )


def condition(status: JobStatus, type: ConditionType) -> JobCondition | None:
    return next((one for one in status.conditions if one.type == type), None)


def of_running(status: JobStatus, told: StatusTold, suspends: bool, now: str) -> JobStatus:
    """The status of a job whose coordinator has answered."""
    job = told.status
    phase: Phase = "Running" if job.state in ("running", "stopping") else "Pending"
    if status.phase == "Running" and job.state == "gathering":
        phase = "Running"  # It trained before: nodes are missing for the moment.
    if suspends:
        phase = "Suspending"
    status = replace(
        status,
        phase=phase,
        nodes=len(job.nodes) if job.nodes else job.world_size,
        round=job.round,
        step=job.step,
        goodput=percent(told.goodput.goodput),
        last_incident=(job.last_incident or "")[:500],
        requeues=job.requeues,
        exit_code=None,
        reason="",
    )
    training = job.state == "running"
    word = job.state.capitalize()
    status = with_condition(status, "Training", training, word, _TRAINING[job.state], now)
    status = with_condition(status, "Ended", False, "Runs", "the job has not ended", now)
    return _provided(status, job, now)


def _provided(status: JobStatus, job: StatusReport, now: str) -> JobStatus:
    """Say whether all nodes that are wanted are there, and if not, why."""
    supply = job.supply
    if supply is None:
        return status
    running = supply.counts.get("running", 0)
    message = f"{running} of {supply.wanted} nodes run"
    if supply.refusal:
        return with_condition(
            status, "NodesProvided", False, "Refused", f"{message}: {supply.refusal}", now
        )
    for given_up in supply.given_up.values():
        return with_condition(
            status, "NodesProvided", False, "GivenUp", f"{message}: {given_up}", now
        )
    waits = next((one for one in supply.positions if one.status != "running" and one.detail), None)
    if waits is not None:
        message += f"; request {waits.request} is {waits.status}: {waits.detail}"
    complete = running >= supply.wanted
    reason = "Complete" if complete else "Missing"
    return with_condition(status, "NodesProvided", complete, reason, message, now)


def of_ended(status: JobStatus, end: EndNote, suspends: bool, now: str) -> JobStatus:
    """The status of a job whose coordinator has written how it ended."""
    phase: Phase = "Succeeded" if end.code == 0 else "Failed"
    if end.code == EXIT_TRY_AGAIN and suspends:
        phase = "Suspended"
    status = replace(
        status,
        phase=phase,
        nodes=0,
        round=end.round,
        step=end.step,
        goodput=percent(end.goodput),
        last_incident=end.last_incident[:500],
        exit_code=end.code,
        reason=end.reason,
        requeues=end.requeues,
    )
    status = with_condition(status, "Training", False, "Ended", "the job has ended", now)
    status = with_condition(status, "CoordinatorReady", False, "Ended", "the job has ended", now)
    status = with_condition(status, "NodesProvided", False, "Ended", "the job has ended", now)
    if phase == "Suspended":
        message = "the job stands still; it goes on when spec.suspend is false"
        return with_condition(status, "Ended", False, "Suspended", message, now)
    return with_condition(status, "Ended", True, _word(end.code), _sentence(end), now)


def _word(code: int) -> str:
    return {0: "Finished", 75: "TryAgain", 93: "WouldFailAgain"}.get(code, "Failed")


def _sentence(end: EndNote) -> str:
    said = f"exit code {end.code}: {end.reason}"
    if end.code == EXIT_TRY_AGAIN:
        return f"{said}; set spec.suspend to true and then to false to go on with it"
    return said


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def to_json(status: JobStatus) -> dict[str, Any]:
    """A status as a merge patch writes it: what is at its default is removed."""
    full = msgspec.to_builtins(status)
    names = [one.encode_name for one in msgspec.structs.fields(JobStatus)]
    return {name: full.get(name) for name in names}
