"""What the machine of loader settings hears: users, the loaders of ranks, and the round's fate."""

from __future__ import annotations

import re

from holdfast.core.decisions import AnswerRequest, Asker, Refused
from holdfast.core.faults import Fault
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.states import LIVE
from holdfast.core.tuning import rules, wording
from holdfast.core.tuning.state import LoaderSeat, TunedLoader, Tunings, WantedConfig
from holdfast.core.view import View, earliest
from holdfast.messages.events import Asked, TuningAsked, WorkerExited
from holdfast.messages.records import JobResult, World
from holdfast.messages.requests import AwaitTuning, Denied, SettleTuning, Truth
from holdfast.messages.units import Rank, Time

_OUT_OF_MEMORY = re.compile(r"(\w*OutOfMemoryError|MemoryError) at ")
"""Signature of a script that ran out of memory: torch.OutOfMemoryError, and Python's own."""


class TuningMachine(Tunings, Machine):
    @on(TuningAsked, *LIVE, refusal="the job is ending")
    def on_asked(self, job: View, event: TuningAsked, now: Time) -> Effects | Refused:
        if wording.refusal(self, event.dataset, event.config, event.auto):
            return Refused(reason="other settings were asked for, and then the job changed")
        loader = self.loaders[event.dataset]
        wanted = WantedConfig(event.config, event.by, event.visit)
        return rules.want(loader, wanted, event.auto, job, now)

    def request_held(self, job: View, asker: Asker, event: Asked, now: Time) -> Effects:
        request = event.request
        self._forget(event.rank, asker)
        if isinstance(request, AwaitTuning):
            return self._awaited(job, asker, event.rank, request, now)
        if isinstance(request, SettleTuning):
            return self._settled(job, asker, event.rank, request, now)
        return NONE

    def _forget(self, rank: Rank, asker: Asker) -> None:
        """A channel that is used again has no older request that waits."""
        for loader in self.loaders.values():
            seat = loader.seats.get(rank)
            if seat is not None and seat.asker == asker:
                seat.asker = seat.until = None

    def _awaited(
        self, job: View, asker: Asker, rank: Rank, request: AwaitTuning, now: Time
    ) -> Effects:
        loader = self.loaders.setdefault(request.dataset, TunedLoader())
        seat = loader.seats.get(rank)
        if seat is None or seat.opening < request.opening:
            closed = [] if seat is None or seat.asker is None else [_closed(seat.asker, request)]
            fresh = LoaderSeat(request.opening, request.own, request.most)
            _hear(fresh, asker, request, now)
            return [*closed, *rules.opened(loader, rank, fresh, request, job, now)]
        if request.opening < seat.opening:
            return [_closed(asker, request)]
        _hear(seat, asker, request, now)
        if seat.until is not None:
            self.until = earliest(self.until, seat.until)
        return [
            *rules.acknowledged(loader, seat, job, now),
            *rules.measured(loader, seat, request, job, now),
            *rules.answer(loader, seat),
        ]

    def _settled(
        self, job: View, asker: Asker, rank: Rank, request: SettleTuning, now: Time
    ) -> Effects:
        loader = self.loaders.get(request.dataset)
        if loader is None:
            return [AnswerRequest(asker=asker, answer=Truth(so=False))]
        was = rules.is_settled(loader, request.number)
        version = loader.version
        effects = rules.settle(loader, rank, request.number, job, now)
        so = was or loader.version > version
        return [AnswerRequest(asker=asker, answer=Truth(so=so)), *effects]

    # ---- moments ----

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        if event.code != 0:
            return NONE
        for loader in self.loaders.values():
            rules.left(loader, event.rank)
        return NONE

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        for loader in self.loaders.values():
            rules.begin_round(loader, world.size)
        self.until = None
        return NONE

    def round_ended(self, job: View, fault: Fault, now: Time) -> Effects:
        self._forget_round()
        return NONE

    def round_stopped(self, job: View, fault: Fault, now: Time) -> Effects:
        if fault.kind == "oom" or _OUT_OF_MEMORY.match(fault.signature):
            for loader in self.loaders.values():
                rules.out_of_memory(loader, job, now)
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        self._forget_round()
        return NONE

    def _forget_round(self) -> None:
        for loader in self.loaders.values():
            rules.forget_round(loader)
        self.until = None

    def tick(self, job: View, now: Time) -> Effects:
        if self.until is None or now < self.until:
            return NONE
        effects = [e for loader in self.loaders.values() for e in rules.times_up(loader, now)]
        seats = (seat for loader in self.loaders.values() for seat in loader.seats.values())
        self.until = earliest(*(seat.until for seat in seats))
        return effects

    def deadline(self, job: View) -> Time | None:
        return self.until

    def validate(self, job: View) -> None:
        for loader in self.loaders.values():
            rules.validate(loader, job)
            untils = [seat.until for seat in loader.seats.values() if seat.until is not None]
            assert not untils or (self.until is not None and self.until <= min(untils))


def _hear(seat: LoaderSeat, asker: Asker, request: AwaitTuning, now: Time) -> None:
    seat.asker, seat.after, seat.heard_at = asker, request.after, now
    seat.at, seat.step_s = request.at, request.step_s
    seat.until = None if request.for_s is None else Time(now + request.for_s)


def _closed(asker: Asker, request: AwaitTuning) -> AnswerRequest:
    detail = f"the loader of {request.dataset} was opened anew"
    return AnswerRequest(asker=asker, answer=Denied(reason="data set", detail=detail))
