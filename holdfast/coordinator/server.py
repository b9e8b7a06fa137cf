"""One process per job that decides.

Streams come in, each from one agent. Their events go into one inbox; once in every turn of the event
loop all that are there are journaled in one transaction, each is handed to the core, and the actions
that come out are sent. So there is one order of events, it is the journal's, and nothing is acted
upon that is not written down. A deadline that the core asks for comes back to it as one more event.

A node that is silent for too long is given up, by the rules of `core.leases`: one whose cable is cut,
or whose agent does not run (stopped, or starved), so that its beats stay away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec import Struct
from msgspec.structs import replace

from holdfast.clock import JobClock
from holdfast.coordinator import admission, greeting
from holdfast.coordinator.admission import Unfit
from holdfast.coordinator.complaints import Complaints
from holdfast.coordinator.diagnosis import Examinations, fitting
from holdfast.coordinator.door import Door
from holdfast.coordinator.event_requests import EventRequests
from holdfast.coordinator.fault_requests import FaultRequests
from holdfast.coordinator.journal import Journal
from holdfast.coordinator.memories import Memories
from holdfast.coordinator.stream import Stream
from holdfast.coordinator.supply import SupplierStream
from holdfast.coordinator.tune_requests import TuneRequests
from holdfast.coordinator.wishes import scale_line
from holdfast.core import job as jobs
from holdfast.core import leases, report
from holdfast.core.chaos import plans as chaos
from holdfast.core.chaos.plans import Chaos
from holdfast.core.hangs.state import Hangs
from holdfast.core.job import Job
from holdfast.core.leases import Leases
from holdfast.core.patience import beat_s, silence_s
from holdfast.core.replay import Entry, Intake, JobSnapshot
from holdfast.core.supply import rules as supply
from holdfast.core.tuning import wording as tuning
from holdfast.core.tuning.state import Tunings
from holdfast.errors import JobUnknown
from holdfast.kernel import keep_alive
from holdfast.messages.actions import (
    Announce,
    Answered,
    AnyAction,
    CarryOutPlan,
    CloseJob,
    Diagnose,
    Examine,
    KeepEvidence,
)
from holdfast.messages.events import (
    AnyEvent,
    EventsRefused,
    FaultAsked,
    HangDecided,
    HangsRemembered,
    JobOpened,
    JobStopAsked,
    LeaseEnded,
    NodeResumed,
    ScaleAsked,
    SilenceRaised,
    StreamEnded,
    Tick,
    TuningAsked,
    VerdictReached,
)
from holdfast.messages.evidence import RankEvidence, Verdict
from holdfast.messages.hangs import Memory
from holdfast.messages.records import Incident, Terms
from holdfast.messages.units import NodeId, RoundNumber, Seconds, Time
from holdfast.messages.wire import (
    Ack,
    AskEvents,
    AskFault,
    AskHang,
    AskScale,
    AskStatus,
    AskStop,
    AskTune,
    Beat,
    HangNoted,
    Hello,
    Lease,
    Rejected,
    ScaleTaken,
    Sent,
    StatusTold,
    StopTaken,
    Visit,
    Welcome,
    Why,
)
from holdfast.tasks import BackgroundTasks, TaskFailure

log = logging.getLogger("holdfast.coordinator")

LAST_LIMIT_S = 1.0
EXAMINE_S = 1.0
STATUS_RANKS = 2_000
"""Ranks up to which an answer lists them all: a frame has a size limit."""
NOT_BEGUN = "the job has not begun: no node has joined yet"
OVER_OR_NOT_BEGUN = "the job is over, or has not begun; see `holdfast status`"
COUNTED_EVERY_S = 0.5
"""Refused events are counted in the journal this often, however many there are."""


class Arrival(Struct):
    """An event on its way to the core."""

    event: AnyEvent | Unfit
    node: NodeId | None = None
    number: int = 0
    known: RoundNumber = RoundNumber(0)
    """The round that the node's hello named."""


