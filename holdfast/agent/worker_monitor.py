"""Follows the workers from the moment they have a rank until they are gone.

What a worker says is passed on to the part that it concerns:

    it began, it took its first step    the reporter and the stall detector
    what its script has imported        the pool of standbys
    which GPU it uses                   the same
    a fault was triggered               the fault injector
    its script ended                    the stall detector: its process may still work, or hang
    its script raised                   it is not watched any more, it has only to exit
    its restartable function raised,    the coordinator; a worker that has left its function is parked
    returned or was left
    a request                           the coordinator; the keeper answers what is about images,
                                        and shards are taken from those that the node has
    what it used of a data set          the node's shards
    a checkpointer, a complete image    the keeper

A worker does not report its progress: that is on its page, which is read once a second. The pool is
refilled once all workers have finished a step, and with each such read. When a worker's process is
gone, its last words are heard before its end is reported.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.agent.evidence import last_collectives
from holdfast.agent.fault_injector import Injector
from holdfast.agent.processes import Exit, WorkerProcess
from holdfast.agent.requests import ScriptRequests
from holdfast.agent.shards import NodeShards
from holdfast.agent.stall_detector import StallDetector
from holdfast.agent.timings import StepTimings, TrainingProcess
from holdfast.agent.worker import RankEnding, Worker, Workers
from holdfast.clock import JobClock
from holdfast.messages.events import (
    AnyEvent,
    Progress,
    RankRaised,
    RanksReturned,
    RanksStalled,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.hangs import Pause, Stall
from holdfast.messages.local import (
    Ask,
    Began,
    DataUsed,
    DeviceUsed,
    Died,
    FromWorker,
    FunctionClosed,
    FunctionLeft,
    FunctionRaised,
    FunctionReturned,
    ImageMissed,
    ImageWhole,
    LeavingPostponed,
    Loaded,
    OpenCheckpointer,
    ScriptFinished,
    ScriptReply,
    Stepped,
    TrapSprung,
)
from holdfast.messages.records import Part, Raised, RankProgress
from holdfast.messages.requests import AnyAnswer, FindState, LocateImage, OpenData, TakeShards
from holdfast.messages.units import CauseId, NodeId, Rank, RoundNumber

log = logging.getLogger("holdfast.agent")

LOOK_EVERY_S = 1.0
CANNOT_START = 126
"""A shell's exit code for a command that exists and cannot be run."""
NEWS_EVERY_S = 0.9
NEWS_PER_S = 50.0
"""Nodes per second that report durations, over the whole job."""


class StandbyPool(Protocol):
    def refill(self) -> None: ...
    def learn(self, loaded: Loaded) -> None: ...
    def note_device(self, process: WorkerProcess, report: DeviceUsed) -> None: ...
    def note_failure(self, raised: Raised) -> None: ...


class WorkerSnapshots(Protocol):
    """What the keeper's side does for workers."""

    def begin_round(self, part: Part) -> None: ...
    def opened(self, message: OpenCheckpointer) -> None: ...
    def whole(self, rank: Rank, message: ImageWhole) -> None: ...
    def missed(self, rank: Rank, message: ImageMissed) -> None: ...
    def locate(self, request: LocateImage, answer: Callable[[AnyAnswer], None]) -> None: ...
    def look(self, round: RoundNumber, checkpointer: str, then: Callable[[], None]) -> None: ...
    def ended(self, rank: Rank, well: bool, act: Callable[[], None]) -> None: ...


