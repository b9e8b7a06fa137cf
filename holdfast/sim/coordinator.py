"""Simulates the coordinator: `holdfast.coordinator.server` without sockets, around the real core.

Arrivals wait in one inbox; they are journaled together, handed to the core one by one, and the actions
go out. The journal is a list of encoded entries and now and then an encoded state, as in
`holdfast.coordinator.journal`, so a crash means to forget the job and to replay them.

When ranks hang, all agents send evidence before they stop their workers; the verdict comes once all
have, or when its time is up. The simulated evidence is empty, the verdict is the truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.coordinator import admission
from holdfast.coordinator.journal import SNAPSHOT_EVERY
from holdfast.core import job as jobs
from holdfast.core import leases
from holdfast.core.job import Job
from holdfast.core.leases import Leases
from holdfast.core.replay import Entry, Intake, JobSnapshot, replay
from holdfast.messages.actions import (
    Answered,
    AnyAction,
    CarryOutPlan,
    CloseJob,
    CoordinatorAction,
    Diagnose,
    Examine,
    Inject,
    NodeAction,
)
from holdfast.messages.chaos import Injection
from holdfast.messages.events import (
    AnyEvent,
    Asked,
    CoordinatorRestarted,
    EventSetAside,
    EventsRefused,
    FaultAsked,
    HangDecided,
    HangsRemembered,
    JobOpened,
    JobRequeued,
    JobStopAsked,
    LeaseEnded,
    NodeResumed,
    NodesSighted,
    ScaleAsked,
    SilenceRaised,
    StreamEnded,
    TaskFailed,
    Tick,
    TuningAsked,
)
from holdfast.messages.hangs import Memory, PlaceMemory
from holdfast.messages.records import Terms
from holdfast.messages.supply import SupplyPlan
from holdfast.messages.tuning import LoaderConfig
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time
from holdfast.messages.wire import Ack, Beat, EvidenceTaken, Hello, Lease, Welcome
from holdfast.sim import look
from holdfast.sim.network import SimStream, Upward

MEMORY = Memory(places={"train.py:7 (main)": PlaceMemory(seen=3, still_s=2.0)})
"""What an earlier run of the job has learnt."""

FAILED_TASK = TaskFailed(
    at=Time(0.0), node=NodeId(""), task="watch for silent nodes", error="OSError: x", traceback=""
)

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster, Log

SNAPSHOT_PER_RANK = 4
"""Events of each rank between two encoded states: a state costs as much as they do."""

VERDICT_LIMIT_S: Seconds = 1.5

CrashPoint = Literal["before the journal", "after the journal", "half-way through the actions"]

_encoder = msgspec.json.Encoder()
_entry_decoder = msgspec.json.Decoder(Entry)
_snapshot_decoder = msgspec.json.Decoder(JobSnapshot)


class HandlerError(Exception):
    """A handler of the core was made to raise."""


class MemoryJournal:
    """Encoded entries since the newest encoded state."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._state: bytes | None = None
        self._entries: list[bytes] = []

    def append(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            encoded = _encoder.encode(entry)
            self._entries.append(encoded)
            self._log.event(encoded)

    def snapshot_if_due(self, job: Job, at: Time, acked: dict[NodeId, int]) -> None:
        if len(self._entries) >= max(SNAPSHOT_EVERY, SNAPSHOT_PER_RANK * look.rank_count(job)):
            self._state = _encoder.encode(JobSnapshot(job, at, acked))
            self._entries.clear()

    def read(self) -> tuple[JobSnapshot | None, Iterator[Entry]]:
        snapshot = None if self._state is None else _snapshot_decoder.decode(self._state)
        return snapshot, map(_entry_decoder.decode, self._entries)


class SimCoordinator:
    """The coordinator: it hears, journals, decides, acts, and may die at any of these points."""

    def __init__(self, cluster: Cluster, terms: Terms) -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.journal = MemoryJournal(cluster.log)
        opened = JobOpened(at=self.clock.now, job="sim", terms=terms)
        self.journal.append([Entry(opened.at, opened)])
        self.job = jobs.opened(opened)
        self.acked: dict[NodeId, int] = {}
        self.up = True
        self.up_since: float = self.clock.now
        self.closed: CloseJob | None = None
        self.events = 0
        self.restarts = 0
        self._requeued = False
        """Whether it died with all nodes, and comes back as a job that the platform queued anew."""
        self.handled: Counter[str] = Counter({JobOpened.__name__: 1})
        """Events by type."""
        self.asked: Counter[str] = Counter()
        """Requests of scripts by type."""
        self.ordered: Counter[str] = Counter()
        """Actions by type."""
        self.streams: dict[NodeId, SimStream] = {}
        self.stands_until = 0.0
        """Until when it does not run (stopped, or starved)."""
        self.refused_streams = 0
        self._leases = Leases(self.clock.now)
        self._given_up: set[NodeId] = set()
        self._returning: Counter[NodeId] = Counter()
        """Nodes that have a new stream of which the core has not heard yet."""
        self._looking = False
        self._heard: dict[NodeId, int] = {}
        self._rounds: dict[NodeId, RoundNumber] = {}
        """The round that each node's hello named."""
        self._inbox: list[tuple[AnyEvent, NodeId | None, int]] = []
        self._deciding = False
        self._life = 0
        self._timer_at: Time | None = None
        self._timers = 0
        self._crash: CrashPoint | None = None
        self._examining: dict[int, tuple[Diagnose, set[NodeId]]] = {}
        """Nodes whose evidence is still to come, by incident; negative numbers are of visitors."""
        self._visits = 0
        self._handler_errors = Random(f"handlers {cluster.settings.seed}")
        # Its own source, and one draw: whether the last words are written and not acted upon.
        draw = Random(f"close {cluster.settings.seed}").random()
        self._crash_at_close = draw < cluster.schedule.crash_at_close
        if cluster.settings.faults == "chaos":
            now = self.clock.now
            self.clock.after(0.0, self._post, HangsRemembered(at=now, memory=MEMORY))
            self.clock.after(0.0, self._post, EventsRefused(at=now, reason="Progress: x", count=2))
            self.clock.after(0.0, self._post, FAILED_TASK)
            raised = SilenceRaised(at=now, silence_s=2 * look.silence_s(self.job))
            self.clock.after(60.0, self._post, raised)

    # ---- streams ----

    def hear(self, stream: SimStream, message: Upward) -> None:
        node = stream.agent.node
        if isinstance(message, Hello):
            self._greet(stream, message)
            return
        if isinstance(message, EvidenceTaken):
            self._heard_evidence(node, message.examination)
            return
        if isinstance(message, Beat):
            self._lend(stream, message)
            return
        self._heard[node] = max(self._heard.get(node, 0), message.number)
        self._post(message.event, node, message.number)

    def _greet(self, stream: SimStream, hello: Hello) -> None:
        if not self.up:
            self.cluster.network.close_above(stream)
            return
        older = self.streams.get(hello.node)
        if older is not None and older.number >= hello.stream:
            self.refused_streams += 1
            self.cluster.network.close_above(stream)
            return
        if older is not None:
            older.open_above = False
        self.streams[hello.node] = stream
        self._leases.begin(hello.node, True, self.clock.now)
        self._rounds[hello.node] = hello.round
        now, acked = self.clock.now, self.acked.get(hello.node, 0)
        self.cluster.network.send_down(stream, self._welcome(now, acked))
        # Not `if acked`: a join that is still in the inbox makes the node known all the same.
        if acked or self._heard.get(hello.node) or hello.acked:
            lost = max(0, hello.acked - max(acked, self._heard.get(hello.node, 0)))
            self.cluster.invariants.demand(not lost, f"{lost} events of {hello.node} are lost")
            resumed = NodeResumed(at=now, node=hello.node, round=hello.round, busy=hello.busy)
            self._post(resumed, hello.node)

    def _welcome(self, now: Time, acked: int) -> Welcome:
        return Welcome(job="sim", job_id="", now=now, acked=acked, beat_s=1.0)

    def stream_lost(self, stream: SimStream, closed: bool = False) -> None:
        """Note the end of a stream; one that was closed proves that its agent is dead."""
        if not stream.open_above:
            return
        stream.open_above = False
        node = stream.agent.node
        if self.streams.get(node) is stream:
            del self.streams[node]
            self._post(StreamEnded(at=self.clock.now, node=node), node)
            if closed:
                self._end_lease(node, "its agent died")
            elif stream.agent.unreachable_until <= self.clock.now and not stream.agent.dead:
                self._leases.heard[node] = self.clock.now - stream.agent.beat_ago_s
            self.watch()

    # ---- leases ----

    def silent_since(self, node: NodeId, beat_at: float) -> None:
        """Note when a node was last heard of that cannot be reached now."""
        if node in self.streams and self.up:
            self._leases.heard[node] = beat_at
            self.watch()

    def watch(self) -> None:
        """Look for silent nodes as often as the coordinator does, while there may be any."""
        if not self._looking and self.up:
            self._looking = True
            self._leases.looked_at = self.clock.now
            self.clock.after(leases.LOOK_EVERY_S, self._look, self._life)

    def _look(self, life: int) -> None:
        now = self.clock.now
        if life != self._life or self.closed is not None:
            return
        if self.stands_until > now:
            self.clock.at(self.stands_until, self._look, life)
            return
        heard = {
            node
            for node, stream in self.streams.items()
            if not stream.agent.dead and stream.agent.unreachable_until <= now
        }
        for node in self.streams:
            if node in heard:
                self._leases.hear(node, now)
        self._leases.attend(dict.fromkeys(look.known(self.job)), self.streams)
        silence_s = look.silence_s(self.job)
        for node in self._leases.look(now, silence_s, self.job.can_do_without):
            silent = self.streams.get(node)
            if silent is not None:
                self.cluster.network.close_above(silent)
                del self.streams[node]
                self._post(StreamEnded(at=Time(now), node=node), node)
            self._end_lease(node, "it was not heard of")
        self._looking = not self._leases.heard.keys() <= heard
        if self._looking:
            self.clock.after(leases.LOOK_EVERY_S, self._look, life)

    def _end_lease(self, node: NodeId, why: str) -> None:
        self._leases.forget(node)
        self._given_up.add(node)
        self._post(LeaseEnded(at=self.clock.now, node=node, why=why), node)

    def _lend(self, stream: SimStream, beat: Beat) -> None:
        node = stream.agent.node
        round = RoundNumber(0) if node in self._given_up else look.placed_round(self.job, node)
        for_s = leases.lease_s(look.silence_s(self.job))
        self.cluster.network.send_down(
            stream, Lease(beat=beat.number, round=round, for_s=for_s, beat_s=1.0)
        )

    def stand(self, lasts_s: Seconds) -> None:
        """Do not run for a while; what arrives waits."""
        self.stands_until = max(self.stands_until, self.clock.now + lasts_s)

    # ---- deciding ----

    def _post(self, event: AnyEvent, node: NodeId | None = None, number: int = 0) -> None:
        if not self.up:
            return
        self._inbox.append((event, node, number))
        if not self._deciding:
            self._deciding = True
            self.clock.after(self.cluster.chance.batch_s(), self._decide, self._life)

    def _decide(self, life: int) -> None:
        if life != self._life or self.closed is not None:
            return
        if self.stands_until > self.clock.now:
            self.clock.at(self.stands_until, self._decide, life)
            return
        self._deciding = False
        batch, self._inbox = self._inbox, []
        if self._crash == "before the journal":
            self._die()
            return
        now = self.clock.now
        fresh = []
        acked = self.acked
        for event, node, number in batch:
            if node is not None and number:
                if number <= acked.get(node, 0):
                    self.cluster.invariants.duplicates += 1
                    continue
                gap = number != acked.get(node, 0) + 1
                self.cluster.invariants.demand(
                    not gap, f"events of {node} before {number} are lost"
                )
                acked[node] = number
                why = admission.misfit(self.job, node, self._rounds[node], event, now)
                assert why is None, f"a {type(event).__name__} of {node} was refused: {why}"
            fresh.append((event, node, number))
        intake = Intake(self.job, self.journal, self._handle)
        entries = [Entry(now, event, node if n else None, n) for event, node, n in fresh]
        resumed = (event for event, *_ in fresh if isinstance(event, NodeResumed))
        self._returning = Counter(event.node for event in resumed)
        for entry, actions in intake.take(entries):
            if isinstance(entry.event, NodeResumed):
                self._returning[entry.event.node] -= 1
            self.job = intake.job
            self._count(entry.event)
            if isinstance(entry.event, NodesSighted) and self.cluster.platform is not None:
                self.cluster.platform.heard_of(entry.event.sightings)
            self.cluster.invariants.event_handled(self.job, entry.event, actions, now)
            if self._crash_at_close and look.is_closed(self.job):
                self._crash_at_close, self._crash = False, "after the journal"
            self._carry_out(actions)
        self.job = intake.job
        self._given_up.clear()
        self._returning.clear()
        if self._crash is not None:
            self._die()
            return
        self._acknowledge(fresh)
        self.journal.snapshot_if_due(self.job, now, self.acked)
        self._set_timer()

    def _handle(self, job: Job, event: AnyEvent, now: Time) -> list[AnyAction]:
        """Have the core take an event in; some handlers raise when they have changed the job."""
        actions = jobs.handle(job, event, now)
        share = self.cluster.schedule.handler_errors
        spared = isinstance(event, EventSetAside)  # A replay could not know that it failed once.
        if share and not spared and self._handler_errors.random() < share:
            raise HandlerError(f"the handler of {type(event).__name__} was made to raise")
        return actions

    def _count(self, event: AnyEvent) -> None:
        self.events += 1
        self.handled[type(event).__name__] += 1
        if isinstance(event, Asked):
            self.asked[type(event.request).__name__] += 1

    def _carry_out(self, actions: list[AnyAction]) -> None:
        if self._crash == "after the journal":
            return
        if self._crash is not None:
            actions = actions[: len(actions) // 2]
        for action in actions:
            self.ordered[type(action).__name__] += 1
            if isinstance(action, CloseJob):
                self.closed = action
            if isinstance(action, Diagnose):
                self._examine(action)
            if isinstance(action, CarryOutPlan):
                self._send_plan(action.plan)
            if isinstance(action, CoordinatorAction):
                continue
            self.cluster.log.action(action)
            if isinstance(action, Inject) and not action.node:
                self.clock.after(0.0, self.crash, "after the journal")
            self._send(action)

    def _send(self, action: NodeAction) -> None:
        stream = self.streams.get(action.node)
        heard_of = self._returning[action.node] <= 0 or isinstance(action, Answered)
        if stream is not None and heard_of:
            self.cluster.network.send_down(stream, action)

    def _acknowledge(self, fresh: list[tuple[AnyEvent, NodeId | None, int]]) -> None:
        told: dict[NodeId, int] = {node: n for _, node, n in fresh if node is not None and n}
        for node, number in told.items():
            stream = self.streams.get(node)
            if stream is None:
                continue
            if self.cluster.settings.coarse:  # The way back costs time and tells nothing new.
                stream.agent.acked(number)
            else:
                self.cluster.network.send_down(stream, Ack(number=number))

    def _set_timer(self) -> None:
        deadline = jobs.deadline(self.job)
        if deadline == self._timer_at:
            return
        self._timer_at = deadline
        self._timers += 1
        if deadline is not None:
            self.clock.at(deadline, self._on_deadline, self._timers, self._life)

    def _on_deadline(self, timer: int, life: int) -> None:
        if timer == self._timers and life == self._life:
            self._timer_at = None
            self._post(Tick(at=self.clock.now))

    # ---- the supplier ----

    def hear_supplier(self, event: AnyEvent) -> None:
        """Take in what the supplier says, or its coming and going."""
        self._post(event)

    def _send_plan(self, plan: SupplyPlan) -> None:
        platform = self.cluster.platform
        if platform is not None:
            self.cluster.invariants.planned(plan)
            platform.supplier.hear(plan)

    def be_requeued(self) -> None:
        """Die with all nodes, and be started again as the same job."""
        if self.up and self.closed is None:
            self._requeued = True
            self.crash("after the journal")

    # ---- visitors, and why ranks hang ----

    def ask_scale(self, least: int, most: int) -> None:
        """Take in that a visitor wants another number of nodes."""
        self._post(ScaleAsked(at=self.clock.now, min_nodes=least, max_nodes=most, by="a visitor"))

    def ask_stop(self) -> None:
        """Take in that a visitor wants the job to end."""
        self._post(JobStopAsked(at=self.clock.now, reason="a visitor stopped the job", code=75))

    def ask_fault(self, injection: Injection) -> None:
        """Take in what a visitor asks for."""
        self._post(FaultAsked(at=self.clock.now, injection=injection))

    def ask_tune(self, dataset: str, config: LoaderConfig) -> None:
        """Take in the loader settings that a visitor asks for."""
        event = TuningAsked(at=self.clock.now, dataset=dataset, config=config, by="a visitor")
        self._post(event)

    def ask_hang(self, rank: Rank, act: bool) -> None:
        """Take in what a person decides about a rank."""
        self._post(HangDecided(at=self.clock.now, rank=rank, act=act))

    def ask_why(self) -> None:
        """Have all nodes look at their workers, for a visitor."""
        if self.up and self.streams:
            self._visits -= 1
            for node in self.streams:
                action = Examine(node=node, examination=self._visits, limit_s=VERDICT_LIMIT_S)
                self.ordered["Examine"] += 1
                self.cluster.log.action(action)
                self._send(action)

    def _examine(self, asked: Diagnose) -> None:
        """Have the nodes of the round look at their workers, for the core."""
        nodes = [node for node in asked.nodes if node in self.streams]
        self._examining[asked.examination] = (asked, set(nodes))
        self.clock.after(VERDICT_LIMIT_S, self._reach_verdict, asked, self._life)
        for node in nodes:
            order = Examine(node=node, examination=asked.examination, limit_s=VERDICT_LIMIT_S)
            self.ordered["Examine"] += 1
            self.cluster.log.action(order)
            self._send(order)

    def _heard_evidence(self, node: NodeId, examination: int) -> None:
        asked, unheard = self._examining.get(examination, (None, set[NodeId]()))
        unheard.discard(node)
        if asked is not None and not unheard:
            self._reach_verdict(asked, self._life)

    def _reach_verdict(self, asked: Diagnose, life: int) -> None:
        """Judge as far as the nodes have answered by now."""
        if life == self._life and self._examining.pop(asked.examination, None) is not None:
            self._post(self.cluster.verdict(asked, self.clock.now))

    # ---- dying ----

    def crash(self, point: CrashPoint) -> None:
        """Die when the next events are taken in, at that point; at once when there are none."""
        if not self.up or self.closed is not None:
            return
        self._crash = point
        if not self._deciding:
            self._die()

    def _die(self) -> None:
        self.up = False
        self._crash = None
        self._life += 1
        self._deciding = False
        self._inbox.clear()
        self._heard.clear()
        self._examining.clear()
        self._timer_at = None
        self._given_up.clear()
        self._looking = False
        for stream in self.streams.values():
            self.cluster.network.close_above(stream)
        self.streams.clear()
        if self.cluster.platform is not None:
            self.cluster.platform.supplier.cut()
        self.clock.after(self.cluster.chance.coordinator_down_s(), self._come_back)

    def _come_back(self) -> None:
        before = _encoder.encode(self.job)
        again = replay(self.journal.read)
        assert again is not None
        self.cluster.invariants.replayed(
            before, _encoder.encode(again.job), self.acked, again.acked
        )
        self.job, self.acked = again.job, again.acked
        self.up, self.up_since = True, self.clock.now
        self._leases = Leases(self.clock.now)
        members, silence_s = look.known(self.job), look.silence_s(self.job)
        self._leases.restarted(members, silence_s, self.clock.now)
        self.watch()
        self.restarts += 1
        now = self.clock.now
        requeued, self._requeued = self._requeued, False
        self._post(
            JobRequeued(at=now, since=again.at) if requeued else CoordinatorRestarted(at=now)
        )
