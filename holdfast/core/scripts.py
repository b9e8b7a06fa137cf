"""What scripts ask for: a store, barriers and votes, and to part with their node or the job."""

from __future__ import annotations

from holdfast.core.checkpoints import on_state_asked
from holdfast.core.repair import finish_job, send_off
from holdfast.core.requests import desk as requests
from holdfast.core.requests.barriers import Attendance
from holdfast.core.slowness import on_stragglers_asked
from holdfast.core.state import Job, rank_in_force
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import Asked, ExcludeAsked, StopAsked
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.requests import AwaitSave, AwaitStragglers, FindState
from holdfast.messages.units import Time


def on_asked(job: Job, event: Asked, now: Time) -> list[AnyAction]:
    rank = rank_in_force(job, event.node, event.round, event.rank)
    if job.ended is not None or job.membership.world is None or rank is None or rank.finished:
        why = f"rank {event.rank} of round {event.round} is not in force"
        return [requests.fenced(event, f"{why} (the job is in round {job.membership.round})")]
    if isinstance(event.request, FindState | AwaitSave):
        return on_state_asked(job, event, now)
    if isinstance(event.request, AwaitStragglers):
        return on_stragglers_asked(job, event, now)
    return [*requests.take(job.desk, event, attendance(job), now)]


def attendance(job: Job) -> Attendance:
    return Attendance(present=job.to_finish, ended=len(job.ranks) - job.to_finish)


def on_exclude_asked(job: Job, event: ExcludeAsked, now: Time) -> list[AnyAction]:
    if job.ended is not None or rank_in_force(job, event.node, event.round, event.rank) is None:
        return []
    candidate = job.membership.placed.get(event.node)
    if candidate is None:
        return []
    job.excluded[candidate.spec.host] = event.reason
    why = f"excluded by rank {event.rank}: {event.reason}"
    return send_off(job, "exclude", event.node, EXIT_DO_NOT_REQUEUE, why, now)


def on_stop_asked(job: Job, event: StopAsked, now: Time) -> list[AnyAction]:
    if job.ended is not None or rank_in_force(job, event.node, event.round, event.rank) is None:
        return []
    return finish_job(job, event.code, f"rank {event.rank} stopped the job: {event.reason}", now)
