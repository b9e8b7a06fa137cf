"""Answers users who requested a fault, once the nodes have reported what became of it.

If a node takes too long, the answer says what is known so far; the fault strikes anyway.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from holdfast.core import report
from holdfast.core.chaos.plans import Chaos
from holdfast.core.job import Job
from holdfast.messages.wire import FaultTaken, Rejected

LIMIT_S = 3.0

Answer = FaultTaken | Rejected


class FaultRequests:
    """The requests that wait for an answer, by their number."""

    def __init__(self, job: Callable[[], Job | None]) -> None:
        self._job = job
        self._waiting: dict[int, tuple[Callable[[Answer], None], asyncio.TimerHandle]] = {}

    def add(self, tell: Callable[[Answer], None]) -> int:
        """Answer a request later; return its number, which no other request of the job has had."""
        visit = secrets.randbits(53)
        timer = asyncio.get_running_loop().call_later(LIMIT_S, self.answer, visit)
        self._waiting[visit] = (tell, timer)
        return visit

    def answer(self, late: int | None = None) -> None:
        """Answer the requests whose outcome is known, and the one whose time is up."""
        job = self._job()
        assert job is not None
        for visit, (tell, timer) in list(self._waiting.items()):
            plans = [plan for plan in job.of(Chaos).plans if plan.visit == visit]
            taken = tuple(report.injection(job, plan) for plan in plans)
            # Without an outcome and without a node, there is nothing to wait for.
            if visit == late or all(one.outcome or not one.node for one in taken):
                timer.cancel()
                del self._waiting[visit]
                changed = Rejected(
                    reason="the job has changed; see `holdfast status`, and try again"
                )
                tell(FaultTaken(taken=taken) if taken else changed)
