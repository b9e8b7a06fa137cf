"""A simulated coordinator: `holdfast.coordinator.server` without sockets, around the real core.

Arrivals wait in one inbox; what is there is journaled together, handed to the core one by one, and
the actions go out. The journal is a list of encoded entries and now and then an encoded state, as in
`holdfast.coordinator.journal`, so a crash is nothing but forgetting the job and replaying them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.coordinator.journal import SNAPSHOT_EVERY
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.replay import Entry, Intake, JobSnapshot, replay
from holdfast.core.states import Ended
from holdfast.messages.actions import AnyAction, CloseJob, CoordinatorAction
from holdfast.messages.events import (
    AnyEvent,
    CoordinatorRestarted,
    JobOpened,
    NodeResumed,
    StreamEnded,
    Tick,
)
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, Time
from holdfast.messages.wire import Ack, Hello, Welcome
from holdfast.sim.network import Stream, Upward

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster, Log

SNAPSHOT_PER_RANK = 4
"""A state is written at most once per so many events of each rank: it costs as much as they do."""

CrashPoint = Literal["before the journal", "after the journal", "half-way through the actions"]

_encoder = msgspec.json.Encoder()
_entry_decoder = msgspec.json.Decoder(Entry)
_snapshot_decoder = msgspec.json.Decoder(JobSnapshot)


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
        if len(self._entries) >= max(SNAPSHOT_EVERY, SNAPSHOT_PER_RANK * len(job.ranks)):
            self._state = _encoder.encode(JobSnapshot(job, at, acked))
            self._entries.clear()

    def read(self) -> tuple[JobSnapshot | None, Iterator[Entry]]:
        snapshot = None if self._state is None else _snapshot_decoder.decode(self._state)
        return snapshot, map(_entry_decoder.decode, self._entries)


class SimCoordinator:
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
        self.streams: dict[NodeId, Stream] = {}
        self._heard: dict[NodeId, int] = {}
        self._inbox: list[tuple[AnyEvent, NodeId | None, int]] = []
        self._deciding = False
        self._life = 0
        self._timer_at: Time | None = None
        self._timers = 0
        self._crash: CrashPoint | None = None
        # Its own source, and one draw: whether the last words are written and not acted upon.
        draw = Random(f"close {cluster.settings.seed}").random()
        self._crash_at_close = draw < cluster.schedule.crash_at_close

    # ---- streams ----

    def hear(self, stream: Stream, message: Upward) -> None:
        node = stream.agent.node
        if isinstance(message, Hello):
            self._greet(stream, message)
            return
        self._heard[node] = max(self._heard.get(node, 0), message.number)
        self._post(message.event, node, message.number)

    def _greet(self, stream: Stream, hello: Hello) -> None:
        if not self.up:
            self.cluster.network.close_above(stream)
            return
        older = self.streams.pop(hello.node, None)
        if older is not None:
            older.open_above = False
        self.streams[hello.node] = stream
        now, acked = self.clock.now, self.acked.get(hello.node, 0)
        self.cluster.network.send_down(stream, self._welcome(now, acked))
        # Not `if acked`: a join that is still in the inbox makes the node known all the same.
        if acked or self._heard.get(hello.node):
            resumed = NodeResumed(at=now, node=hello.node, round=hello.round, busy=hello.busy)
            self._post(resumed, hello.node)

    def _welcome(self, now: Time, acked: int) -> Welcome:
        return Welcome(job="sim", now=now, acked=acked, beat_s=1.0)

    def stream_lost(self, stream: Stream) -> None:
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
                    self.cluster.watch.duplicates += 1
                    continue
                acked[node] = number
            fresh.append((event, node, number))
        intake = Intake(self.job, self.journal)
        entries = [Entry(now, event, node if n else None, n) for event, node, n in fresh]
        for entry, actions in intake.take(entries):
            self.job = intake.job
            self.events += 1
            self.cluster.watch.event_handled(self.job, entry.event, actions, now)
            if self._crash_at_close and isinstance(self.job.state, Ended):
                self._crash_at_close, self._crash = False, "after the journal"
            self._carry_out(actions)
        if self._crash is not None:
            self._die()
            return
        self._acknowledge(fresh)
        self.journal.snapshot_if_due(self.job, now, self.acked)
        self._set_timer()

    def _carry_out(self, actions: list[AnyAction]) -> None:
        if self._crash == "after the journal":
            return
        if self._crash is not None:
            actions = actions[: len(actions) // 2]
        for action in actions:
            if isinstance(action, CloseJob):
                self.closed = action
            if isinstance(action, CoordinatorAction):
                continue
            self.cluster.log.action(action)
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
        self._timer_at = None
        for stream in self.streams.values():
            self.cluster.network.close_above(stream)
        self.streams.clear()
        self.clock.after(self.cluster.chance.coordinator_down_s(), self._come_back)

    def _come_back(self) -> None:
        before = _encoder.encode(self.job)
        again = replay(self.journal.read)
        assert again is not None
        self.cluster.watch.replayed(before, _encoder.encode(again.job), self.acked, again.acked)
        self.job, self.acked = again.job, again.acked
        self.up, self.up_since = True, self.clock.now
        self.restarts += 1
        self._post(CoordinatorRestarted(at=self.clock.now))