@dataclass
class Reporter:
    """Reports to the coordinator how this node's ranks began, progress, stall and ended.

    Durations go along with progress, but less often with many nodes, so that the coordinator gets
    as many of them however large the job is. A rank's end is reported after what it saved:
    otherwise the job would be repaired from an older state.
    """

    node: NodeId
    clock: JobClock
    report: Callable[[AnyEvent], None]
    after_seals: Callable[[Rank, bool, Callable[[], None]], None]
    """Calls back once what the rank saved is sealed."""
    timings: StepTimings
    _round: RoundNumber = RoundNumber(0)
    _cause: CauseId = ""
    """The order that started the round's workers."""
    _nodes: int = 1
    _told: dict[Rank, tuple[int, int]] = field(default_factory=dict)
    """Steps that each rank was reported to have finished, and those until its newest loss."""
    _durations_at: float = 0.0
    """When durations are reported next."""

    def begin_round(self, part: Part, cause: CauseId) -> None:
        self._round = part.round
        self._cause = cause
        self._nodes = part.group_world_size
        self._told = {}
        self.timings.begin_round()

    def began(self, worker: Worker, at: float) -> None:
        self.report(
            WorkerStarted(
                at=self.clock.at(at),
                cause=self._cause,
                node=self.node,
                round=worker.round,
                rank=worker.rank,
                pid=worker.process.pid,
                warm=worker.warm or worker.again,
                again=worker.again,
            )
        )

    def progressed(self, workers: Iterable[Worker], detector: StallDetector | None = None) -> None:
        """Report the workers that took steps; with a detector, also durations if they are due."""
        workers = list(workers)
        moved = [progress for worker in workers if (progress := self._news_of(worker)) is not None]
        if not moved:
            return
        now = asyncio.get_running_loop().time()
        if detector is not None and not self._durations_due(now):
            detector = None
        self.report(
            Progress(
                at=self.clock.now(),
                cause=self._cause,
                node=self.node,
                round=self._round,
                ranks=tuple(moved),
                paces=detector.news() if detector is not None else None,
                timings=self.timings.read(_training(workers), now) if detector is not None else (),
            )
        )

    def _news_of(self, worker: Worker) -> RankProgress | None:
        progress = worker.progress(self.clock)
        with_loss = 0 if progress.loss is None else progress.steps - progress.loss_age
        news = (progress.steps, with_loss)
        if news <= self._told.get(worker.rank, (0, 0)):
            return None
        self._told[worker.rank] = news
        return progress

    def _durations_due(self, now: float) -> bool:
        if now < self._durations_at:
            return False
        self._durations_at = now + max(NEWS_EVERY_S, self._nodes / NEWS_PER_S)
        return True

    def stalled(self, stalls: tuple[Stall, ...], pauses: tuple[Pause, ...]) -> None:
        at, node, round = self.clock.now(), self.node, self._round
        report = RanksStalled(at=at, node=node, round=round, stalls=stalls, pauses=pauses)
        self.report(report)

    def not_started(self, part: Part, error: BaseException) -> None:
        """Report that there are no processes for a part, as the death of its first rank."""
        trace = None if isinstance(error, OSError) else error
        log.error("round %d cannot be started: %s", part.round, error, exc_info=trace)
        kind = type(error).__name__
        self.report(
            WorkerExited(
                at=self.clock.now(),
                cause=self._cause,
                node=self.node,
                round=part.round,
                rank=part.first_rank,
                code=CANNOT_START,
                progress=RankProgress(rank=part.first_rank),
                raised=Raised(type=kind, message=str(error), where="its start", traceback=""),
            )
        )

    def raised(self, worker: Worker, message: FunctionRaised) -> None:
        """Report that a restartable function raised, after what it saved."""
        event = RankRaised(
            at=self.clock.at(message.at),
            cause=self._cause,
            node=self.node,
            round=worker.round,
            rank=worker.rank,
            progress=worker.progress(self.clock),
            raised=message.raised,
            last=last_collectives(worker.flight),
            log_tail=worker.output.tail(),
        )
        self.after_seals(worker.rank, False, lambda: self.report(event))

    def all_returned(self, round: RoundNumber) -> None:
        returned = RanksReturned(at=self.clock.now(), node=self.node, round=round)
        self.report(returned)

    def exited(self, worker: Worker, ending: RankEnding, progress: RankProgress) -> None:
        killed, raised_at = ending.exit.signal == signal.SIGKILL, worker.raised_at
        event = WorkerExited(
            at=self.clock.now(),
            cause=self._cause,
            node=self.node,
            round=worker.round,
            rank=worker.rank,
            code=ending.exit.code,
            signal=ending.exit.signal,
            oom=killed and worker.memory_ran_out(),
            progress=progress,
            raised=worker.raised(),
            last=last_collectives(worker.flight) if ending.exit.code != 0 else (),
            raised_at=None if raised_at is None else self.clock.at(raised_at),
            log_tail=worker.output.tail(),
        )
        self.after_seals(worker.rank, ending.exit.code == 0, lambda: self.report(event))


