"""The machine that joins the others: one job, from its first event to its last.

`handle` takes an event and the time and returns actions. It is the only place where membership,
recovery and the ledger meet:

    a worker dies ──▶ the incident opens, the world is dissolved, every node is told to stop
    every node is ready ──▶ all deaths of the round are known: the culprit is judged
                            ├── try again: the next round is frozen, every node gets its part
                            └── give up: every node is told to finish
    every rank has finished a step ──▶ the incident closes

Judging waits until all nodes are ready, because only then is it known who died first, and it costs
nothing: whatever the verdict, the workers had to be stopped before.

The job ends when all ranks ended with 0, when recovery gives up, or when too many nodes were told to
leave; then each node is told to finish, and with the last one gone the job is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core import drills
from holdfast.core.chaos import plans as chaos
from holdfast.core.checkpoints import (
    on_checkpoint_written,
    on_held,
    on_missed,
    on_sealed,
    on_shards_written,
    on_stored_found,
)
from holdfast.core.commits import rules as commits
from holdfast.core.drills import on_fault_asked, on_fault_told
from holdfast.core.fitness import on_health, on_tested
from holdfast.core.hangs import rules as hangs
from holdfast.core.ledger import books
from holdfast.core.membership import rounds
from holdfast.core.nodecheck import schedule as checking
from holdfast.core.nodes import (
    on_joined,
    on_leaving,
    on_left,
    on_ready,
    on_restarted,
    on_resumed,
    on_stream_ended,
    on_tick,
    on_warm,
)
from holdfast.core.recovery import rules as faults
from holdfast.core.requests import desk as requests
from holdfast.core.requests.desk import Desk
from holdfast.core.scripts import attendance, on_asked, on_exclude_asked, on_stop_asked
from holdfast.core.standstill import on_stalled, on_verdict
from holdfast.core.state import Job, opened
from holdfast.core.stragglers import windows as stragglers
from holdfast.core.workers import on_exited, on_progress, on_started
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import (
    AnyEvent,
    Asked,
    CheckpointWritten,
    CoordinatorRestarted,
    ExcludeAsked,
    FaultAsked,
    FaultTold,
    HealthFound,
    ImagesHeld,
    JobOpened,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    NodeTested,
    NodeWarm,
    Progress,
    RanksStalled,
    ShardsWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StopAsked,
    StoredFound,
    StreamEnded,
    Tick,
    VerdictReached,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.units import Time

__all__ = ["Job", "deadline", "handle", "opened", "validate"]


def handle(job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
    """Take one event in; the actions are to be carried out in their order."""
    job.ledger.now = now
    try:
        actions = _HANDLERS[type(event)](job, event, now)
        return actions + drills.after(job, event) if job.chaos.plans else actions
    finally:
        job.ledger.now = None


def deadline(job: Job) -> Time | None:
    """When the job next wants a Tick."""
    m = job.membership
    deadlines = [job.absent_until, m.closes_at, job.short_until, job.desk.until, job.checking.until]
    if m.busy and job.ended is None:
        deadlines.append(m.patient_until)
    return min((at for at in deadlines if at is not None), default=None)


def _on_opened_again(job: Job, event: JobOpened, now: Time) -> list[AnyAction]:
    return []


_HANDLERS: dict[type, Callable[[Job, Any, Time], list[AnyAction]]] = {
    JobOpened: _on_opened_again,
    NodeJoined: on_joined,
    NodeWarm: on_warm,
    NodeReady: on_ready,
    ExcludeAsked: on_exclude_asked,
    StopAsked: on_stop_asked,
    Asked: on_asked,
    NodeLeaving: on_leaving,
    NodeLeft: on_left,
    StreamEnded: on_stream_ended,
    NodeResumed: on_resumed,
    CoordinatorRestarted: on_restarted,
    WorkerStarted: on_started,
    WorkerExited: on_exited,
    Progress: on_progress,
    SnapshotsSealed: on_sealed,
    ImagesHeld: on_held,
    ShardsWritten: on_shards_written,
    CheckpointWritten: on_checkpoint_written,
    StoredFound: on_stored_found,
    SnapshotMissed: on_missed,
    RanksStalled: on_stalled,
    VerdictReached: on_verdict,
    FaultAsked: on_fault_asked,
    FaultTold: on_fault_told,
    NodeTested: on_tested,
    HealthFound: on_health,
    Tick: on_tick,
}


def validate(job: Job) -> None:
    """Every invariant of the job and of the machines in it."""
    rounds.validate(job.membership)
    faults.validate(job.recovery)
    books.validate(job.ledger)
    requests.validate(job.desk, attendance(job))
    commits.validate(job.commits)
    hangs.validate(job.hangs)
    chaos.validate(job.chaos)
    checking.validate(job.checking, job.membership)
    stragglers.validate(job.stragglers)
    ranks = job.ranks.values()
    assert job.to_start == sum(not r.started for r in ranks), "miscounted starts"
    assert job.to_step == sum(not r.stepped for r in ranks), "miscounted steps"
    assert job.to_finish == sum(not r.finished for r in ranks), "miscounted ends"
    assert (job.fault is None) or job.membership.world is None, "a broken world is in force"
    assert [i.id for i in job.incidents] == list(range(1, len(job.incidents) + 1))
    assert sum(i.closed_at is None for i in job.incidents) <= 1, "two incidents are open"
    if job.membership.world is None or job.ended is not None:
        assert job.desk == Desk(), "what a round shared outlived it"
    if job.membership.world is not None:
        assert len(job.ranks) == job.membership.world.size, "ranks beside the world"
