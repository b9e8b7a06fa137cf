"""Carries out the coordinator's orders: start a part of a round, stop a round, finish.

It reports when that is done and decides nothing. Orders carry their round, so one that comes twice,
or late, does no harm. Other orders go to the part of the agent that they concern.

    StartWorkers ──▶ the starter assigns the ranks, the monitor follows their workers
    StopWorkers  ──▶ the workers are stopped, or leave their function ──▶ NodeReady
    Finish       ──▶ they are stopped, and what was saved reaches storage ──▶ NodeLeft

After the last worker, all processes that scripts left behind on the node are ended too, so that the
next round starts clean. Finish is the last order: all later ones are ignored.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from holdfast.agent import evidence
from holdfast.agent.evidence import Examined
from holdfast.agent.fault_injector import Injector
from holdfast.agent.launcher_error import Failure
from holdfast.agent.requests import ScriptRequests
from holdfast.agent.shards import NodeShards
from holdfast.agent.snapshots import Snapshots
from holdfast.agent.stall_detector import KernelSystem, StallDetector, System
from holdfast.agent.timings import StepTimings
from holdfast.agent.worker import Workers
from holdfast.agent.worker_monitor import Reporter, StandbyPool, WorkerMonitor, WorkerSnapshots
from holdfast.clock import JobClock
from holdfast.messages.actions import (
    Answered,
    CheckpointSettled,
    CommitCheckpoint,
    EndProcess,
    Examine,
    Finish,
    Inject,
    LendShards,
    NodeAction,
    Prepare,
    ReleaseRanks,
    StartWorkers,
    StopWorkers,
    TestNode,
    WriteRankFiles,
)
from holdfast.messages.events import AnyEvent, NodeLeft, NodeReady, WorkersKilled
from holdfast.messages.evidence import RankCollectives
from holdfast.messages.hangs import HangTerms
from holdfast.messages.records import Part, RankProgress
from holdfast.messages.units import NodeId, RoundNumber, Seconds
from holdfast.messages.wire import EvidenceTaken

NO_ROUND = RoundNumber(0)


class EventStream(Protocol):
    """What the supervisor needs of the stream to the coordinator."""

    drained: asyncio.Event

    def send(self, event: AnyEvent) -> None: ...
    def tell(self, message: EvidenceTaken) -> None: ...
    def fall_silent(self, seconds: float) -> None: ...


class StrayProcesses(Protocol):
    def end_strays(self) -> int: ...


class OfferedPort(Protocol):
    @property
    def number(self) -> int: ...


class WorkerStarter(Protocol):
    @property
    def port(self) -> OfferedPort: ...
    def renew_port(self) -> None: ...
    async def start(self, part: Part, monitor: WorkerMonitor) -> None: ...


class NodeSnapshotOrders(WorkerSnapshots, Protocol):
    def act(self, order: WriteRankFiles | CommitCheckpoint | CheckpointSettled) -> None: ...
    def when_settled(self, limit_s: float, act: Callable[[], None]) -> None: ...


class NodeTests(Protocol):
    def act(self, order: TestNode) -> None: ...
    def end(self) -> None: ...


@dataclass
class Supervisor:
    node: NodeId
    clock: JobClock
    stream: EventStream
    table: StrayProcesses
    pool: StandbyPool
    snapshots: NodeSnapshotOrders
    starter: WorkerStarter
    tester: NodeTests
    hang_terms: HangTerms
    save_deadline_s: Seconds
    """How long the end of the node waits for snapshots on their way to storage."""
    system: System | None = None
    """The machine as the stall detector sees it; None for the real one."""
    stop_signal: signal.Signals = signal.SIGTERM
    """The signal that asks workers to stop: the one that was sent to this node, if one was."""
    round: RoundNumber = NO_ROUND
    finished: asyncio.Future[Finish] = field(init=False)
    """Done once the node has left."""
    requests: ScriptRequests = field(init=False)
    shards: NodeShards = field(init=False)
    _workers: Workers = field(default_factory=Workers)
    _detector: StallDetector = field(init=False)
    _injector: Injector = field(init=False)
    _reporter: Reporter = field(init=False)
    _monitor: WorkerMonitor = field(init=False)
    _starting: asyncio.Task[None] | None = None
    _stopping: StopWorkers | Finish | None = None
    _last: tuple[RankCollectives, ...] = ()
    """The collectives that the workers were in when they were to stop, if that was asked."""
    _ready_after: RoundNumber = NO_ROUND
    """The last round for which NodeReady was sent, with the port offered now."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.finished = asyncio.get_running_loop().create_future()
        node, clock, report = self.node, self.clock, self.stream.send
        system = self.system or KernelSystem()
        timings = StepTimings(system.contention)
        self._reporter = Reporter(node, clock, report, self.snapshots.ended, timings)
        self._detector = StallDetector(self.hang_terms, self._reporter.stalled, system)
        self.requests = ScriptRequests(node, clock, report, self._workers.reply)
        loop = asyncio.get_running_loop()
        self.shards = NodeShards(node, clock, report, self._workers.reply, loop.time)
        self._injector = Injector(
            node=node,
            clock=clock,
            report=report,
            snapshots=cast(Snapshots, self.snapshots),
            targets=self._workers.targets,
            written=self.stream.drained.wait,
            fall_silent=self.stream.fall_silent,
        )
        self._monitor = WorkerMonitor(
            clock=clock,
            workers=self._workers,
            pool=self.pool,
            snapshots=self.snapshots,
            detector=self._detector,
            reporter=self._reporter,
            requests=self.requests,
            shards=self.shards,
            injector=self._injector,
            gone=self._worker_gone,
        )

    @property
    def busy(self) -> bool:
        return bool(self._workers.running) or self._starting is not None

    @property
    def all_ended_well(self) -> bool:
        """Whether every rank of the last round has ended with 0."""
        return bool(self._workers.ended) and self._workers.failure is None

    @property
    def failure(self) -> Failure | None:
        """How the first rank of this round failed here."""
        return self._workers.failure

    def rank_pids(self) -> set[int]:
        """Return the processes of the ranks that run here."""
        return {worker.process.pid for worker in self._workers.running.values()}

    def act(self, order: NodeAction) -> None:
        """Carry out an order."""
        _ORDERS[type(order)](self, order)

    def kill_all(self) -> None:
        """Kill all workers without grace."""
        self._workers.kill()

    def resumed(self, sent: Collection[AnyEvent]) -> None:
        """Ask again for what may have been lost with the last stream; these events were not."""
        self.requests.ask_again(sent)
        self.shards.ask_again()

    # ---- the lease on the round: see `agent.lease` ----

    def lent_until(self, until: float) -> None:
        self._workers.lent_until(until)

    def pause(self) -> None:
        """Pause the workers where they are: their places may be given to others."""
        self._detector.hold()
        self._workers.pause()

    def go_on(self) -> None:
        """Let paused workers go on."""
        self._workers.go_on()
        self._detector.release()

    # ---- a round begins ----

    def _start(self, order: StartWorkers) -> None:
        part = order.part
        if part.round <= self.round or isinstance(self._stopping, Finish):
            return
        self.round = part.round
        self._stopping = None
        self.tester.end()
        self._monitor.begin_round(part, order.id)
        self._starting = asyncio.ensure_future(self.starter.start(part, self._monitor))
        self._starting.add_done_callback(lambda task: self._started(task, part))

    def _started(self, task: asyncio.Task[None], part: Part) -> None:
        if self._starting is task:
            self._starting = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._reporter.not_started(part, error)

    # ---- and ends ----

    def _stop(self, order: StopWorkers) -> None:
        # A round above its own is one that it was never told to start: whatever it has must end.
        if order.round >= self.round and self._stopping is None:
            self._end_round(order)
            if order.look and self._workers.running:
                self._spawn(self._look_then_stop(order))
            else:
                self._stop_workers(order)
        elif order.round == self.round and order.grace_s <= 0.0 and self._workers.running:
            self._hurry(order)

    def _hurry(self, order: StopWorkers) -> None:
        if self._workers.hurry():
            at, node, round = self.clock.now(), self.node, self.round
            self.stream.send(WorkersKilled(at=at, cause=order.id, node=node, round=round))

    def _finish(self, order: Finish) -> None:
        if not isinstance(self._stopping, Finish):
            self._end_round(order)
            self._stop_workers(order)

    def _end_round(self, order: StopWorkers | Finish) -> None:
        self._stopping = order
        self._last = ()
        self.tester.end()
        self._detector.stop()
        if self._starting is not None:
            self._starting.cancel()

    async def _look_then_stop(self, order: StopWorkers) -> None:
        try:
            self._last = await evidence.last_of(self._workers.examined())
        finally:
            if self._stopping is order:
                self._stop_workers(order)

    def _stop_workers(self, order: StopWorkers | Finish) -> None:
        among = None
        if isinstance(order, StopWorkers) and order.leave_s > 0:
            among = self._workers.leave(order)
            for rank in self._workers.running:
                self.requests.fence(rank, order.why)
        elif isinstance(order, Finish) or order.round != self._ready_after:
            # Else the answer to an earlier order is on its way, and the next round counts on them.
            self._workers.dismiss(_why(order), order.grace_s)
        self._workers.ask_to_stop(order.grace_s, self.stop_signal, among)
        if not self._workers.running:
            self._stopped(order)

    def _worker_gone(self) -> None:
        if self._stopping is not None and not self._workers.running:
            self._stopped(self._stopping)

    def _stopped(self, order: StopWorkers | Finish) -> None:
        self.table.end_strays()
        ranks = tuple(self._workers.ended)
        if isinstance(order, Finish):
            limit_s = 0.0 if order.rejoin else self.save_deadline_s
            self.snapshots.when_settled(limit_s, lambda: self._leave(order, ranks))
        else:
            self._stopping = None
            self._tell_ready(order, ranks)

    def _tell_ready(self, order: StopWorkers, ranks: tuple[RankProgress, ...]) -> None:
        if self._ready_after != order.round:  # A repeated order gets the same answer.
            self._ready_after = order.round
            self.starter.renew_port()
        self.stream.send(
            NodeReady(
                at=self.clock.now(),
                cause=order.id,
                node=self.node,
                round=order.round,
                store_port=self.starter.port.number,
                slowest_stop_s=self._workers.slowest_stop_s,
                ranks=ranks,
                last=self._last,
                parked=len(self._workers.parked),
                slowest_leave_s=self._workers.slowest_leave_s,
            )
        )

    def _leave(self, order: Finish, ranks: tuple[RankProgress, ...]) -> None:
        if not self.finished.done():
            at, node, round = self.clock.now(), self.node, self.round
            left = NodeLeft(at=at, cause=order.id, node=node, round=round, ranks=ranks)
            self.stream.send(left)
            self.finished.set_result(order)

    # ---- other orders ----

    def _test(self, order: TestNode) -> None:
        if not isinstance(self._stopping, Finish):
            self.tester.act(order)

    def _look(self, order: Examine) -> None:
        self._spawn(self._examine(order))

    def _release(self, order: ReleaseRanks) -> None:
        if order.round == self.round:
            self._workers.release()

    def _end_process(self, order: EndProcess) -> None:
        if order.round == self.round:
            self._workers.end_process(order.rank)

    async def _examine(self, order: Examine) -> None:
        """Examine the workers and send what was seen."""
        workers, round = [self._in_condition(one) for one in self._workers.examined()], self.round
        gone = evidence.of_departed(self.node, round, self._workers.departed)
        with self._detector.disturbing():
            seen = await evidence.examine(self.node, round, workers, order.limit_s, order.native)
        for message in evidence.messages(order.examination, [*gone, *seen]):
            self.stream.tell(message)

    def _in_condition(self, worker: Examined) -> Examined:
        """Add what the stall detector knows of a worker."""
        known = self._detector.condition(worker.rank)
        if known is None:
            return worker
        return replace(worker, ended=known.ended, locked=known.locked, idle_s=known.still_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _why(order: StopWorkers | Finish) -> str:
    return order.why if isinstance(order, StopWorkers) else order.reason


_ORDERS: dict[type[NodeAction], Callable[[Supervisor, Any], None]] = {
    StartWorkers: Supervisor._start,
    StopWorkers: Supervisor._stop,
    Finish: Supervisor._finish,
    TestNode: Supervisor._test,
    Examine: Supervisor._look,
    EndProcess: Supervisor._end_process,
    ReleaseRanks: Supervisor._release,
    Prepare: lambda agent, order: agent.pool.refill(),
    Answered: lambda agent, order: agent.requests.answered(order),
    WriteRankFiles: lambda agent, order: agent.snapshots.act(order),
    CommitCheckpoint: lambda agent, order: agent.snapshots.act(order),
    CheckpointSettled: lambda agent, order: agent.snapshots.act(order),
    LendShards: lambda agent, order: agent.shards.lent(order),
    Inject: lambda agent, order: agent._injector.take(order),
}
