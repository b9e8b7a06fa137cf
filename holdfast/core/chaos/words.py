"""Injected faults in words: what is to come, what was refused, and how an injection went."""

from __future__ import annotations

from typing import Any

from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import Chaos, Plan
from holdfast.core.states import OVER
from holdfast.core.view import View
from holdfast.messages.chaos import FAULTS, Done, Outcome, Trap, sentence


def told(state: Chaos, job: View) -> dict[str, Any]:
    """The faults that were asked for: what is to come, what was not to be, how many there were."""
    refused = [plan for plan in state.plans if plan.refused]
    to_come = chaos.pending(state) if not isinstance(job.state, OVER) else []
    return {
        "pending": [_pending(job, plan, trap) for plan, trap in to_come],
        "injected": state.count,
        "refused": [
            {"injection": plan.number, "line": sentence(plan.injection), "why": plan.refused}
            for plan in refused
        ],
    }


def _pending(job: View, plan: Plan, trap: Trap | None) -> dict[str, Any]:
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


def answer(state: Chaos, job: View, plan: Plan) -> tuple[Outcome | None, str, Trap | Done | None]:
    """What became of an injection so far, for whoever asked for it."""
    if plan.refused:
        return "refused", plan.refused, None
    done = next((d for d in reversed(state.done) if d.injection == plan.number), None)
    if done is not None:
        return "done", chaos.told(done), done
    trap = next((t for t in state.traps if t.injection == plan.number), None)
    return ("armed" if plan.armed else None), _pending(job, plan, trap)["line"], trap
