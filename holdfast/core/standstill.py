"""What agents tell about ranks that stand still, and what comes of it for the job."""

from __future__ import annotations

from holdfast.core import hangs
from holdfast.core import recovery as faults
from holdfast.core.repair import break_round
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import RanksStalled, VerdictReached
from holdfast.messages.units import Time


def on_stalled(job: Job, event: RanksStalled, now: Time) -> list[AnyAction]:
    m = job.membership
    in_force = event.round == m.round and m.world is not None and job.fault is None
    if job.ended is not None or not in_force or event.node not in m.placed:
        return []
    living = sum(not rank.finished for rank in job.ranks.values())
    hang = hangs.stalled(job.hangs, event.node, event.stalls, living)
    if hang is None:
        return []
    rank = hang.stall.rank
    what = hangs.sentence(hang)
    step = job.ranks[rank].step if rank in job.ranks else job.highest
    at = Time(max(0.0, event.at - hang.stall.for_s))
    return break_round(job, faults.hung(hang.node, rank, event.round, step, what, at), now)


def on_verdict(job: Job, event: VerdictReached, now: Time) -> list[AnyAction]:
    """The incident is known better now: by whom, and where it stood."""
    if not 1 <= event.incident <= len(job.incidents):
        return []
    incident = job.incidents[event.incident - 1]
    incident.detail = event.sentence
    if event.guilty and event.guilty[0] in job.ranks:
        incident.rank = event.guilty[0]
        if incident.round == job.membership.round:
            incident.node = job.ranks[incident.rank].node
    return []