@dataclass
class Coordinator:
    name: str
    job: Job | None
    """None until the first node says what kind of job it is."""
    journal: Journal
    clock: JobClock
    token: str
    examinations: Examinations
    memories: Memories
    note_opened: Callable[[str], None] = lambda id: None
    """Called with the id of a job that was just opened."""
    acked: dict[NodeId, int] = field(default_factory=dict)
    complaints: Complaints = field(default_factory=Complaints)
    _door: Door = field(init=False)
    _streams: dict[NodeId, Stream] = field(default_factory=dict)
    _inbox: list[Arrival] = field(default_factory=list)
    _leases: Leases = field(init=False)
    _longest_silence_s: Seconds = 0.0
    """Longest time that a node was silent and then heard of again."""
    _timer: asyncio.TimerHandle | None = None
    _journal_trouble: str | None = None
    _told: int = 0
    _given_up: set[NodeId] = field(default_factory=set)
    """Nodes that the core is about to lose: they get no lease any more."""
    _returning: Counter[NodeId] = field(default_factory=Counter)
    """Nodes that have a new stream, and the core has not yet heard so: what it orders meanwhile is as
    lost as the old stream. It takes them to know nothing of it, and says again what still holds. Only
    answers go out: the agent takes a request that was not acknowledged when it was welcomed to be on
    its way, and does not ask again."""
    _raised_to_s: Seconds = 0.0
    """The silence that was last asked for."""
    _remembered: Memory | None = None
    """What was last written of it."""
    _visits: int = 0
    """Examinations of visitors have negative numbers."""
    _fault_requests: FaultRequests = field(init=False)
    _tune_requests: TuneRequests = field(init=False)
    _event_requests: EventRequests = field(init=False)
    _refused: Counter[str] = field(default_factory=Counter)
    """Events that did not fit their senders, by type and reason, since this was last journaled."""

    supplier: SupplierStream = field(init=False)

    def __post_init__(self) -> None:
        self.supplier = SupplierStream(
            lambda: self.job, lambda event: self._post(Arrival(event)), self.clock.now
        )
        self._fault_requests = FaultRequests(lambda: self.job)
        self._tune_requests = TuneRequests(lambda: self.job)
        self._event_requests = EventRequests(self.journal, lambda: self.job)

    async def serve(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        restarted: AnyEvent | None = None,
    ) -> int:
        """Run the job to its end; `restarted` tells the core that it had a coordinator before."""
        loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[int] = loop.create_future()
        self._parted: asyncio.Future[None] = loop.create_future()
        self._leases = Leases(loop.time())
        if restarted is not None and self.job is not None:
            members = self.job.membership
            self._leases.restarted(members.known(), members.silence_s, loop.time())
            self._told = self._told_before()
            self._post(Arrival(restarted))
        self._door = Door(listener, tls, lambda caller: Stream(self, caller), self.complaints)
        self._door.open()
        tasks = BackgroundTasks(self._task_failed)
        tasks.keep("watch for silent nodes", self._watch_silence)
        try:
            code = await self._closed
            await self._part()
            return code
        finally:
            tasks.close()
            self._door.close()

    # ---- deciding ----

    def _post(self, arrival: Arrival) -> None:
        if not self._inbox:
            asyncio.get_running_loop().call_soon(self._decide_or_end)
        self._inbox.append(arrival)

    def _decide_or_end(self) -> None:
        try:
            self._decide()
        except Exception as error:  # Better to end and be started again than to live on deaf.
            if not self._closed.done():
                self._closed.set_exception(error)

    def _decide(self) -> None:
        batch, self._inbox = self._inbox, []
        now = self.clock.now()
        assert self.job is not None
        entries = [
            Entry(now, event, arrival.node if arrival.number else None, arrival.number)
            for arrival in batch
            if self._is_new(arrival) and (event := self._fitting(arrival, now)) is not None
        ]
        intake = Intake(self.job, self.journal)
        resumed = (one.event for one in entries if isinstance(one.event, NodeResumed))
        self._returning = Counter(event.node for event in resumed)
        for entry, actions in intake.take(entries):
            if isinstance(entry.event, NodeResumed):
                self._returning[entry.event.node] -= 1
            self.job = intake.job
            for action in actions:
                self._carry_out(action)
        self.job = intake.job
        self._given_up.clear()
        self._returning.clear()
        self._note_trouble(self.journal.trouble)
        for node in {arrival.node for arrival in batch if arrival.number}:
            if node is not None and node in self._streams:
                self._streams[node].send(Ack(number=self.acked[node]))
        if self.journal.snapshot_due():
            self.journal.write_snapshot(JobSnapshot(self.job, now, self.acked))
        self._set_timer()
        self._tell_incidents()
        self._fault_requests.answer()
        self._tune_requests.answer()
        self._event_requests.written()
        self._remember()

    def _carry_out(self, action: AnyAction) -> None:
        if isinstance(action, CloseJob):
            self._closed.set_result(action.code)
        elif isinstance(action, Diagnose):
            self._diagnose(action)
        elif isinstance(action, KeepEvidence):
            self.examinations.keep(action.examination, action.incident)
        elif isinstance(action, Announce):
            log.warning("%s", action.text)
        elif isinstance(action, CarryOutPlan):
            self.supplier.send(action.plan)
        elif action.node:
            heard_of = self._returning[action.node] <= 0 or isinstance(action, Answered)
            if action.node in self._streams and heard_of:
                self._streams[action.node].send(action)
        else:  # A fault that befalls the coordinator.
            asyncio.get_running_loop().call_soon(_die)

    def _is_new(self, arrival: Arrival) -> bool:
        """False for what was sent again after a broken stream and is in the journal already."""
        if arrival.node is None or not arrival.number:
            return True
        if arrival.number <= self.acked.get(arrival.node, 0):
            return False
        self.acked[arrival.node] = arrival.number
        return True

    def _fitting(self, arrival: Arrival, now: Time) -> AnyEvent | None:
        """Return the event if it may be journaled; None if it does not fit its sender."""
        event, node = arrival.event, arrival.node
        if not isinstance(event, Unfit):
            if node is None or not arrival.number:
                return event
            assert self.job is not None
            reason = admission.misfit(self.job, node, arrival.known, event, now)
            if reason is None:
                return event
            event = Unfit(arrival.number, type(event).__name__, reason)
        assert node is not None
        self._count_refused(f"{event.what}: {event.reason}")
        if event.tolerable:
            self.complaints.say(node, event.line)
        elif node in self._streams:
            self._streams[node].refuse(event.line)
        return None

    def _count_refused(self, reason: str) -> None:
        if not self._refused:
            asyncio.get_running_loop().call_later(COUNTED_EVERY_S, self._journal_refused)
        self._refused[reason] += 1

    def _journal_refused(self) -> None:
        now = self.clock.now()
        for reason, count in self._refused.items():
            self._post(Arrival(EventsRefused(at=now, reason=reason, count=count)))
        self._refused.clear()

    def _task_failed(self, failure: TaskFailure) -> None:
        """Write down that a task of the coordinator's own raised."""
        if self.job is not None and not self._closed.done():
            self._post(Arrival(failure.event(NodeId(""), self.clock.now())))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = jobs.deadline(self.job) if self.job is not None else None
        if deadline is not None:
            delay = max(0.0, deadline - self.clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        self._post(Arrival(Tick(at=self.clock.now())))

    # ---- looking into it ----

    def _diagnose(self, action: Diagnose) -> None:
        """Have the nodes of a round look at their ranks, which go on meanwhile."""

        def closed(verdict: Verdict, evidence: list[RankEvidence]) -> None:
            reached = VerdictReached(
                at=self.clock.now(),
                cause=action.id,
                examination=action.examination,
                round=action.round,
                guilty=verdict.guilty,
                sentence=verdict.sentence,
                proof=verdict.proof,
                waiting=verdict.waiting,
                place=verdict.place,
                pause=verdict.pause,
                left_s=verdict.left_s,
            )
            self._post(Arrival(reached))

        nodes = self._ask(action.nodes, action.examination, action.native)
        self.examinations.open(
            action.examination, nodes, action.world_size, action.finished, closed
        )

    def _ask(self, nodes: Iterable[NodeId], examination: int, native: bool) -> list[NodeId]:
        """Have nodes examine their ranks; those that are there."""
        asked = [node for node in nodes if node in self._streams]
        for node in asked:
            order = Examine(node=node, examination=examination, limit_s=EXAMINE_S, native=native)
            self._streams[node].send(order)
        return asked

    def visited(self, stream: Stream, visit: Visit) -> None:
        self._door.greeted(stream.caller)
        if isinstance(visit.question, AskFault):
            self._asked_for_fault(stream, visit.question)
        elif isinstance(visit.question, AskHang):
            self._asked_about_hang(stream, visit.question)
        elif isinstance(visit.question, AskTune):
            self._asked_to_tune(stream, visit.question)
        elif isinstance(visit.question, AskStatus):
            self._asked_for_status(stream)
        elif isinstance(visit.question, AskScale):
            self._asked_to_scale(stream, visit.question)
        elif isinstance(visit.question, AskStop):
            self._asked_to_stop(stream, visit.question)
        elif isinstance(visit.question, AskEvents):
            self._event_requests.add(visit.question, stream.answer)
        else:
            self._asked_why(stream)

    def _asked_about_hang(self, stream: Stream, question: AskHang) -> None:
        """A person decides about a rank that others wait for."""
        job, rank = self.job, question.rank
        if job is None or job.world is None:
            answer: Struct = Rejected(reason="no round is in force now; see `holdfast status`")
        elif rank not in job.ranks or job.ranks[rank].finished:
            answer = Rejected(reason=f"rank {rank} is not running; see `holdfast status`")
        else:
            self._post(Arrival(HangDecided(at=self.clock.now(), rank=rank, act=question.act)))
            what = "is ended now, and the round repaired" if question.act else "is left alone"
            answer = HangNoted(text=f"rank {rank} {what}")
        stream.answer(answer)

    def _asked_for_status(self, stream: Stream) -> None:
        job, now = self.job, self.clock.now()
        if job is None:
            stream.answer(Rejected(reason=NOT_BEGUN))
            return
        status = report.status(job, now, alive=True)
        if len(job.ranks) > STATUS_RANKS:
            status = replace(status, nodes=[])
        told = StatusTold(
            status=status,
            goodput=report.goodput(job, now),
            incident=report.incident_report(job, job.incidents[-1]) if job.incidents else None,
        )
        stream.answer(told)

    def _asked_to_scale(self, stream: Stream, question: AskScale) -> None:
        """Somebody wants another number of nodes."""
        job = self.job
        wrong = OVER_OR_NOT_BEGUN
        if job is not None and job.result is None:
            wrong = supply.refusal(job.terms, question.min_nodes, question.max_nodes)
        if wrong or job is None:
            stream.answer(Rejected(reason=wrong))
            return
        asked = ScaleAsked(
            at=self.clock.now(),
            min_nodes=question.min_nodes,
            max_nodes=question.max_nodes,
            spares=question.spares,
            by=question.by,
        )
        line = scale_line(job, question)
        self._post(Arrival(asked))
        stream.answer(ScaleTaken(line=line))

    def _asked_to_stop(self, stream: Stream, question: AskStop) -> None:
        """Somebody wants the job to end, with its newest snapshots saved."""
        job = self.job
        if job is None or job.result is not None:
            stream.answer(Rejected(reason=OVER_OR_NOT_BEGUN))
            return
        asked = JobStopAsked(
            at=self.clock.now(), reason=question.reason, code=question.code, by=question.by
        )
        self._post(Arrival(asked))
        stream.answer(StopTaken(line=f"job {self.name} is being ended: {question.reason}"))

    def _asked_for_fault(self, stream: Stream, question: AskFault) -> None:
        """A user requests a fault."""
        job, injection = self.job, question.injection
        wrong = OVER_OR_NOT_BEGUN
        if job is not None and job.result is None:
            world = job.world
            wrong = chaos.refusal(job.of(Chaos), injection, world, job.highest, job.ranks)

        if wrong or job is None:
            stream.answer(Rejected(reason=wrong))
            return
        number = self._fault_requests.add(stream.answer)
        asked = FaultAsked(at=self.clock.now(), injection=injection, visit=number)
        self._post(Arrival(asked))

    def _asked_to_tune(self, stream: Stream, question: AskTune) -> None:
        """A user wants other settings for loaders."""
        job, config, auto = self.job, question.config, question.auto
        wrong = OVER_OR_NOT_BEGUN
        if job is not None and job.result is None:
            wrong = tuning.refusal(job.of(Tunings), question.dataset, config, auto)
        if wrong or job is None:
            stream.answer(Rejected(reason=wrong))
            return
        dataset = tuning.chosen(job.of(Tunings), question.dataset)
        number = self._tune_requests.add(dataset, stream.answer)
        asked = TuningAsked(
            at=self.clock.now(),
            dataset=dataset,
            config=config,
            auto=auto,
            by=question.by,
            visit=number,
        )
        self._post(Arrival(asked))

    def _asked_why(self, stream: Stream) -> None:
        """Somebody wants to know why the job stands still, or whether it does."""
        job = self.job
        if job is None or job.world is None:
            reason = "no round is in force now; see `holdfast status`"
            stream.answer(Rejected(reason=reason))
            return
        self._visits -= 1

        def closed(verdict: Verdict, evidence: list[RankEvidence]) -> None:
            why = Why(
                verdict=verdict,
                evidence=tuple(evidence),
                suspicion=report.suspicion(job, self.clock.now()),
                detects=job.terms.hangs.detect,
            )
            stream.answer(fitting(why))

        finished = [rank for rank, one in job.ranks.items() if one.finished]
        nodes = self._ask(job.membership.placed, self._visits, native=True)
        self.examinations.open(self._visits, nodes, len(job.ranks), finished, closed)

    def _remember(self) -> None:
        """Keep what was learnt about places where ranks pause, for when the job is queued again."""
        assert self.job is not None
        memory = self.job.of(Hangs).memory
        if memory is not self._remembered:
            self._remembered = memory
            self.memories.write(memory)

    # ---- telling people ----

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble == self._journal_trouble:
            return
        if trouble is not None:
            log.error("the journal cannot be written (%s); training goes on without it", trouble)
        else:
            log.warning("the journal can be written again; nothing is missing from it")
        self._journal_trouble = trouble

    def _tell_incidents(self) -> None:
        assert self.job is not None
        for incident in _over(self.job.incidents[self._told :]):
            log.info("%s", report.incident_line(self.job, incident))
            self._told += 1

    def _told_before(self) -> int:
        """How many incidents the coordinator before this one has told of."""
        return len(_over(self.job.incidents)) if self.job is not None else 0

    # ---- streams ----

    def connected(self, stream: Stream) -> None:
        keep_alive(stream.transport.get_extra_info("socket"), beat_s(len(self._streams)))

    def let_in(self, stream: Stream) -> None:
        """A caller that is no node has shown the token."""
        self._door.greeted(stream.caller)

    def refusal(self, hello: Hello) -> str | None:
        """Say why a node may not join; None if it may."""
        self._check_job(hello)
        older = self._streams.get(hello.node)
        if older is not None and older.number >= hello.stream:
            return (
                "another process that is connected has this id; was the machine or its memory copied"
                " while the agent ran? Start this node's launcher again"
            )
        known = hello.node in self.acked
        refusal = greeting.refusal(hello, self.job, known)
        if refusal is None and not known and self.job is not None:
            for remark in greeting.remarks(hello.terms, self.job.terms):
                self.complaints.say(hello.node, remark)
        return refusal

    def greeted(self, stream: Stream, hello: Hello) -> None:
        self._door.greeted(stream.caller)
        now, older = self.clock.now(), self._streams.get(hello.node)
        if self.job is None:
            self.open(hello.terms, now)
        assert self.job is not None
        self._streams[hello.node] = stream
        self._leases.begin(hello.node, stream.remote, asyncio.get_running_loop().time())
        self._raise_silence()
        if older is not None:
            older.abort()
        acked = self.acked.get(hello.node, 0)
        stream.send(
            Welcome(
                job=self.name,
                job_id=self.job.id,
                now=now,
                acked=acked,
                beat_s=beat_s(len(self._streams)),
                direct=stream.direct,
            )
        )
        if acked or hello.acked or any(one.node == hello.node for one in self._inbox):
            resumed = NodeResumed(
                at=now,
                node=hello.node,
                round=hello.round,
                busy=hello.busy,
                missing=max(0, hello.acked - acked),
            )
            self._post(Arrival(resumed, hello.node))

    def _check_job(self, hello: Hello) -> None:
        """Refuse a node that trains in a job which this coordinator's journal knows nothing of."""
        if hello.job_id and (self.job is None or hello.job_id != self.job.id):
            raise JobUnknown(
                f"this coordinator's journal ({self.journal.path}) knows nothing of the job that"
                f" {hello.node} trains in (id {hello.job_id}, round {hello.round}); was the journal"
                " removed, or HOLDFAST_HOME changed? Put it back and restart the coordinator, or stop"
                " the node and start the job again"
            )

    def open(self, terms: Terms, at: Time) -> None:
        """The job begins."""
        opened = JobOpened(at=at, job=self.name, id=secrets.token_hex(8), terms=terms)
        self.journal.append([Entry(opened.at, opened)])
        self._note_trouble(self.journal.trouble)
        self.note_opened(opened.id)
        self.job = jobs.opened(opened)
        memory = self.memories.read()
        if memory.places:
            self._post(Arrival(HangsRemembered(at=at, memory=memory)))

    def arrived(self, stream: Stream, message: Sent) -> None:
        self._post(Arrival(message.event, stream.node, message.number, stream.round))

    def arrived_unfit(self, stream: Stream, unfit: Unfit) -> None:
        self._post(Arrival(unfit, stream.node, unfit.number))

    def heard(self, stream: Stream) -> None:
        """Note a sign of life. One that comes after a long silence shows that machines are busy."""
        assert stream.node is not None
        silent_s = self._leases.hear(stream.node, asyncio.get_running_loop().time())
        if silent_s > self._longest_silence_s:
            self._longest_silence_s = silent_s
            self._raise_silence()

    def _raise_silence(self) -> None:
        """Give nodes more time from now on if there are more of them, or they are busier."""
        assert self.job is not None
        wanted_s = silence_s(len(self._streams), self._longest_silence_s)
        if wanted_s > max(self.job.membership.silence_s, self._raised_to_s):
            self._raised_to_s = wanted_s
            self._post(Arrival(SilenceRaised(at=self.clock.now(), silence_s=wanted_s)))

    def beaten(self, stream: Stream, beat: Beat) -> None:
        """Answer a beat: the node keeps its places. No more is promised than is in the journal."""
        assert stream.node is not None
        assert self.job is not None
        members, terms = self.job.membership, self.job.terms
        given_up = stream.node in self._given_up
        for_s = leases.lease_s(members.silence_s) if terms.max_nodes + terms.spares > 1 else 0.0
        round = RoundNumber(0) if given_up else members.round_of(stream.node)
        every_s = beat_s(len(self._streams))
        stream.send(Lease(beat=beat.number, round=round, for_s=for_s, beat_s=every_s))

    def disconnected(self, stream: Stream) -> None:
        self._door.gone(stream.caller)
        if stream.supplies and not self._closed.done():
            self.supplier.disconnected(stream)
        if stream.node is not None and self._streams.get(stream.node) is stream:
            del self._streams[stream.node]
            if self._closed.done():
                if not self._streams and not self._parted.done():
                    self._parted.set_result(None)
            else:
                silent_s = self._leases.silent_s(stream.node, asyncio.get_running_loop().time())
                now = self.clock.now()
                gone = stream.closed_by_peer and stream.direct
                since = now if gone else Time(now - silent_s)
                self._post(Arrival(StreamEnded(at=since, node=stream.node)))
                if gone:  # Only a process that ends closes its stream without a word.
                    self._end_lease(stream.node, "its agent died")

    def _end_lease(self, node: NodeId, why: str) -> None:
        self._leases.forget(node)
        self._given_up.add(node)
        self._post(Arrival(LeaseEnded(at=self.clock.now(), node=node, why=why)))

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(leases.LOOK_EVERY_S)
            if self.job is not None:
                self._give_up_silent(self.job, loop.time())

    def _give_up_silent(self, job: Job, now: float) -> None:
        members = job.membership
        self._leases.attend(dict.fromkeys(members.known()), self._streams)
        for node in self._leases.look(now, members.silence_s, job.can_do_without):
            silent_s = self._leases.silent_s(node, now)
            stream = self._streams.get(node)
            if stream is not None:
                stream.cut_off(f"not heard of for {silent_s:.1f} s")
                self.disconnected(stream)
            self._end_lease(node, f"it was not heard of for {silent_s:.1f} s")

    async def _part(self) -> None:
        """Send what is still to be sent, and let every stream end in its own way."""
        self.supplier.close()
        self._event_requests.close()
        for stream in self._streams.values():
            stream.transport.close()
        if self._streams:
            await asyncio.wait({self._parted}, timeout=LAST_LIMIT_S)


def _over(incidents: Sequence[Incident]) -> list[Incident]:
    """Those before the first that is not over: they are told of in their order."""
    return list(takewhile(lambda incident: incident.closed_at is not None, incidents))


def _die() -> None:
    """Somebody wants to see how the job does without us."""
    os.kill(os.getpid(), signal.SIGKILL)
