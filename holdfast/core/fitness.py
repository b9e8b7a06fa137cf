"""What nodes tell about their fitness, and what comes of it for the job."""

from __future__ import annotations

from holdfast.core import checking
from holdfast.core.repair import go_on_checking, note_unfit, send_off
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import HealthFound, NodeTested
from holdfast.messages.exits import EXIT_DO_NOT_REQUEUE
from holdfast.messages.units import Time


def on_tested(job: Job, event: NodeTested, now: Time) -> list[AnyAction]:
    """A node has tested itself, alone and with another."""
    candidate = job.membership.waiting.get(event.node)
    if job.ended is not None or candidate is None or event.result.node != event.node:
        return []
    candidate.store_port = event.store_port
    if not checking.tested(job.checking, event.check, event.result, now):
        return []
    return go_on_checking(job, now)


def on_health(job: Job, event: HealthFound, now: Time) -> list[AnyAction]:
    """A node's own checks failed: it goes if the job can do without it."""
    m = job.membership
    if job.ended is not None or not m.has(event.node):
        return []
    failed = [result for result in event.results if result.verdict == "fail"]
    if not failed:
        return []
    why = "; ".join(f"{result.check}: {result.reason}" for result in failed)
    candidate = m.placed.get(event.node) or m.busy.get(event.node) or m.waiting.get(event.node)
    assert candidate is not None
    host = candidate.spec.host
    if host in job.excluded:
        return []
    enough = m.count() - 1 >= max(1, job.terms.min_nodes)
    note_unfit(job, event.node, why, "the job goes on without it" if enough else "", now)
    if not enough:
        return []
    job.excluded[host] = why
    return send_off(job, "exclude", event.node, EXIT_DO_NOT_REQUEUE, f"unfit: {why}", now)