def _training(workers: Iterable[Worker]) -> Iterator[TrainingProcess]:
    """Yield the workers whose steps are seen; those of a command are not."""
    for worker in workers:
        if worker.runtime is not None:
            vitals = worker.runtime.page.vitals
            yield TrainingProcess(worker.rank, worker.process.pid, vitals)


@dataclass
class WorkerMonitor:
    clock: JobClock
    workers: Workers
    pool: StandbyPool
    snapshots: WorkerSnapshots
    detector: StallDetector
    reporter: Reporter
    requests: ScriptRequests
    shards: NodeShards
    injector: Injector
    gone: Callable[[], None]
    """Called after a worker's end was reported and it is no longer among the workers."""
    slots: int = 0
    """Ranks that the node has in the round."""
    _timer: asyncio.TimerHandle | None = None

    def begin_round(self, part: Part, cause: CauseId) -> None:
        """Prepare for the workers of a round, which an order starts."""
        self.slots = part.slots
        self.workers.begin_round()
        self.snapshots.begin_round(part)
        self.detector.begin_round(part)
        self.reporter.begin_round(part, cause)
        self.shards.begin_round(part)
        self.injector.begin_round(part)

    def expect(self, worker: Worker) -> None:
        """Listen to a worker that is about to get its rank."""
        self.workers.add(worker)
        if worker.runtime is not None:
            worker.runtime.hear = lambda message: self._hear(worker, message)
        self.injector.begin_rank(worker.target())

    def follow(self, worker: Worker) -> None:
        """Follow a worker that has its rank; it may be gone already."""
        if worker.process.exit is not None:
            self._exited(worker, worker.process.exit)
            return
        worker.process.on_exit = lambda end: self._exited(worker, end)
        if worker.runtime is None:  # A command does not say that it began.
            self._began(worker, Began(at=asyncio.get_running_loop().time()))
        else:
            self._watch(worker)  # It may never begin.

    def _watch(self, worker: Worker) -> None:
        if worker.runtime is not None:
            self.detector.add(worker.rank, worker.process.pid, worker.runtime.page.vitals)

    # ---- what it says ----

    def _hear(self, worker: Worker, message: FromWorker) -> None:
        handle = _HANDLERS.get(type(message))
        if handle is not None:
            handle(self, worker, message)

    def _began(self, worker: Worker, message: Began) -> None:
        worker.close_before()
        self.reporter.began(worker, message.at)
        self._watch(worker)
        if self._timer is None:
            self._look_later()

    def _stepped(self, worker: Worker, message: Stepped) -> None:
        self.reporter.progressed([worker])
        worker.stepped = True
        self.detector.stepped(worker.rank)
        if self.workers.all_stepped():
            self.pool.refill()

    def _used_device(self, worker: Worker, message: DeviceUsed) -> None:
        if worker.runtime is not None:
            self.pool.note_device(worker.runtime, message)

    def _died(self, worker: Worker, message: Died) -> None:
        self.detector.remove(worker.rank)
        worker.raised_at = message.at
        worker.script_raised(message.raised)
        self.pool.note_failure(message.raised)

    def _done(self, worker: Worker, message: ScriptFinished) -> None:
        self.detector.script_ended(worker.rank)
        worker.script_ended()

    def _asked(self, worker: Worker, message: Ask) -> None:
        rank, round, request = worker.rank, worker.round, message.request

        def reply(answer: AnyAnswer) -> None:
            if self.workers.running.get(rank) is worker:  # Else another one has its rank now.
                self.workers.reply(
                    rank, ScriptReply(channel=message.channel, number=message.number, answer=answer)
                )

        def forward() -> None:
            self.requests.ask(round, rank, message)

        if isinstance(request, LocateImage):
            self.snapshots.locate(request, reply)
        elif isinstance(request, TakeShards):
            self.shards.ask(rank, message)
        elif isinstance(request, OpenData):
            self.shards.opened(request.spec)
            forward()
        elif isinstance(request, FindState) and request.tried is None and rank == 0:
            self.snapshots.look(round, request.checkpointer, forward)
        else:
            forward()

    # ---- its restartable function ----

    def _function_raised(self, worker: Worker, message: FunctionRaised) -> None:
        self.detector.remove(worker.rank)
        self.pool.note_failure(message.raised)
        if worker.function is not None and worker.function.stage != "leaving":
            worker.function.raised()
            self.reporter.raised(worker, message)

    def _function_returned(self, worker: Worker, message: FunctionReturned) -> None:
        self.detector.remove(worker.rank)  # It waits for the others: who is late is seen there.
        if worker.function is not None and worker.function.stage == "inside":
            worker.function.stage = "returned"
            if len(self.workers.running) == self.slots and self.workers.all_returned():
                self.reporter.all_returned(worker.round)

    def _function_left(self, worker: Worker, message: FunctionLeft) -> None:
        """Park a worker: its place in the round is empty, as if its process had ended. One that is
        being ended has its place until it is gone."""
        if worker.function is None or worker.function.stage != "leaving" or worker.stopping:
            return
        worker.function.left()
        self.detector.remove(worker.rank)
        self.injector.look(worker.target())
        self.requests.forget(worker.rank)
        self.shards.forget(worker.rank)
        self.workers.park(worker, worker.progress(self.clock))
        self.gone()

    def _function_closed(self, worker: Worker, message: FunctionClosed) -> None:
        if worker.function is not None:
            worker.function.stage = "released"
            self._watch(worker)

    # ---- its progress ----

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.workers.running:
            self._look_later()  # First, so that a look that raises is not the last one.
            self.reporter.progressed(self.workers.running.values(), self.detector)
            self.shards.look()
            self.pool.refill()

    # ---- its end ----

    def _exited(self, worker: Worker, end: Exit) -> None:
        if self.workers.parked.get(worker.local_rank) is worker:
            del self.workers.parked[worker.local_rank]
            worker.close()
            return
        del self.workers.running[worker.rank]
        self.detector.remove(worker.rank)
        worker.hear_last_words()
        self.injector.look(worker.target())
        self.requests.forget(worker.rank)
        self.shards.forget(worker.rank)
        progress, ending = worker.progress(self.clock), worker.ending(end)
        self.workers.note_end(progress, ending.stop_took_s)
        if ending.exit.code == 0:
            self.workers.departed.append(worker.departed(progress.step))
        if ending.by_itself and ending.exit.code != 0 and self.workers.failure is None:
            self.workers.failure = worker.failure(ending.exit)
        if ending.by_itself:
            self.reporter.exited(worker, ending, progress)
        self.injector.gone(worker.process.pid)
        worker.close()
        self.gone()


