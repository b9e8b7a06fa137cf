"""Minds the workers from the moment they have a rank until they are gone, and passes on what they
say to whom it concerns.

    it began, it took its first step    the reporter tells the coordinator, the watch watches it
    a trap was sprung                   the injector
    its script ended, or raised         it need not be watched any more, it has only to end
    a question                          the courier; the keeper answers what is about images
    a checkpointer, a whole image       the keeper

How far a worker has come it does not say: that stands on its page, which is looked at now and then.
The pool is filled again once all have finished a step, and with each look.

When a worker's process is gone, what it had still said is heard before its end is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.agent.fault_injector import Injector
from holdfast.agent.processes import Exit
from holdfast.agent.reporting import Reporter
from holdfast.agent.requests import Courier
from holdfast.agent.snapshots import Keeping
from holdfast.agent.stall_detector import Watch
from holdfast.agent.standbys import Pool, Standby
from holdfast.agent.worker import Worker
from holdfast.agent.workers import Crew
from holdfast.clock import JobClock
from holdfast.messages.local import (
    Ask,
    Began,
    Died,
    FromWorker,
    ImageMissed,
    ImageWhole,
    OpenCheckpointer,
    ScriptFinished,
    ScriptReply,
    Stepped,
    TrapSprung,
)
from holdfast.messages.records import Part
from holdfast.messages.requests import AnyAnswer, FindState, LocateImage

LOOK_EVERY_S = 1.0


@dataclass
class Relay:
    clock: JobClock
    crew: Crew
    pool: Pool
    keeping: Keeping
    watch: Watch
    reporter: Reporter
    courier: Courier
    injector: Injector
    gone: Callable[[], None]
    """Called after a worker is gone from the crew and its end was told."""
    _timer: asyncio.TimerHandle | None = None

    def begin_round(self, part: Part) -> None:
        self.crew.begin_round()
        self.keeping.begin_round(part)
        self.watch.begin_round(part)
        self.reporter.begin_round(part)
        self.injector.begin_round(part)

    def expect(self, worker: Worker) -> None:
        """It is about to have its rank: from now on it is heard."""
        self.crew.add(worker)
        if worker.standby is not None:
            worker.standby.hear = lambda message: self._hear(worker, message)
        self.injector.begin_rank(worker.target())

    def follow(self, worker: Worker) -> None:
        """It has its rank; it may be gone already."""
        if worker.process.exit is not None:
            self._exited(worker, worker.process.exit)
            return
        worker.process.on_exit = lambda end: self._exited(worker, end)
        if worker.standby is None:  # A command does not say that it began.
            self._began(worker, time.monotonic())
        else:
            self._see(worker, worker.standby)  # It may never begin.

    # ---- what it says ----

    def _hear(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Began):
            self._began(worker, message.at)
        elif isinstance(message, Stepped):
            self._stepped(worker)
        elif isinstance(message, TrapSprung):
            self.injector.look(worker.target())
        elif isinstance(message, Died):
            self.watch.remove(worker.rank)
            worker.script_raised(message.raised)
        elif isinstance(message, ScriptFinished):
            self.watch.remove(worker.rank)
            worker.script_ended()
        elif isinstance(message, Ask):
            self._ask(worker, message)
        elif isinstance(message, OpenCheckpointer):
            self.keeping.opened(message)
        elif isinstance(message, ImageWhole):
            self.keeping.whole(worker.rank, message)
        elif isinstance(message, ImageMissed):
            self.keeping.missed(worker.rank, message)

    def _began(self, worker: Worker, at: float) -> None:
        self.reporter.began(worker, at)
        if worker.standby is not None:
            self._see(worker, worker.standby)
        if self._timer is None:
            self._look_later()

    def _see(self, worker: Worker, standby: Standby) -> None:
        """Watch it from now on."""
        self.watch.add(worker.rank, worker.process.pid, standby.page.vitals)

    def _stepped(self, worker: Worker) -> None:
        self.reporter.progressed([worker])
        worker.stepped = True
        self.watch.stepped(worker.rank)
        if self.crew.all_stepped():
            self.pool.refill()

    def _ask(self, worker: Worker, message: Ask) -> None:
        rank, round, request = worker.rank, worker.round, message.request

        def reply(answer: AnyAnswer) -> None:
            self.crew.reply(
                rank, ScriptReply(lane=message.lane, number=message.number, answer=answer)
            )

        def carry() -> None:
            self.courier.ask(round, rank, message)

        if isinstance(request, LocateImage):
            self.keeping.locate(request, reply)
        elif isinstance(request, FindState) and request.tried is None and rank == 0:
            self.keeping.look(round, request.checkpointer, carry)
        else:
            carry()

    # ---- how far it has come ----

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.crew.workers:
            self.reporter.progressed(self.crew.workers.values(), self.watch)
            self.pool.refill()
            self._look_later()

    # ---- its end ----

    def _exited(self, worker: Worker, end: Exit) -> None:
        self.crew.remove(worker)
        self.watch.remove(worker.rank)
        worker.hear_last_words()
        self.injector.look(worker.target())
        self.courier.forget(worker.rank)
        progress, ending = worker.progress(self.clock), worker.ending(end)
        self.crew.note_end(progress, ending.stop_took_s)
        if ending.by_itself:
            self.reporter.exited(worker, ending, progress)
        self.injector.gone(worker.process.pid)
        worker.close()
        self.gone()
