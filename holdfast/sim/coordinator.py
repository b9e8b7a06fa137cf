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
from holdfast.core.job import Job
from holdfast.core.replay import Entry, Intake, JobSnapshot, replay
from holdfast.messages.actions import (
    AnyAction,
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
    NodeResumed,
    StreamEnded,
    TaskFailed,
    Tick,
)
from holdfast.messages.hangs import Memory, PlaceMemory
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time
from holdfast.messages.wire import Ack, EvidenceTaken, Hello, Welcome
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
        self.handled: Counter[str] = Counter({JobOpened.__name__: 1})
        """Events by type."""
        self.asked: Counter[str] = Counter()
        """Requests of scripts by type."""
        self.ordered: Counter[str] = Counter()
        """Actions by type."""
        self.streams: dict[NodeId, SimStream] = {}
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

    # ---- streams ----

    def hear(self, stream: SimStream, message: Upward) -> None:
        node = stream.agent.node
        if isinstance(message, Hello):
            self._greet(stream, message)
            return
        if isinstance(message, EvidenceTaken):
            self._heard_evidence(node, message.examination)
            return
        self._heard[node] = max(self._heard.get(node, 0), message.number)
        self._post(message.event, node, message.number)

    def _greet(self, stream: SimStream, hello: Hello) -> None:
        if not self.up:
            self.cluster.network.close_above(stream)
            return
        older = self.streams.pop(hello.node, None)
        if older is not None:
            older.open_above = False
        self.streams[hello.node] = stream
        self._rounds[hello.node] = hello.round
        now, acked = self.clock.now, self.acked.get(hello.node, 0)
        self.cluster.network.send_down(stream, self._welcome(now, acked))
        # Not `if acked`: a join that is still in the inbox makes the node known all the same.
        if acked or self._heard.get(hello.node):
            resumed = NodeResumed(at=now, node=hello.node, round=hello.round, busy=hello.busy)
            self._post(resumed, hello.node)

    def _welcome(self, now: Time, acked: int) -> Welcome:
        return Welcome(job="sim", now=now, acked=acked, beat_s=1.0)

    def stream_lost(self, stream: SimStream) -> None:
        if not stream.open_above:
            return
        stream.open_above = False
        node = stream.agent.node
        if self.streams.get(node) is stream:
            del self.streams[node]
            self._post(StreamEnded(at=self.clock.now, node=node), node)

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
                acked[node] = number
                why = admission.misfit(self.job, node, self._rounds[node], event, now)
                assert why is None, f"a {type(event).__name__} of {node} was refused: {why}"
            fresh.append((event, node, number))
        intake = Intake(self.job, self.journal, self._handle)
        entries = [Entry(now, event, node if n else None, n) for event, node, n in fresh]
        for entry, actions in intake.take(entries):
            self.job = intake.job
            self._count(entry.event)
            self.cluster.invariants.event_handled(self.job, entry.event, actions, now)
            if self._crash_at_close and look.is_closed(self.job):
                self._crash_at_close, self._crash = False, "after the journal"
            self._carry_out(actions)
        self.job = intake.job
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
            if isinstance(action, CoordinatorAction):
                continue
            self.cluster.log.action(action)
            if isinstance(action, Inject) and not action.node:
                self.clock.after(0.0, self.crash, "after the journal")
            self._send(action)

    def _send(self, action: NodeAction) -> None:
        stream = self.streams.get(action.node)
        if stream is not None:
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

    # ---- visitors, and why ranks hang ----

    def ask_fault(self, injection: Injection) -> None:
        """Take in what a visitor asks for."""
        self._post(FaultAsked(at=self.clock.now, injection=injection))

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
        for stream in self.streams.values():
            self.cluster.network.close_above(stream)
        self.streams.clear()
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
        self.restarts += 1
        self._post(CoordinatorRestarted(at=self.clock.now))
