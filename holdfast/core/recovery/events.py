"""What recovery hears: from the first sign of a fault to the first good step after it.

An incident opens when a round breaks. Who is to blame may change until all workers are gone: others
die in the wake of the first. It closes when every rank has finished a step, and is marked on its way
there, so that the time it cost can be told apart.
"""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.core import faults, ladder
from holdfast.core.collectives import odd_dead
from holdfast.core.decisions import BreakRound, Note, Refused
from holdfast.core.faults import Fault
from holdfast.core.ladder import Resources, Rung, Stop
from holdfast.core.machine import NONE, Effects, Machine, on
from holdfast.core.recovery import incidents as book
from holdfast.core.recovery import rules
from holdfast.core.recovery.rules import FaultHistory
from holdfast.core.states import ALWAYS, LIVE, Gathering, Stopping
from holdfast.core.view import View, rank_in_force
from holdfast.messages.events import (
    EventLost,
    EventSetAside,
    EventsRefused,
    NodeReady,
    RankRaised,
    TaskFailed,
    Tick,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.evidence import Collective
from holdfast.messages.records import Incident, JobResult, RankProgress, Terms, World
from holdfast.messages.units import NodeId, Rank, Seconds, Time

INTERNAL_AT_MOST = 20
"""Internal incidents that are recorded; later ones are only counted."""
TASKS_AT_MOST = 100
"""Names of failed tasks that are kept."""
TICK_PAUSE_S: Seconds = 1.0
TICK_PAUSE_MOST_S: Seconds = 60.0


class Recovery(Struct):
    terms: Terms
    history: FaultHistory = field(default_factory=FaultHistory)
    incidents: list[Incident] = field(default_factory=list)
    broken: int = 0
    """Id of the newest incident that broke a round."""
    failures: int = 0
    """Events whose handler raised an exception."""
    refused: dict[str, int] = field(default_factory=dict)
    """Events that did not fit their senders, by type and reason."""
    failed_tasks: dict[str, int] = field(default_factory=dict)
    """How often each background task raised."""
    last: dict[Rank, tuple[Collective, ...]] = field(default_factory=dict)
    """The newest collectives of ranks of the round that breaks, as far as they are known."""
    places: dict[Rank, str] = field(default_factory=dict)
    """Lines at which they were, or failed."""
    aborted: list[Rank] = field(default_factory=list)
    """Ranks that their backend aborted because they received what they did not expect."""
    ticks_after: Time | None = None
    """After a tick that could not be handled: when the next may come."""


class RecoveryMachine(Recovery, Machine):
    @classmethod
    def opened(cls, terms: Terms, at: Time) -> RecoveryMachine:
        return cls(terms)

    @property
    def last_fault(self) -> Incident | None:
        """The newest incident that broke a round."""
        return self.incidents[self.broken - 1] if self.broken else None

    @property
    def open_incident(self) -> Incident | None:
        last = self.last_fault
        return last if last is not None and last.closed_at is None else None

    # ---- for the job, which carries decisions out ----

    def judge(self, job: View, fault: Fault, there: Resources, now: Time) -> Rung:
        """Choose what to do about the fault, now that all workers are gone."""
        highest, limit = job.highest, self.terms.max_restarts
        fresh = job.membership.stayed == 0
        rung = rules.judge(self.history, fault, there, highest, limit, job.comparable, fresh)
        incident = self.last_fault
        assert incident is not None
        incident.stopped_at, incident.rung = now, rung.rung
        if isinstance(rung, Stop):
            incident.action = f"stopped the job: {rung.reason}"
            incident.closed_at = now
        else:
            incident.action = ladder.done(rung.rung, there)
            finished = len(job.ranks) - job.unfinished
            if finished:
                incident.action += f"; {finished} that had finished began again"
        return rung

    def blame(self, known: Fault, other: Fault) -> Fault:
        """Decide between two faults of the round that is stopping."""
        incident = self.last_fault
        assert incident is not None
        guilty = faults.culprit(known, other)
        for fault in (known, other):
            if fault is not guilty or fault.victim:
                book.mention(incident, fault)
        if guilty is not known:
            self._reopen(incident, guilty)
        return guilty

    def explain(self, job: View, fault: Fault) -> Fault:
        """Find the rank whose collective did not match the others', if that broke the round."""
        if not fault.unexplained:
            return fault
        odd, difference = odd_dead({int(r): last for r, last in self.last.items()}, self.aborted)
        if not odd and difference is None:
            return fault
        place = self.places.get(Rank(odd[0]), "") if odd else ""
        guilty = faults.blame_mismatch(fault, odd, difference, job.ranks, place)
        incident = self.last_fault
        assert incident is not None
        book.mention(incident, fault)
        self._reopen(incident, guilty)
        return guilty

    def _reopen(self, incident: Incident, guilty: Fault) -> None:
        """Blame another fault for an incident."""
        better = book.opened(incident.id, guilty, incident.cause, incident.opened_at)
        better.also = incident.also
        self.incidents[incident.id - 1] = better

    def note(self, note: Note, cause: str, now: Time) -> None:
        self.incidents.append(book.noted(len(self.incidents) + 1, note, cause, now))

    def open(self, fault: Fault, cause: str, now: Time) -> Incident:
        """Open the incident of a round that breaks."""
        last = self.open_incident
        if last is not None:
            last.closed_at = fault.at
            last.action += "; failed again before the first step"
        self.broken = len(self.incidents) + 1
        self.incidents.append(book.opened(self.broken, fault, cause, now))
        return self.incidents[-1]

    # ---- events ----

    @on(NodeReady, *LIVE, refusal="the job is ending")
    def on_ready(self, job: View, event: NodeReady, now: Time) -> Effects:
        if isinstance(job.state, Stopping):
            for one in event.last:
                if rank_in_force(job, event.node, event.round, one.rank) is not None:
                    self.last[one.rank] = one.last
                    self.places[one.rank] = one.place
        return NONE

    @on(EventSetAside, *ALWAYS)
    def on_set_aside(self, job: View, event: EventSetAside, now: Time) -> Effects:
        """Record an error of our own."""
        self.failures += 1
        if event.what == Tick.__name__ and event.dropped:
            pause_s = min(TICK_PAUSE_MOST_S, TICK_PAUSE_S * self.failures)
            self.ticks_after = Time(now + pause_s)
        if self.failures > INTERNAL_AT_MOST:
            return NONE
        again = "dropped after repeated failures" if event.dropped else "handled again"
        return [
            Note(
                kind="internal",
                signature=f"handling {event.what} raised {event.error}",
                action=f"the event was set aside and {again}; training goes on",
                node=event.node or NodeId(""),
                round=job.membership.round,
                step=job.highest,
                detail=event.traceback,
            )
        ]

    @on(EventLost, *ALWAYS)
    def on_lost(self, job: View, event: EventLost, now: Time) -> Effects:
        """Record that the journal is damaged."""
        self.failures += 1
        if self.failures > INTERNAL_AT_MOST:
            return NONE
        return [
            Note(
                kind="internal",
                signature=f"the journal lost an event: {event.error}",
                action="the rest of it is used; what nodes report shows what is missing",
                round=job.membership.round,
                step=job.highest,
            )
        ]

    @on(EventsRefused, *ALWAYS)
    def on_refused(self, job: View, event: EventsRefused, now: Time) -> Effects:
        self.refused[event.reason] = self.refused.get(event.reason, 0) + event.count
        return NONE

    @on(TaskFailed, *ALWAYS)
    def on_task_failed(self, job: View, event: TaskFailed, now: Time) -> Effects:
        """Count a failure of a background task; the first of each task is an incident."""
        before = self.failed_tasks.get(event.task, 0)
        if before == 0 and len(self.failed_tasks) >= TASKS_AT_MOST:
            return NONE
        self.failed_tasks[event.task] = before + event.count
        if before > 0:
            return NONE
        return [
            Note(
                kind="internal",
                signature=f"the {event.task} raised {event.error}",
                action="it was started again; training goes on",
                node=event.node,
                round=job.membership.round,
                step=job.highest,
                detail=event.traceback,
            )
        ]

    @on(RankRaised, *LIVE, refusal="the job is ending")
    def on_raised(self, job: View, event: RankRaised, now: Time) -> Effects | Refused:
        rank = rank_in_force(job, event.node, event.round, event.rank)
        if rank is None or isinstance(job.state, Gathering):
            return Refused(reason="the rank's round is broken and judged already")
        self.places[event.rank] = event.raised.where
        if event.last:
            self.last[event.rank] = event.last
        fault = faults.raised(event, rank.step if rank.stepped else job.highest)
        if fault.wake:
            fault = faults.blame_early_exit(fault, job.ranks)
        return [BreakRound(fault=fault)]

    # ---- moments ----

    def rank_exited(self, job: View, event: WorkerExited, now: Time) -> Effects:
        if event.code == 0:
            incident = self.open_incident
            if incident is not None and job.world is not None and job.unfinished == 0:
                incident.closed_at = event.at
            return NONE
        if isinstance(job.state, Gathering):
            return NONE  # Its round is broken and judged already.
        rank = job.ranks[event.rank]
        if event.raised is not None:
            self.places[event.rank] = event.raised.where
        if event.last:
            self.last[event.rank] = event.last
        elif faults.is_aborted_by_backend(event):
            self.aborted.append(event.rank)
        fault = faults.death(event, rank.step if rank.stepped else job.highest)
        if isinstance(job.state, Stopping) and faults.is_unfit(event):
            fault = replace(fault, wake=True)  # It had to leave because of another fault.
        elif fault.wake:
            fault = faults.blame_early_exit(fault, job.ranks)
        return [BreakRound(fault=fault)]

    def round_began(self, job: View, world: World, now: Time) -> Effects:
        self.last.clear()
        self.places.clear()
        self.aborted.clear()
        incident = self.open_incident
        if incident is not None:
            incident.frozen_at = now
        return NONE

    def rank_started(self, job: View, event: WorkerStarted, now: Time) -> Effects:
        incident = self.open_incident
        if incident is None or job.world is None:
            return NONE
        if not event.warm:
            incident.action = incident.action.replace("standbys", "fresh processes")
        if job.unstarted == 0:
            incident.started_at = event.at
            if job.highest == 0:  # A script that takes no steps is back when it runs.
                incident.closed_at = event.at
        return NONE

    def rank_stepped(self, job: View, progress: RankProgress, first: bool, now: Time) -> Effects:
        last = self.last_fault
        if last is not None and last.round < job.membership.round and job.resumed_at is not None:
            last.lost_steps = max(0, last.step - job.resumed_at)
        if not first or last is None or last.closed_at is not None or job.world is None:
            return NONE  # Late word of a round that is broken does not end its incident.
        first_at = progress.first_at or progress.last_at
        assert first_at is not None
        # Times of the ranks' first steps arrive in any order; training was back at the last one.
        last.back_at = max(first_at, last.back_at or first_at)
        if job.unstepped == 0:
            last.closed_at = last.back_at
        return NONE

    def job_ended(self, job: View, result: JobResult, secure: bool, now: Time) -> Effects:
        incident = self.open_incident
        if incident is not None:
            incident.closed_at = now
            incident.action = incident.action or f"the job ended: {result.reason}"
        return NONE

    def validate(self, job: View) -> None:
        rules.validate(self.history, self.terms.max_restarts)
        book.validate(self.incidents)
