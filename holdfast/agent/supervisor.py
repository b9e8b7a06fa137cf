"""Carries out what the coordinator orders: start a part of a round, stop a round, finish.

It tells when that is done and decides nothing. Orders carry their round, so one that comes twice, or
late, does no harm. What else is ordered is for the part that it concerns.

    StartWorkers ──▶ the starter gives out the ranks, the relay minds their workers
    StopWorkers  ──▶ they are examined if somebody wants that, then stopped ──▶ NodeReady
    Finish       ──▶ they are stopped, and what was saved reaches storage ──▶ NodeLeft

After the last worker, whatever scripts left behind on the node is ended too, so that the next round
starts on clean ground. Finish is the last order: after it there is no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from holdfast.agent.fault_injector import Injector
from holdfast.agent.nodecheck import Tester
from holdfast.agent.processes import ProcessTable
from holdfast.agent.reporting import Reporter
from holdfast.agent.requests import Courier
from holdfast.agent.snapshots import Keeping
from holdfast.agent.stall_detector import Watch
from holdfast.agent.standbys import Pool
from holdfast.agent.starting import Starter
from holdfast.agent.stream import CoordinatorStream
from holdfast.agent.testimony import Witness
from holdfast.agent.worker_monitor import Relay
from holdfast.agent.workers import Crew
from holdfast.clock import JobClock
from holdfast.messages.actions import (
    Answered,
    CheckpointSettled,
    CommitCheckpoint,
    Examine,
    Finish,
    Inject,
    NodeAction,
    Prepare,
    StartWorkers,
    StopWorkers,
    TestNode,
    WriteShards,
)
from holdfast.messages.events import NodeLeft, NodeReady
from holdfast.messages.hangs import HangTerms
from holdfast.messages.records import Part, RankProgress
from holdfast.messages.units import NodeId, RoundNumber, Seconds

EXAMINE_LIMIT_S = 0.7
NO_ROUND = RoundNumber(0)


@dataclass
class Supervisor:
    node: NodeId
    clock: JobClock
    stream: CoordinatorStream
    table: ProcessTable
    pool: Pool
    keeping: Keeping
    starter: Starter
    tester: Tester
    hang_terms: HangTerms
    save_deadline_s: Seconds
    """How long the node's end waits for what is on its way to storage."""
    round: RoundNumber = NO_ROUND
    finished: asyncio.Future[Finish] = field(init=False)
    """Done once the node has left."""
    courier: Courier = field(init=False)
    _crew: Crew = field(init=False)
    _watch: Watch = field(init=False)
    _injector: Injector = field(init=False)
    _reporter: Reporter = field(init=False)
    _relay: Relay = field(init=False)
    _witness: Witness = field(init=False)
    _starting: asyncio.Task[None] | None = None
    _stopping: StopWorkers | Finish | None = None
    _ready_after: RoundNumber = NO_ROUND
    """The last round after which we said that we are ready, with the port that we have now."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.finished = asyncio.get_running_loop().create_future()
        node, clock, report = self.node, self.clock, self.stream.send
        self._crew = Crew()
        self._witness = Witness(node, self._crew, self.stream.tell)
        self._reporter = Reporter(node, clock, report, self.keeping.ended)
        self._watch = Watch(self.hang_terms, self._reporter.stalled)
        self.courier = Courier(node, clock, report, self._crew.reply)
        self._injector = Injector(
            node=node,
            clock=clock,
            report=report,
            keeping=self.keeping,
            targets=self._crew.targets,
            written=self.stream.drained.wait,
            fall_silent=self.stream.fall_silent,
        )
        self._relay = Relay(
            clock=clock,
            crew=self._crew,
            pool=self.pool,
            keeping=self.keeping,
            watch=self._watch,
            reporter=self._reporter,
            courier=self.courier,
            injector=self._injector,
            gone=self._worker_gone,
        )

    @property
    def busy(self) -> bool:
        return bool(self._crew.workers) or self._starting is not None

    def act(self, order: NodeAction) -> None:
        if isinstance(order, StartWorkers):
            self._start(order.part)
        elif isinstance(order, Prepare):
            self.pool.refill()
        elif isinstance(order, Answered):
            self.courier.answered(order)
        elif isinstance(order, TestNode):
            if not isinstance(self._stopping, Finish):
                self.tester.act(order)
        elif isinstance(order, Examine):
            self._spawn(self._witness.testify(order.inquest, self.round, order.limit_s))
        elif isinstance(order, WriteShards | CommitCheckpoint | CheckpointSettled):
            self.keeping.act(order)
        elif isinstance(order, Inject):
            self._injector.take(order)
        elif isinstance(order, StopWorkers):
            if order.round == self.round:
                self._stop(order)
        else:
            self._stop(order)

    def kill_all(self) -> None:
        """Do not wait for anybody any more."""
        self._crew.kill()

    # ---- a round begins ----

    def _start(self, part: Part) -> None:
        if part.round <= self.round or isinstance(self._stopping, Finish):
            return
        self.round = part.round
        self._stopping = None
        self.tester.end()
        self._relay.begin_round(part)
        self._starting = asyncio.ensure_future(self.starter.start(part, self._relay))
        self._starting.add_done_callback(lambda task: self._started(task, part))

    def _started(self, task: asyncio.Task[None], part: Part) -> None:
        if self._starting is task:
            self._starting = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._reporter.not_started(part, error)

    # ---- and ends ----

    def _stop(self, order: StopWorkers | Finish) -> None:
        if isinstance(self._stopping, Finish):
            return
        if isinstance(self._stopping, StopWorkers) and isinstance(order, StopWorkers):
            return  # The same order again.
        self._stopping = order
        self.tester.end()
        self._watch.stop()
        if self._starting is not None:
            self._starting.cancel()
        if isinstance(order, StopWorkers) and order.examine and self._crew.workers:
            self._spawn(self._examine_then_stop(order))
        else:
            self._stop_workers(order)

    async def _examine_then_stop(self, order: StopWorkers) -> None:
        try:
            await self._witness.testify(order.examine, self.round, EXAMINE_LIMIT_S)
        finally:
            if self._stopping is order:
                self._stop_workers(order)

    def _stop_workers(self, order: StopWorkers | Finish) -> None:
        self._crew.ask_to_stop(order.grace_s)
        if not self._crew.workers:
            self._stopped(order)

    def _worker_gone(self) -> None:
        if self._stopping is not None and not self._crew.workers:
            self._stopped(self._stopping)

    def _stopped(self, order: StopWorkers | Finish) -> None:
        self.table.end_strays()
        ranks = tuple(self._crew.ended)
        if isinstance(order, Finish):
            limit_s = 0.0 if order.rejoin else self.save_deadline_s
            self.keeping.when_settled(limit_s, lambda: self._leave(order, ranks))
        else:
            self._stopping = None
            self._tell_ready(order, ranks)

    def _tell_ready(self, order: StopWorkers, ranks: tuple[RankProgress, ...]) -> None:
        if self._ready_after != order.round:  # The same order may come again: same answer.
            self._ready_after = order.round
            self.starter.renew_port()
        self.stream.send(
            NodeReady(
                at=self.clock.now(),
                node=self.node,
                round=order.round,
                store_port=self.starter.port.number,
                slowest_stop_s=self._crew.slowest_stop_s,
                ranks=ranks,
            )
        )

    def _leave(self, order: Finish, ranks: tuple[RankProgress, ...]) -> None:
        if not self.finished.done():
            now, round = self.clock.now(), self.round
            self.stream.send(NodeLeft(at=now, node=self.node, round=round, ranks=ranks))
            self.finished.set_result(order)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
