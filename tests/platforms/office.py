"""A coordinator and the nodes of a job, small enough for thousands of faults in a few seconds.

The core, its journal and replay, the coordinator's side of the supplier's stream and the wire are the
real ones. What stands around them is small: nodes that join for a request, do as they are told, and
know nothing of processes; a loop that journals, decides and acts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct
from simtime import JumpingLoop

from holdfast.coordinator.supply import SupplierStream
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.replay import Entry, Intake, replay
from holdfast.messages.actions import (
    AnyAction,
    CarryOutPlan,
    CloseJob,
    Finish,
    StartWorkers,
    StopWorkers,
)
from holdfast.messages.events import (
    AnyEvent,
    CoordinatorRestarted,
    EventSetAside,
    JobOpened,
    LeaseEnded,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeResumed,
    NodesSighted,
    Progress,
    StreamEnded,
    Tick,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, RankProgress, Terms
from holdfast.messages.supply import RequestId, SupplyPlan
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import FromSupplier, SupplierHello
from holdfast.sim.cluster import Log
from holdfast.sim.coordinator import MemoryJournal
from holdfast.wire import framing

LEAVES_WITHIN_S = 2.0


class SupplierLink(asyncio.Protocol):
    """The coordinator's end of a supplier's stream: what `Stream` is, for suppliers alone."""

    transport: asyncio.Transport

    def __init__(self, office: Office) -> None:
        self._office = office
        self._decoder = framing.FrameDecoder[Any](FromSupplier)  # type: ignore[arg-type]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            if isinstance(message, SupplierHello):
                self._office.supplier.greeted(self, message)  # type: ignore[arg-type]
            else:
                self._office.supplier.take(self, message)  # type: ignore[arg-type]

    def connection_lost(self, error: Exception | None) -> None:
        self._office.links.discard(self)
        self._office.supplier.disconnected(self)  # type: ignore[arg-type]

    def send(self, message: Struct) -> None:
        times = 2 if self._office.doubles and isinstance(message, SupplyPlan) else 1
        if not self.transport.is_closing():
            self.transport.write(times * framing.encode(message))

    def abort(self) -> None:
        self.transport.abort()


class NodeStub:
    """The agent of the node of one request: it joins, does as it is told, and leaves."""

    def __init__(self, office: Office, request: RequestId, host: str) -> None:
        self._office = office
        self.request = request
        self.node = NodeId(f"{host}:{request}")
        self.dead = False
        self._host = host
        self._round = RoundNumber(0)
        self._busy = self._joined = self._leaving = False

    def join(self) -> None:
        spec = NodeSpec(host=self._host, address="127.0.0.1", slots=1, pid=1, request=self.request)
        self._joined = True
        self._say(NodeJoined, spec=spec, store_port=1)

    def act(self, order: AnyAction) -> None:
        if self.dead:
            return
        if isinstance(order, StartWorkers) and order.part.round > self._round:
            self._round, self._busy = order.part.round, True
            rank = order.part.first_rank
            self._say(WorkerStarted, round=self._round, rank=rank, pid=7, warm=False)
            self._office.later(0.5, self._step, self._round, rank)
        elif isinstance(order, StopWorkers) and order.round == self._round:
            self._busy = False
            self._say(NodeReady, round=order.round, store_port=1, slowest_stop_s=None)
        elif isinstance(order, Finish) and not self._leaving:
            self._leaving, self._busy = True, False
            self._office.later(self._office.rng.uniform(0.0, LEAVES_WITHIN_S), self._leave)

    def told_to_leave(self) -> None:
        """Take a SIGTERM."""
        if self._joined and not self._leaving:
            self._say(NodeLeaving, reason="preempted", code=75)

    def resume(self) -> None:
        """Knock at a coordinator that was restarted."""
        if self._joined:
            self._say(NodeResumed, round=self._round, busy=self._busy)

    def die(self, after_s: float = 0.0) -> None:
        """End without a word; the coordinator notices after a while."""
        if not self.dead:
            self.dead = True
            if self._joined:
                self._office.later(after_s, self._missed)

    def _step(self, round: RoundNumber, rank: Rank) -> None:
        if self.dead or round != self._round or not self._busy:
            return
        at, step = self._office.now(), StepNumber(self._office.next_step())
        told = RankProgress(rank=rank, step=step, steps=1, first_at=at, last_at=at)
        self._say(Progress, round=round, ranks=(told,))

    def _leave(self) -> None:
        if not self.dead:
            self._say(NodeLeft, round=self._round)
            self.die()

    def _missed(self) -> None:
        self._office.post(StreamEnded(at=self._office.now(), node=self.node))
        self._office.post(
            LeaseEnded(at=self._office.now(), node=self.node, why="it was not heard of")
        )

    def _say(self, kind: Callable[..., AnyEvent], **fields: Any) -> None:
        if not self.dead:
            self._office.post(kind(at=self._office.now(), node=self.node, **fields))


class Office:
    """The coordinator of one job, and its nodes."""

    def __init__(self, loop: JumpingLoop, rng: Random, terms: Terms) -> None:
        self.loop, self.rng = loop, rng
        self.up = True
        self.doubles = False
        """Whether plans are sent twice."""
        self.nodes: dict[RequestId, NodeStub] = {}
        self.seen: set[RequestId] = set()
        """Requests that the core was told of."""
        self.asked: set[RequestId] = set()
        """Requests that the core has made."""
        self.plans = 0
        self.closed = False
        self.links: set[SupplierLink] = set()
        self._journal = MemoryJournal(Log(None))
        opened = JobOpened(at=self.now(), job="chaos", terms=terms)
        self._journal.append([Entry(opened.at, opened)])
        self.job: Job = jobs.opened(opened)
        self.supplier = SupplierStream(lambda: self.job, self.post, self.now)
        self._inbox: list[AnyEvent] = []
        self._unheard: list[AnyEvent] = []
        self._life = 0
        self._steps = 0
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> Time:
        return Time(self.loop.time())

    def later(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_later(seconds, act, *arguments)

    def next_step(self) -> int:
        self._steps += 1
        return self._steps

    # ---- deciding ----

    def post(self, event: AnyEvent) -> None:
        """Take an event in; what nodes say while the coordinator is away is said again later."""
        if not self.up:
            self._unheard.append(event)
            return
        if not self._inbox:
            self.loop.call_soon(self._decide, self._life)
        self._inbox.append(event)

    def _decide(self, life: int) -> None:
        if life != self._life or self.closed:
            return
        batch, self._inbox = self._inbox, []
        now = self.now()
        intake = Intake(self.job, self._journal)
        for entry, actions in intake.take([Entry(now, event) for event in batch]):
            self.job = intake.job
            assert not isinstance(entry.event, EventSetAside), entry.event.traceback
            jobs.validate(self.job)
            if isinstance(entry.event, NodesSighted):
                self.seen.update(one.request for one in entry.event.sightings)
            for action in actions:
                self._carry_out(action)
        self._journal.snapshot_if_due(self.job, now, {})
        self._set_timer()

    def _carry_out(self, action: AnyAction) -> None:
        if isinstance(action, CarryOutPlan):
            self.plans += 1
            self.asked.update(wish.id for wish in action.plan.ask)
            self.supplier.send(action.plan)
        elif isinstance(action, CloseJob):
            self.closed = True
            self.supplier.close()
        elif isinstance(action, StartWorkers | StopWorkers | Finish):
            stub = next((one for one in self.nodes.values() if one.node == action.node), None)
            if stub is not None:
                self.loop.call_soon(stub.act, action)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = jobs.deadline(self.job)
        if deadline is not None:
            self._timer = self.loop.call_at(max(deadline, self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick(at=self.now()))

    # ---- streams and restarts ----

    async def connect(self, factory: Callable[[], asyncio.BaseProtocol]) -> Any:
        """Open a supplier's stream, in the place of `create_connection`."""
        if not self.up or self.closed:
            raise ConnectionRefusedError("the coordinator is away")
        theirs, ours = socket.socketpair()
        _, link = await self.loop.connect_accepted_socket(lambda: SupplierLink(self), ours)
        self.links.add(link)  # type: ignore[arg-type]
        return await asyncio.SelectorEventLoop.create_connection(self.loop, factory, sock=theirs)

    def cut_streams(self) -> None:
        for link in list(self.links):
            link.abort()

    def restart(self, away_s: float) -> None:
        """Kill the coordinator; it comes back from its journal."""
        if not self.up or self.closed:
            return
        self.up, self._life = False, self._life + 1
        self._unheard, self._inbox = self._inbox, []
        if self._timer is not None:
            self._timer.cancel()
        self.cut_streams()
        self.supplier = SupplierStream(lambda: self.job, self.post, self.now)
        self.later(away_s, self._come_back)

    def _come_back(self) -> None:
        again = replay(self._journal.read)
        assert again is not None
        self.job, self.up = again.job, True
        jobs.validate(self.job)
        self.post(CoordinatorRestarted(at=self.now()))
        # Agents say again what was not acknowledged, after a word on what they are doing.
        unheard = [event for event in self._unheard if getattr(event, "node", None) is not None]
        fresh = {event.node for event in unheard if isinstance(event, NodeJoined)}
        for stub in self.nodes.values():
            if stub.node not in fresh:
                stub.resume()
        for event in unheard:
            self.post(event)
