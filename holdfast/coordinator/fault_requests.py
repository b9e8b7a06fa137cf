"""Who asked for a fault and waits to hear what became of it.

They are answered when the node that it befalls has said something about it, or when that takes too
long; what they asked for happens anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core import drills
from holdfast.core.chaos.plans import Plan
from holdfast.core.job import Job
from holdfast.messages.chaos import FAULTS
from holdfast.messages.wire import FaultTaken, InjectionOutcome, Rejected

LIMIT_S = 3.0

Answer = FaultTaken | Rejected


@dataclass
class _Asker:
    visit: int
    after: int
    """How many injections there were before."""
    tell: Callable[[Answer], None]
    timer: asyncio.TimerHandle


class Askers:
    def __init__(self) -> None:
        self._waiting: list[_Asker] = []
        self._visits = 0

    def add(self, job: Job, tell: Callable[[Answer], None]) -> int:
        """Somebody asks; the number of the visit."""
        self._visits += 1
        loop = asyncio.get_running_loop()
        timer = loop.call_later(LIMIT_S, self._answer_late, job, self._visits)
        self._waiting.append(_Asker(self._visits, len(job.chaos.plans), tell, timer))
        return self._visits

    def answer(self, job: Job) -> None:
        """Answer those of whom all is known."""
        for asker in list(self._waiting):
            plans = _plans(job, asker)
            if not plans or all(_known(job, plan) for plan in plans):
                self._tell(job, asker, plans)

    def _answer_late(self, job: Job, visit: int) -> None:
        for asker in [one for one in self._waiting if one.visit == visit]:
            self._tell(job, asker, _plans(job, asker))

    def _tell(self, job: Job, asker: _Asker, plans: list[Plan]) -> None:
        self._waiting.remove(asker)
        asker.timer.cancel()
        if plans:
            asker.tell(FaultTaken(taken=tuple(_taken(job, plan) for plan in plans)))
        else:
            asker.tell(Rejected(reason="the job has changed; see `holdfast status`, and ask again"))


def _plans(job: Job, asker: _Asker) -> list[Plan]:
    return [plan for plan in job.chaos.plans[asker.after :] if plan.visit == asker.visit]


def _known(job: Job, plan: Plan) -> bool:
    """Whether there is nothing to wait for: it is not laid on anybody yet, or somebody told."""
    if plan.over or plan.armed or plan.refused or plan.last:
        return True
    return not any(trap.injection == plan.number for trap in job.chaos.traps)


def _taken(job: Job, plan: Plan) -> InjectionOutcome:
    outcome, line, whom = drills.answer(job, plan)
    if whom is None:
        return InjectionOutcome(injection=plan.number, outcome=outcome, line=line)
    by_rank = FAULTS[plan.injection.kind].befalls == "rank"
    return InjectionOutcome(
        injection=plan.number,
        outcome=outcome,
        line=line,
        rank=whom.rank if by_rank else None,
        node=whom.node,
        step=whom.step or None,
    )