_HANDLERS: dict[type[Any], Callable[[WorkerMonitor, Worker, Any], None]] = {
    Began: WorkerMonitor._began,
    Stepped: WorkerMonitor._stepped,
    DeviceUsed: WorkerMonitor._used_device,
    Loaded: lambda monitor, worker, message: monitor.pool.learn(message),
    TrapSprung: lambda monitor, worker, message: monitor.injector.look(worker.target()),
    Died: WorkerMonitor._died,
    ScriptFinished: WorkerMonitor._done,
    FunctionRaised: WorkerMonitor._function_raised,
    FunctionReturned: WorkerMonitor._function_returned,
    FunctionLeft: WorkerMonitor._function_left,
    FunctionClosed: WorkerMonitor._function_closed,
    LeavingPostponed: lambda monitor, worker, message: worker.postponed(),
    Ask: WorkerMonitor._asked,
    DataUsed: lambda monitor, worker, message: monitor.shards.heard(worker.rank, message),
    OpenCheckpointer: lambda monitor, worker, message: monitor.snapshots.opened(message),
    ImageWhole: lambda monitor, worker, message: monitor.snapshots.whole(worker.rank, message),
    ImageMissed: lambda monitor, worker, message: monitor.snapshots.missed(worker.rank, message),
}
"""What a worker with a rank may say; a standby's and a node test's words are not for the monitor."""
