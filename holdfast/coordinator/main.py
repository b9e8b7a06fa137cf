"""One coordinator, from its start (or its start again) to the end of the job."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass

from holdfast import kernel
from holdfast.clock import JobClock
from holdfast.coordinator.journal import Entry, Journal, replay
from holdfast.coordinator.server import Coordinator
from holdfast.core import job as jobs
from holdfast.jobhome import JobHome
from holdfast.messages.events import CoordinatorRestarted, JobOpened
from holdfast.messages.records import Terms
from holdfast.messages.units import Time

log = logging.getLogger("holdfast.coordinator")


@dataclass(frozen=True)
class CoordinatorOrders:
    """All that a coordinator is told when it is started."""

    home: JobHome
    listener: socket.socket
    token: str
    terms: Terms
    since_monotonic: float
    """When the launcher was started: the job's first second."""


def run_coordinator(orders: CoordinatorOrders) -> int:
    """Decide for the job until it is over. Signals are the launcher's business, not ours."""
    kernel.name_process("holdfast-coord")
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return asyncio.run(_run(orders))


async def _run(orders: CoordinatorOrders) -> int:
    path = orders.home.journal
    before = replay(path) if path.exists() else None
    journal = Journal(path)
    try:
        if before is None:
            clock = JobClock()
            opened = JobOpened(
                at=clock.at(orders.since_monotonic), job=orders.home.name, terms=orders.terms
            )
            journal.append([Entry(opened.at, opened)])
            job, acked, first = jobs.opened(opened), {}, None
        else:
            clock = JobClock(not_before=Time(before.at))
            job, acked = before.job, before.acked
            log.warning(
                "the coordinator was restarted; its journal tells of round %d", job.membership.round
            )
            first = CoordinatorRestarted(at=clock.now())
        coordinator = Coordinator(job, journal, clock, orders.token, acked)
        return await coordinator.serve(orders.listener, first)
    finally:
        journal.close()
