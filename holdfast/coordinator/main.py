"""One coordinator, from its start (or its start again) to the end of the job."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from dataclasses import dataclass

from holdfast import kernel
from holdfast.clock import JobClock
from holdfast.coordinator.diagnosis import Examinations
from holdfast.coordinator.journal import Journal, replay
from holdfast.coordinator.memories import Memories
from holdfast.coordinator.server import Coordinator
from holdfast.jobhome import JobHome
from holdfast.messages.events import CoordinatorRestarted
from holdfast.messages.records import Terms
from holdfast.messages.units import Time
from holdfast.wire.tls import TlsFiles, server_context

log = logging.getLogger("holdfast.coordinator")


@dataclass(frozen=True)
class CoordinatorOrders:
    """All that a coordinator is told when it is started."""

    home: JobHome
    listener: socket.socket
    token: str
    tls: TlsFiles | None
    terms: Terms | None
    """None when the first node will say what kind of job it is."""
    since_monotonic: float
    """When the launcher was started: the job's first second."""


def run_coordinator(orders: CoordinatorOrders) -> int:
    """Decide for the job until it is over. Signals are the launcher's business, not ours."""
    kernel.name_process("holdfast-coord")
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)  # The journal and the evidence of incidents are for this user alone.
    kernel.unblock_signals()
    kernel.open_many_files()
    return asyncio.run(_run(orders))


async def _run(orders: CoordinatorOrders) -> int:
    path, name = orders.home.journal, orders.home.name
    before = replay(path) if path.exists() else None
    journal = Journal(path)
    try:
        clock = JobClock(not_before=before.at if before is not None else Time(0.0))
        examinations = Examinations(orders.home.incidents)
        memories = Memories(orders.home.memories)
        coordinator = Coordinator(name, None, journal, clock, orders.token, examinations, memories)
        restarted = None
        if before is not None:
            coordinator.job, coordinator.acked = before.job, before.acked
            restarted = CoordinatorRestarted(at=clock.now())
            log.warning("the coordinator is back, in round %d", before.job.membership.round)
        elif orders.terms is not None:
            coordinator.open(orders.terms, clock.at(orders.since_monotonic))
        return await coordinator.serve(orders.listener, server_context(orders.tls), restarted)
    finally:
        journal.close()
