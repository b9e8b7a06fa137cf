"""One coordinator, from its start (or its start again) to the end of the job.

A job that was opened has its id in job.json. A coordinator that finds it there and no such job in the
journal has lost its journal, and does not begin another: see `coordinator.lost`.
"""

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
from holdfast.coordinator.journal import Journal, reopen
from holdfast.coordinator.lost import LostCoordinator
from holdfast.coordinator.memories import Memories
from holdfast.coordinator.server import Coordinator
from holdfast.core.replay import JobSnapshot
from holdfast.errors import JournalError
from holdfast.jobhome import JobHome
from holdfast.messages.events import AnyEvent, CoordinatorRestarted, JobRequeued
from holdfast.messages.exits import EXIT_FAILED
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
    requeued: bool = False
    """Whether the job goes on after it had to stop, on nodes that are all new."""


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
    before, missing, lost = _before(orders.home)
    if lost:
        sentence = (
            f"the journal of job {name} is lost ({lost}): this coordinator decides nothing; put it"
            " back and restart the coordinator, or stop the job and start it again"
        )
        await LostCoordinator(sentence, orders.token).serve(
            orders.listener, server_context(orders.tls)
        )
        return EXIT_FAILED
    journal = Journal(path)
    try:
        clock = JobClock(not_before=before.at if before is not None else Time(0.0))
        examinations = Examinations(orders.home.incidents)
        memories = Memories(orders.home.memories)
        coordinator = Coordinator(
            name=name,
            job=None,
            journal=journal,
            clock=clock,
            token=orders.token,
            examinations=examinations,
            memories=memories,
            note_opened=orders.home.note_opened,
        )
        restarted: AnyEvent | None = None
        if before is not None:
            coordinator.job, coordinator.acked = before.job, before.acked
            if not orders.home.opened_id():  # It died right after the job was opened.
                orders.home.note_opened(before.job.id)
            restarted = CoordinatorRestarted(at=clock.now(), lost=missing)
            if orders.requeued:
                restarted = JobRequeued(at=clock.now(), since=before.at)
                log.info("job %s goes on after round %d", name, before.job.membership.round)
            else:
                log.warning("the coordinator is back, in round %d", before.job.membership.round)
            if missing:
                log.error("%d events of the journal are lost (see `holdfast incidents`)", missing)
                journal.write_snapshot(before)  # Once is enough to have lost them.
        elif orders.terms is not None:
            coordinator.open(orders.terms, clock.at(orders.since_monotonic))
        return await coordinator.serve(orders.listener, server_context(orders.tls), restarted)
    finally:
        journal.close()


def _before(home: JobHome) -> tuple[JobSnapshot | None, int, str]:
    """Replay the journal; also return how many of its events are lost, or why all of them are."""
    opened, path = home.opened_id(), home.journal
    if not path.exists():
        return None, 0, f"{path} is gone" if opened else ""
    try:
        before, missing = reopen(path)
    except JournalError as error:
        if not opened:
            raise
        return None, 0, str(error)
    if not opened:
        return before, missing, ""
    if before is None:
        return None, 0, f"{path} is empty"
    if before.job.id != opened:
        return None, 0, f"{path} is another job's: its id is {before.job.id}, not {opened}"
    return before, missing, ""
