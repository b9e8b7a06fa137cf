"""Connects injected faults (`core.chaos`) with the rest of the job."""

from __future__ import annotations

from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import Plan
from holdfast.core.hangs import rules as hangs
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction
from holdfast.messages.chaos import FaultsReport, InjectionReport
from holdfast.messages.events import AnyEvent, FaultAsked, FaultTold, NodeResumed, Progress
from holdfast.messages.records import Incident
from holdfast.messages.units import Time


def on_fault_asked(job: Job, event: FaultAsked, now: Time) -> list[AnyAction]:
    if job.ended is not None:
        return []
    return chaos.asked(job.chaos, event, job.membership.world, job.highest, now)


def on_fault_told(job: Job, event: FaultTold, now: Time) -> list[AnyAction]:
    return chaos.told(job.chaos, event, now)


def after(job: Job, event: AnyEvent) -> list[AnyAction]:
    """Set and repeat traps, as an event requires."""
    world = job.membership.world
    if world is None or job.ended is not None:
        return []
    if isinstance(event, NodeResumed):
        return chaos.resumed(job.chaos, world, event.node)
    if isinstance(event, Progress) and event.round == world.round:
        steps = [rank.step for rank in event.ranks if rank.steps]
        return chaos.stepped(job.chaos, world, min(steps)) if steps else []
    return []


def injected_by(job: Job, incident: Incident) -> str:
    return chaos.injected_by(job.chaos, incident, hangs.paces(job.hangs).step_s or 0.0)


def report(job: Job, plan: Plan) -> InjectionReport:
    return chaos.report(job.chaos, plan, lambda rank: job.ranks[rank].step)


def faults(job: Job) -> FaultsReport:
    plans, ended = job.chaos.plans, job.ended is not None
    return FaultsReport(
        pending=[report(job, plan) for plan in plans if not plan.over and not ended],
        injected=job.chaos.count,
        refused=[report(job, plan) for plan in plans if plan.refused],
    )
