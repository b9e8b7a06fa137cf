"""What agents tell about ranks that stand still, and what comes of it for the job."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.core.hangs import rules as hangs
from holdfast.core.recovery import rules as faults
from holdfast.core.repair import break_round
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import RanksStalled, VerdictReached
from holdfast.messages.units import NodeId, Rank, Seconds, Time

STALE_S: Seconds = 10.0


def on_stalled(job: Job, event: RanksStalled, now: Time) -> list[AnyAction]:
    m = job.membership
    in_force = event.round == m.round and m.world is not None and job.fault is None
    if job.ended is not None or not in_force or event.node not in m.placed:
        return []
    if now - event.at > STALE_S:
        return []  # It waited for a coordinator that was gone; it is told again if it is still so.
    living = sum(not rank.finished for rank in job.ranks.values())
    own = tuple(s for s in event.stalls if _is_of(job, event.node, s.rank))
    hang = hangs.stalled(job.hangs, event.node, own, living, now)
    if hang is None:
        return []
    stall = hang.stall
    what = hangs.sentence(hang)
    at = Time(max(0.0, event.at - stall.for_s))
    fault = faults.hung(
        hang.node,
        None if stall.kind == "waits" else stall.rank,
        event.round,
        job.ranks[stall.rank].step,
        what,
        at,
        outside=stall.kind == "stopped",
        doubtful=not hang.certain,
    )
    return break_round(job, fault, now)


def _is_of(job: Job, node: NodeId, rank: Rank) -> bool:
    """Whether it is a rank of that node that has not finished."""
    found = job.ranks.get(rank)
    return found is not None and found.node == node and not found.finished


def on_verdict(job: Job, event: VerdictReached, now: Time) -> list[AnyAction]:
    """The incident is known better now: by whom, and where it stood."""
    if not 1 <= event.incident <= len(job.incidents):
        return []
    incident = job.incidents[event.incident - 1]
    if incident.kind != "hang":
        return []  # A death of the same round turned out to be the cause.
    incident.detail = event.sentence
    if event.guilty and event.guilty[0] in job.ranks:
        incident.rank = event.guilty[0]
        if incident.round == job.membership.round:
            incident.node = job.ranks[incident.rank].node
    if job.fault is not None and job.last_fault is incident and job.fault.kind == "hang":
        job.fault = replace(job.fault, rank=incident.rank, detail=incident.detail)
    return []
