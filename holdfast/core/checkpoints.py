"""What agents tell about snapshots and checkpoints, and what scripts ask about them.

`commits` decides; here its word meets the rest of the job: open requests, incidents, and the end,
which waits until the last checkpoint is written.
"""

from __future__ import annotations

from holdfast.core.commits import restoring
from holdfast.core.commits import rules as commits
from holdfast.core.commits.state import Taken
from holdfast.core.repair import finish_job, reach
from holdfast.core.requests import desk as requests
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction
from holdfast.messages.checkpoints import SnapshotId
from holdfast.messages.events import (
    Asked,
    CheckpointWritten,
    ImagesHeld,
    ShardsWritten,
    SnapshotMissed,
    SnapshotsSealed,
    StoredFound,
)
from holdfast.messages.exits import EXIT_FAILED
from holdfast.messages.records import Incident
from holdfast.messages.requests import AwaitSave, FindState
from holdfast.messages.units import NodeId, Rank, Time

ESCALATES_AFTER = 3
"""So many checkpoints in a row that could not be written are told with more emphasis."""


def on_sealed(job: Job, event: SnapshotsSealed, now: Time) -> list[AnyAction]:
    if not job.membership.has(event.node) or event.snapshot.round > job.membership.round:
        return []
    actions = take_in(job, commits.sealed(job.commits, event), now)
    if job.membership.world is None or (job.ended is not None and job.ended.code != 0):
        actions += commits.secure(job.commits)  # It was sealed just when the round broke.
    return actions


def on_missed(job: Job, event: SnapshotMissed, now: Time) -> list[AnyAction]:
    if not job.membership.has(event.node) or event.snapshot.round != job.membership.round:
        return []
    return take_in(job, commits.missed(job.commits, event), now)


def on_held(job: Job, event: ImagesHeld, now: Time) -> list[AnyAction]:
    if not job.membership.has(event.node):
        return []
    actions = take_in(job, commits.held(job.commits, event), now)
    if any(image.snapshot.round < job.membership.round for image in event.images):
        actions += commits.secure(job.commits)  # Back with its images, after the round broke.
    return actions


def on_shards_written(job: Job, event: ShardsWritten, now: Time) -> list[AnyAction]:
    return take_in(job, commits.shards_written(job.commits, event), now)


def on_checkpoint_written(job: Job, event: CheckpointWritten, now: Time) -> list[AnyAction]:
    return take_in(job, commits.checkpoint_written(job.commits, event), now)


def on_stored_found(job: Job, event: StoredFound, now: Time) -> list[AnyAction]:
    if event.round == job.membership.round:
        restoring.stored_found(job.commits, event)
    return []


def on_state_asked(job: Job, event: Asked, now: Time) -> list[AnyAction]:
    """A script wants to restore, or to know how a save went."""
    asker, before = requests.hold(job.desk, event, now)
    if asker is None:
        return [*before]
    request = event.request
    commits.forget(job.commits, asker)
    if isinstance(request, AwaitSave):
        settled = commits.await_save(job.commits, asker, request, event.round)
        known = [(asker, settled)] if settled is not None else _given_up(job).answers
        return [*requests.answer(job.desk, known), *requests.times_up(job.desk, now)]
    assert isinstance(request, FindState)
    taken = restoring.find(job.commits, event.rank, asker, request, _present(job), reach(job))
    return take_in(job, taken, now)


def _present(job: Job) -> dict[Rank, NodeId]:
    return {rank: state.node for rank, state in job.ranks.items() if not state.finished}


def take_in(job: Job, taken: Taken, now: Time) -> list[AnyAction]:
    """Do what comes of an event for the rest of the job."""
    actions = [*taken.actions, *requests.answer(job.desk, taken.answers)]
    for snapshot, error in taken.failed:
        _tell_failure(job, snapshot, error, now)
    # Or a node was lost while the last checkpoint was written: then there is another round.
    through = job.membership.world is not None and job.to_finish == 0
    through = through and taken.lost not in job.membership.placed
    if job.last_write is not None and through and job.ended is None:
        actions += finish(job, now)
    return actions


def on_rank_ended(job: Job, now: Time) -> list[AnyAction]:
    """A rank ended with 0: nobody who restores waits for it, nor for what it has not saved."""
    restored = restoring.rank_ended(job.commits, _present(job), reach(job))
    return [*take_in(job, restored, now), *take_in(job, _given_up(job), now)]


def _given_up(job: Job) -> Taken:
    """What is in vain to wait for, because all ranks of a node have ended without it. Where only some
    have, the node's agent tells."""
    if not commits.waited_for(job.commits) or job.to_finish == len(job.ranks):
        return Taken()
    present = set(_present(job).values())
    silent = [rank for rank, state in job.ranks.items() if state.node not in present]
    return commits.given_up(job.commits, silent)


def finish(job: Job, now: Time) -> list[AnyAction]:
    """All ranks ended with 0: so does the job, once its last checkpoint is written or has failed."""
    job.last_write = commits.unwritten(job.commits)
    if commits.busy(job.commits):
        return []
    if job.last_write:
        reason = f"finished, but the last checkpoint could not be written: {job.last_write}"
        return finish_job(job, EXIT_FAILED, reason, now, secure=False)
    return finish_job(job, 0, "finished", now)


def _tell_failure(job: Job, snapshot: SnapshotId, error: str, now: Time) -> None:
    """A checkpoint that could not be written breaks no round, but nobody shall miss it."""
    failures = job.commits.book(snapshot.checkpointer).failures
    action = "training goes on; the next save tries again"
    if failures >= ESCALATES_AFTER:
        action = f"{failures} saves in a row could not be written; training goes on without them"
    job.incidents.append(
        Incident(
            id=len(job.incidents) + 1,
            kind="storage",
            node=NodeId(""),
            rank=None,
            round=snapshot.round,
            step=snapshot.step,
            signature=f"step {snapshot.step} was not written to storage",
            detail=error,
            action=action,
            fault_at=now,
            opened_at=now,
            closed_at=now,
        )
    )
