"""What the ledger hears: each moment at which a rank's time begins to belong to another cause."""

from __future__ import annotations

from holdfast.core.decisions import AnswerRequest, Asker
from holdfast.core.faults import Fault
from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.core.machine import NONE, Effects, Machine
from holdfast.core.states import Running
from holdfast.core.view import View
from holdfast.messages.events import Asked, WorkerExited, WorkerStarted
from holdfast.messages.records import JobResult, RankProgress, Terms, World
from holdfast.messages.requests import JobAccount, ReadAccount
from holdfast.messages.units import Time


class LedgerMachine(Ledger, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> LedgerMachine:
        return cls(at)

    def round_awaited(self, job: View, now: Time) -> Effects:
        if self.waiting_since is None and not job.membership.busy:
            self.now = now
            books.wait(self, now)
        return NONE

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.now = now
        books.size(self, world.size, now)
        books.begin_round(self, world.round, job.highest, now)
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        books.broke(self, fault.at, now)
        return NONE

    def round_stopped(self, job: View, fault: Fault, now: Time) -> Effects:
        self.now = now
        books.blamed(self, fault.at)
        books.stopped(self, now)
        return NONE

    def rank_started(self, job: View, event: WorkerStarted, now: Time) -> Effects:
        self.now = now
        books.script_began(self, event.rank, event.at)
        return NONE

    def rank_stepped(self, job: View, progress: RankProgress, first: bool, now: Time) -> Effects:
        self.now = now
        books.progressed(self, progress)
        return NONE

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        self.now = now
        if event.code == 0 and isinstance(job.state, Running):
            books.finished(self, event.rank, event.at)
        return NONE

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        if not isinstance(event.request, ReadAccount):
            return NONE
        speed, loss = job.speed, job.loss
        account = JobAccount(
            step=job.highest,
            seconds=books.seconds_until(self, now),
            restarts=job.restarts,
            incidents=job.incident_count,
            steps_per_s=speed.steps_per_s,
            samples_per_s=speed.samples_per_s,
            world_size=speed.world_size,
            loss=loss.value if loss is not None else None,
        )
        return [AnswerRequest(asker=asker, answer=account)]

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        self.now = now
        if self.fault_at is None and (result.code != 0 or job.unfinished):
            books.broke(self, now, now)  # Booked when the nodes have told how far they came.
        return NONE

    def job_closed(self, job: View, result: JobResult, now: Time) -> Effects:
        self.now = now
        if self.fault_at is not None:
            books.stopped(self, now)
        for rank in list(self.accounts):
            books.book(self, rank, now)
        return NONE

    def job_requeued(self, job: View, since: Time, now: Time) -> Effects:
        self.now = now
        books.requeued(self, since, now)
        return NONE

    def validate(self, job: View) -> None:
        books.validate(self)
