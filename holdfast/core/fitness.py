"""What nodes tell about their fitness, and what comes of it for the job."""

from __future__ import annotations

from holdfast.core.nodecheck import schedule as checking
from holdfast.core.repair import can_do_without, go_on_checking, note_unfit, send_off
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import HealthFound, NodeTested
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.units import Time


def on_tested(job: Job, event: NodeTested, now: Time) -> list[AnyAction]:
    """A node has tested itself, alone and with another."""
    m = job.membership
    if event.node not in m.waiting or event.result.node != event.node:
        return []
    actions = checking.take(job.checking, m, event.check, event.result, now)
    if actions is None:
        return []
    return go_on_checking(job, now) if checking.is_over(job.checking) else actions


def on_health(job: Job, event: HealthFound, now: Time) -> list[AnyAction]:
    """A node's own checks failed: it goes if the job can do without it, now or later."""
    m = job.membership
    if job.ended is not None or not m.has(event.node):
        return []
    failed = [result for result in event.results if result.verdict == "fail"]
    if not failed:
        return []
    why = "; ".join(f"{result.check}: {result.reason}" for result in failed)
    candidate = m.placed.get(event.node) or m.busy.get(event.node) or m.waiting.get(event.node)
    assert candidate is not None
    if not can_do_without(job):
        if job.checking.sick.get(event.node) == why:
            return []
        job.checking.sick[event.node] = why
        note_unfit(job, event.node, why, "it stays until the job can do without it", now)
        return []
    note_unfit(job, event.node, why, "the job goes on without it", now)
    job.excluded[candidate.spec.host] = why
    return send_off(job, "exclude", event.node, EXIT_DO_NOT_REQUEUE, f"unfit: {why}", now)
