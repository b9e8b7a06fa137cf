"""What comes of faults that somebody asked for: for the round in force, and for what is told of it.

`chaos` says who gets which trap; here it meets the rest of the job.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import Plan
from holdfast.core.hangs import rules as hangs
from holdfast.core.state import Job
from holdfast.messages.actions import AnyAction, Inject
from holdfast.messages.chaos import FAULTS, Done, Outcome, Trap, sentence
from holdfast.messages.events import AnyEvent, FaultAsked, FaultTold, NodeResumed, Progress
from holdfast.messages.records import World
from holdfast.messages.units import NodeId, Time

COORDINATOR = NodeId("")
MARKED = 2
"""Of the newest incidents so many may still change their causes."""


def on_fault_asked(job: Job, event: FaultAsked, now: Time) -> list[AnyAction]:
    world = job.membership.world
    wrong = chaos.refusal(job.chaos, event.injection, world, job.highest)
    if wrong or job.ended is not None:
        return []  # Whoever asked was told; the job may have changed since.
    traps = chaos.asked(job.chaos, event.injection, event.visit, world)
    if event.injection.kind == "kill-coordinator" and event.injection.now:
        (trap,) = traps
        done = Done(
            injection=trap.injection,
            occurrence=trap.occurrence,
            kind=trap.kind,
            node=trap.node,
            rank=trap.rank,
            round=job.membership.round,
            step=job.highest,
            at=now,
            known_at=now,
        )
        return _happened(job, done)
    return _inject(job, traps)


def on_fault_told(job: Job, event: FaultTold, now: Time) -> list[AnyAction]:
    """An agent laid a trap, would not, or one was sprung."""
    if event.outcome == "armed":
        chaos.armed(job.chaos, event.injection)
    elif event.outcome == "refused":
        chaos.refused(job.chaos, event.injection, event.detail)
    elif event.outcome == "missed":
        chaos.missed(job.chaos, event.injection, event.occurrence, event.detail)
    elif 1 <= event.injection <= len(job.chaos.plans):
        done = Done(
            injection=event.injection,
            occurrence=event.occurrence,
            kind=job.chaos.plans[event.injection - 1].injection.kind,
            node=event.node,
            rank=event.rank,
            round=event.round,
            step=event.step,
            at=event.at,
            known_at=now,
        )
        return _happened(job, done)
    return []


def _happened(job: Job, done: Done) -> list[AnyAction]:
    if not chaos.happened(job.chaos, done) or done.kind != "kill-coordinator":
        return []
    own = Trap(
        injection=done.injection,
        occurrence=done.occurrence,
        kind=done.kind,
        node=COORDINATOR,
        rank=done.rank,
    )
    return [Inject(node=COORDINATOR, round=done.round, trap=own)]


def after(job: Job, event: AnyEvent) -> list[AnyAction]:
    """What else an event means for a job that was asked for faults."""
    if job.chaos.done:
        step_s = hangs.paces(job.hangs).step_s or 0.0
        chaos.mark(job.chaos, job.incidents[-MARKED:], step_s)
    if job.membership.world is None or job.ended is not None:
        return []
    if isinstance(event, Progress):
        return _on_steps(job, event, job.membership.world)
    if isinstance(event, NodeResumed):  # What was on its way to it may be lost.
        return _inject(job, list(chaos.laid_on(job.chaos, event.node)))
    return []


def _on_steps(job: Job, event: Progress, world: World) -> list[AnyAction]:
    """Ranks have come further: what comes again and again is laid further on."""
    steps = [rank.step for rank in event.ranks if rank.steps]
    if not steps or event.round != world.round:
        return []
    return _inject(job, chaos.moved_on(job.chaos, world, min(steps)))


def _inject(job: Job, traps: list[Trap]) -> list[AnyAction]:
    return [Inject(node=trap.node, round=job.membership.round, trap=trap) for trap in traps]


# ---- in words -----------------------------------------------------------------------------------


def told(job: Job) -> dict[str, Any]:
    """The faults that were asked for: what is to come, what was not to be, how many there were."""
    refused = [plan for plan in job.chaos.plans if plan.refused]
    to_come = chaos.pending(job.chaos) if job.ended is None else []
    return {
        "pending": [_pending(job, plan, trap) for plan, trap in to_come],
        "injected": job.chaos.count,
        "refused": [
            {"injection": plan.number, "line": sentence(plan.injection), "why": plan.refused}
            for plan in refused
        ],
    }


def _pending(job: Job, plan: Plan, trap: Trap | None) -> dict[str, Any]:
    line = sentence(plan.injection)
    shown: dict[str, Any] = {
        "injection": plan.number,
        "fault": plan.injection.kind,
        "rank": None,
        "node": None,
        "step": None,
        "missed": False,
    }
    if trap is not None:
        by_rank = FAULTS[trap.kind].befalls == "rank"
        rank = job.ranks.get(trap.rank)
        # It springs only if training goes back to before that step.
        missed = bool(trap.step) and rank is not None and rank.step > trap.step
        shown |= {
            "rank": trap.rank if by_rank else None,
            "node": trap.node,
            "step": trap.step or None,
            "missed": missed,
        }
        whom = f"rank {trap.rank}" if by_rank else f"node {trap.node}"
        line += f"; next on {whom} at step {trap.step}" if trap.step else f"; on {whom}"
        line += " (missed: its rank had come by before)" if missed else ""
    return {**shown, "line": line}


def answer(job: Job, plan: Plan) -> tuple[Outcome | None, str, Trap | Done | None]:
    """What became of an injection so far, for whoever asked for it."""
    if plan.refused:
        return "refused", plan.refused, None
    done = next((d for d in reversed(job.chaos.done) if d.injection == plan.number), None)
    if done is not None:
        return "done", chaos.told(done), done
    trap = next((t for t in job.chaos.traps if t.injection == plan.number), None)
    return ("armed" if plan.armed else None), _pending(job, plan, trap)["line"], trap
