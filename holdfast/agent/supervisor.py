"""Starts, watches and stops the workers of one node.

It acts on three orders (start a part of a round, stop a round, finish) and tells what it saw; it
decides nothing. Orders carry their round, so one that comes twice, or late, does no harm.

Stopping: a worker that dies of SIGTERM or ignores it is gone at once. One that handles it has the
grace that the order names, then SIGKILL. After the last one, whatever scripts left behind on the node
is ended too, so that the next round starts on clean ground.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from holdfast.agent import oom
from holdfast.agent.chaos import Injector, Target
from holdfast.agent.courier import Courier
from holdfast.agent.environment import rank_environment
from holdfast.agent.examiner import Examined, examine
from holdfast.agent.keeping import Keeping
from holdfast.agent.output import Console, Output
from holdfast.agent.ports import StorePort
from holdfast.agent.processes import Exit, Process, ProcessTable, spawn
from holdfast.agent.standbys import Pool, Standby
from holdfast.agent.testing import Tester
from holdfast.agent.watch import Watch
from holdfast.clock import JobClock
from holdfast.config import RunSettings
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
from holdfast.messages.events import (
    AnyEvent,
    NodeLeft,
    NodeReady,
    Progress,
    RanksStalled,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.evidence import RankEvidence
from holdfast.messages.hangs import HangTerms, Stall
from holdfast.messages.local import (
    Ask,
    Assign,
    Began,
    Died,
    Done,
    FromWorker,
    ImageWhole,
    OpenCheckpointer,
    Reply,
    Stepped,
    TrapSprung,
)
from holdfast.messages.records import Part, Raised, RankProgress
from holdfast.messages.requests import AnyAnswer, FetchImage, FindState
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, StepNumber

log = logging.getLogger("holdfast.agent")

PROGRESS_EVERY_S = 1.0
NEWS_EVERY_S = 0.9
NEWS_PER_S = 50.0
ENDING_LIMIT_S = 30.0
"""A script that has ended is over; its interpreter may take so long to end as well."""
DYING_LIMIT_S = 10.0
"""The same for one that raised: others wait for it."""
ENDING_LIMIT = "HOLDFAST_ENDING_LIMIT"
"""In the environment: another limit in seconds for both, for tests."""
EXAMINE_LIMIT_S = 0.7
STDIN = 0
"""A rank reads what we would; in a session of its own it may, a terminal too."""
OUT, ERR = 1, 2
NO_ROUND = RoundNumber(0)


@dataclass
class Worker:
    """One rank's process and what is known of it."""

    rank: Rank
    local_rank: int
    process: Process
    standby: Standby | None
    """None for a command that is no Python of ours (`--no-python`)."""
    output: Output
    error_file: Path
    oom_kills: int
    raised: Raised | None = None
    failed: bool = False
    """Its script raised, and not because we stopped it: what its process dies of does not matter."""
    stop_sent: float | None = None
    grace_timer: asyncio.TimerHandle | None = None
    flight: Path = Path()
    """Where it writes its flight recorder."""
    done: bool = False
    """Its script ran to the end; what happens to the process after that is of no consequence."""
    stepped: bool = False
    told_steps: int = 0


@dataclass
class Supervisor:
    node: NodeId
    address: str
    """Where other nodes reach this one."""
    store_port: int
    settings: RunSettings
    table: ProcessTable
    run_id: str
    logs: Path
    clock: JobClock
    pool: Pool
    console: Console
    report: Callable[[AnyEvent], None]
    finished: asyncio.Future[Finish]
    env: dict[str, str]
    keeping: Keeping
    hang_terms: HangTerms
    testify: Callable[[int, Sequence[RankEvidence]], None]
    written: Callable[[], Coroutine[Any, Any, object]]
    """Returns when all that was reported is in the journal."""
    fall_silent: Callable[[float], None]
    """Neither hears nor says anything to the coordinator for so long."""
    injector: Injector = field(init=False)
    tester: Tester = field(init=False)
    watch: Watch = field(init=False)
    round: RoundNumber = NO_ROUND
    workers: dict[Rank, Worker] = field(default_factory=dict)
    courier: Courier = field(init=False)
    port: StorePort = field(init=False)
    """Offered for the next round's store; with the round it goes to rank 0, or is closed."""
    _starting: asyncio.Task[None] | None = None
    _stopping: StopWorkers | Finish | None = None
    _ready_after: RoundNumber = NO_ROUND
    """The last round after which we said that we are ready, with the port that we have now."""
    _slowest_stop_s: Seconds | None = None
    _ended: list[RankProgress] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _nodes: int = 1
    _news_at: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watch = Watch(self.hang_terms, self._tell_stalls)
        self.port = self._offer_port()
        self.courier = Courier(self.node, self.clock, self.report, self._reply)
        self.tester = Tester(self.node, self.address, self.pool, self.clock, self.report)
        self.injector = Injector(
            node=self.node,
            clock=self.clock,
            report=self.report,
            keeping=self.keeping,
            targets=lambda: {rank: _target(worker) for rank, worker in self.workers.items()},
            written=self.written,
            fall_silent=self.fall_silent,
        )

    @property
    def busy(self) -> bool:
        return bool(self.workers) or self._starting is not None

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
            self._spawn(self._testify(order.inquest, order.limit_s))
        elif isinstance(order, WriteShards | CommitCheckpoint | CheckpointSettled):
            self.keeping.act(order)
        elif isinstance(order, Inject):
            self.injector.take(order)
        elif isinstance(order, StopWorkers):
            if order.round == self.round:
                self._stop(order)
        else:
            self._stop(order)

    # ---- starting ----

    def _start(self, part: Part) -> None:
        if part.round <= self.round or isinstance(self._stopping, Finish):
            return
        self.round = part.round
        self.tester.end()
        self.keeping.begin_round(part)
        self.watch.begin_round(part)
        self.injector.begin_round(part)
        self._nodes = part.group_world_size
        self._stopping = None
        self._slowest_stop_s = None
        self._ended = []
        self._make_log_folder(part)
        self._starting = asyncio.ensure_future(self._start_all(part))

    def _make_log_folder(self, part: Part) -> None:
        """Error files are written by the ranks themselves, into a folder that must be there."""
        try:
            (self.logs / f"round_{part.round}").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.error("%s: no logs of round %d (%s)", self.logs, part.round, error.strerror)

    async def _start_all(self, part: Part) -> None:
        try:
            if self.settings.entry == "command":
                for local_rank in range(part.slots):
                    self._start_command(part, local_rank)
                return
            standbys = await asyncio.gather(*(self.pool.take() for _ in range(part.slots)))
            for local_rank, standby in enumerate(standbys):
                self._hand_over(part, local_rank, standby)
        finally:
            self._starting = None
            self.port.close()

    def _offer_port(self) -> StorePort:
        return StorePort(self.address, self.store_port)

    def _hand_over(self, part: Part, local_rank: int, standby: Standby) -> None:
        assert standby.process is not None
        worker = self._worker(part, local_rank, standby.process, standby)
        standby.hear = lambda message: self._hear(worker, message)
        env = self._rank_environment(part, local_rank, worker.error_file)
        assign = Assign(
            env=env,
            entry=self.settings.entry,
            agent_pid=os.getpid(),
            round=part.round,
            images=str(self.keeping.images),
            flight=str(worker.flight),
        )
        store = [self.port.fileno()] if worker.rank == 0 else []
        self.injector.begin_rank(_target(worker))
        standby.assign(assign, [STDIN, *worker.output.writers(), *store])
        worker.output.handed_over()
        if standby.process.exit is not None:
            self._exited(worker, standby.process.exit)
        else:
            standby.process.on_exit = lambda end: self._exited(worker, end)

    def _start_command(self, part: Part, local_rank: int) -> None:
        output = self._output(part, local_rank)
        error_file = self._error_file(part, local_rank)
        env = {**self.env, **self._rank_environment(part, local_rank, error_file)}
        command = [self.settings.script, *self.settings.script_args]
        pid = spawn(command, env, stdio=[STDIN, *output.writers()])
        output.handed_over()
        process = self.table.watch(pid)
        worker = self._worker(part, local_rank, process, None, output)
        process.on_exit = lambda end: self._exited(worker, end)
        self.injector.begin_rank(_target(worker))
        self._began(worker, time.monotonic())

    def _worker(
        self,
        part: Part,
        local_rank: int,
        process: Process,
        standby: Standby | None,
        output: Output | None = None,
    ) -> Worker:
        rank = Rank(part.first_rank + local_rank)
        worker = self.workers[rank] = Worker(
            rank=rank,
            local_rank=local_rank,
            process=process,
            standby=standby,
            output=output or self._output(part, local_rank),
            error_file=self._error_file(part, local_rank),
            oom_kills=oom.kill_count(),
            flight=self.logs / f"round_{part.round}" / f"rank_{rank}.flight",
        )
        return worker

    def _rank_environment(self, part: Part, local_rank: int, error_file: Path) -> dict[str, str]:
        return rank_environment(self.settings, part, local_rank, self.run_id, error_file, self.env)

    def _output(self, part: Part, local_rank: int) -> Output:
        rank = part.first_rank + local_rank
        terminal = self.settings.terminal
        shown = OUT | ERR
        shown &= ~terminal.redirects.get(local_rank, 0) | terminal.tee.get(local_rank, 0)
        if (
            terminal.local_ranks_filter is not None
            and local_rank not in terminal.local_ranks_filter
        ):
            shown = 0
        prefix = Template(terminal.log_line_prefix_template).safe_substitute(
            role_name=self.settings.role, local_rank=local_rank, rank=rank
        )
        consoles = (self.console if shown & OUT else None, self.console if shown & ERR else None)
        path = self.logs / f"round_{part.round}" / f"rank_{rank}.log"
        return Output(path, consoles, prefix, (terminal.stdout_filters, terminal.stderr_filters))

    def _error_file(self, part: Part, local_rank: int) -> Path:
        rank = part.first_rank + local_rank
        return self.logs / f"round_{part.round}" / f"rank_{rank}.error.json"

    # ---- watching ----

    def _hear(self, worker: Worker, message: FromWorker) -> None:
        if isinstance(message, Began):
            self._began(worker, message.at)
        elif isinstance(message, Stepped):
            self._tell_progress([worker])
            worker.stepped = True
            self.watch.stepped(worker.rank)
            if all(w.stepped for w in self.workers.values()):
                self.pool.refill()
        elif isinstance(message, TrapSprung):
            self.injector.look(_target(worker))
        elif isinstance(message, Died):
            worker.raised, worker.failed = message.raised, worker.stop_sent is None
            self._await_end(worker, DYING_LIMIT_S)
        elif isinstance(message, Done):
            worker.done = True
            self._await_end(worker, ENDING_LIMIT_S)
        elif isinstance(message, Ask):
            self._ask(worker.rank, message)
        elif isinstance(message, OpenCheckpointer):
            self.keeping.opened(message)
        elif isinstance(message, ImageWhole):
            self.keeping.whole(worker.rank, message)

    def _await_end(self, worker: Worker, limit_s: float) -> None:
        """Its script is over; a thread of it, or its interpreter, may not be."""
        self.watch.remove(worker.rank)
        if worker.grace_timer is None:
            limit_s = float(self.env.get(ENDING_LIMIT, limit_s))
            loop = asyncio.get_running_loop()
            worker.grace_timer = loop.call_later(limit_s, self._end, worker)

    def _end(self, worker: Worker) -> None:
        if self.workers.get(worker.rank) is worker:
            log.warning("rank %d hangs after its script has ended; it is ended", worker.rank)
            self._kill(worker)

    def _ask(self, rank: Rank, message: Ask) -> None:
        round, request = self.round, message.request

        def carry() -> None:
            self.courier.ask(round, rank, message)

        if isinstance(request, FetchImage):
            self.keeping.fetch(request, lambda answer: self._answer(rank, message, answer))
        elif isinstance(request, FindState) and request.tried is None and rank == 0:
            self.keeping.look(round, request.checkpointer, carry)
        else:
            carry()

    def _answer(self, rank: Rank, message: Ask, answer: AnyAnswer) -> None:
        self._reply(rank, Reply(lane=message.lane, number=message.number, answer=answer))

    def _reply(self, rank: Rank, message: Reply) -> None:
        worker = self.workers.get(rank)
        if worker is not None and worker.standby is not None:
            worker.standby.reply(message)

    def _began(self, worker: Worker, at: float) -> None:
        self.report(
            WorkerStarted(
                at=self.clock.at(at),
                node=self.node,
                round=self.round,
                rank=worker.rank,
                pid=worker.process.pid,
                warm=worker.standby is not None and worker.standby.warm,
            )
        )
        if worker.standby is not None:
            self.watch.add(worker.rank, worker.process.pid, worker.standby.page.vitals)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self._sample)

    def _sample(self) -> None:
        """Now and then, tell how far everybody has come."""
        self._timer = None
        if not self.workers:
            return
        self._tell_progress(list(self.workers.values()), all_news=True)
        self.pool.refill()
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_EVERY_S, self._sample)

    def _tell_progress(self, workers: list[Worker], all_news: bool = False) -> None:
        moved = []
        for worker in workers:
            progress = self._progress(worker)
            if progress.steps > worker.told_steps:
                worker.told_steps = progress.steps
                moved.append(progress)
        if moved:
            news = all_news and self._news_due()
            self.report(
                Progress(
                    at=self.clock.now(),
                    node=self.node,
                    round=self.round,
                    ranks=tuple(moved),
                    paces=self.watch.news() if news else None,
                    timings=self.watch.timings() if news else (),
                )
            )

    def _news_due(self) -> bool:
        """Whether it is time to tell what steps consist of: with many nodes less often, so that the
        coordinator hears as much of it however many there are."""
        now = time.monotonic()
        if now < self._news_at:
            return False
        self._news_at = now + max(NEWS_EVERY_S, self._nodes / NEWS_PER_S)
        return True

    def _tell_stalls(self, stalls: tuple[Stall, ...]) -> None:
        at, node, round = self.clock.now(), self.node, self.round
        self.report(RanksStalled(at=at, node=node, round=round, stalls=stalls))

    def _progress(self, worker: Worker) -> RankProgress:
        if worker.standby is None:
            return RankProgress(rank=worker.rank)
        page = worker.standby.page.read()
        if page.steps == 0:
            return RankProgress(rank=worker.rank, restore_s=page.restore_s)
        return RankProgress(
            rank=worker.rank,
            step=StepNumber(page.step),
            steps=page.steps,
            first_at=self.clock.at(page.first_at),
            last_at=self.clock.at(page.last_at),
            checkpoint_s=page.checkpoint_s,
            restore_s=page.restore_s,
            saves=page.saves,
        )

    def _exited(self, worker: Worker, end: Exit) -> None:
        del self.workers[worker.rank]
        self.watch.remove(worker.rank)
        if worker.grace_timer is not None:
            worker.grace_timer.cancel()
        if worker.standby is not None:
            worker.standby.read_all()
        self.injector.look(_target(worker))
        self.courier.forget(worker.rank)
        worker.output.drain()
        progress = self._progress(worker)
        self._ended.append(progress)
        if worker.done and end.signal is not None:
            name = signal.Signals(end.signal).name
            log.warning("rank %d died of %s after its script had ended", worker.rank, name)
            end = Exit(code=0)
        elif worker.failed and end.signal is not None:
            end = Exit(code=1)
        if self._by_itself(worker, end):
            told = self._exit_of(worker, end, progress)
            self.keeping.after_seals(worker.rank, lambda: self.report(told))
        self.injector.gone(worker.process.pid)
        worker.output.close()
        if worker.standby is not None:
            worker.standby.close()
        if self._stopping is not None and not self.workers:
            self._stopped()

    def _by_itself(self, worker: Worker, end: Exit) -> bool:
        """Whether it ended of its own accord, not because we stopped it."""
        if worker.stop_sent is None or worker.failed:
            return True
        if end.signal in (signal.SIGTERM, signal.SIGKILL):
            return False
        took_s = time.monotonic() - worker.stop_sent
        self._slowest_stop_s = max(took_s, self._slowest_stop_s or 0.0)
        return worker.raised is not None

    def _exit_of(self, worker: Worker, end: Exit, progress: RankProgress) -> WorkerExited:
        killed = end.signal == signal.SIGKILL
        return WorkerExited(
            at=self.clock.now(),
            node=self.node,
            round=self.round,
            rank=worker.rank,
            code=end.code,
            signal=end.signal,
            oom=killed and oom.kill_count() > worker.oom_kills,
            progress=progress,
            raised=worker.raised or _recorded_error(worker.error_file),
            log_tail=worker.output.tail(),
        )

    # ---- stopping ----

    def _stop(self, order: StopWorkers | Finish) -> None:
        if isinstance(self._stopping, Finish):
            return
        if isinstance(self._stopping, StopWorkers) and isinstance(order, StopWorkers):
            return  # The same order again.
        self._stopping = order
        self.tester.end()
        self.watch.stop()
        if self._starting is not None:
            self._starting.cancel()
        if isinstance(order, StopWorkers) and order.examine and self.workers:
            self._spawn(self._examine_then_stop(order))
        else:
            self._stop_all(order)

    def _stop_all(self, order: StopWorkers | Finish) -> None:
        for worker in self.workers.values():
            self._ask_to_stop(worker, order.grace_s)
        if not self.workers:
            self._stopped()

    async def _examine_then_stop(self, order: StopWorkers) -> None:
        try:
            await self._testify(order.examine, EXAMINE_LIMIT_S)
        finally:
            if self._stopping is order:
                self._stop_all(order)

    async def _testify(self, inquest: int, limit_s: float) -> None:
        """Send what can be seen of the workers; whoever asked does not wait for ever."""
        workers = [self._examined(w) for w in self.workers.values() if w.standby is not None]
        evidence = await examine(self.node, self.round, workers, limit_s)
        self.testify(inquest, evidence)

    def _examined(self, worker: Worker) -> Examined:
        assert worker.standby is not None
        page = worker.standby.page.read()
        return Examined(
            rank=worker.rank,
            pid=worker.process.pid,
            vitals=worker.standby.page.vitals,
            step=StepNumber(page.step),
            stepped_at=page.last_at,
            flight=worker.flight,
            log_tail=worker.output.tail(),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ask_to_stop(self, worker: Worker, grace_s: Seconds) -> None:
        if worker.stop_sent is not None:
            return
        worker.stop_sent = time.monotonic()
        reaction = worker.process.minds_sigterm()
        if reaction == "ignores" or grace_s <= 0:
            self._kill(worker)
            return
        worker.process.send(signal.SIGTERM)
        worker.process.send(signal.SIGCONT)
        loop = asyncio.get_running_loop()
        worker.grace_timer = loop.call_later(grace_s, self._kill, worker)

    def _kill(self, worker: Worker) -> None:
        worker.process.send(signal.SIGKILL)

    def kill_all(self) -> None:
        """Do not wait for anybody any more."""
        for worker in self.workers.values():
            self._kill(worker)

    def _stopped(self) -> None:
        self.table.end_strays()
        ranks = tuple(self._ended)
        order = self._stopping
        if isinstance(order, Finish):
            limit_s = 0.0 if order.rejoin else self.settings.save_deadline_s
            self.keeping.when_settled(limit_s, lambda: self._leave(order, ranks))
            return
        assert order is not None
        self._stopping = None
        if self._ready_after != order.round:  # The same order may come again: same answer.
            self._ready_after = order.round
            self.port.close()
            self.port = self._offer_port()
        self.report(
            NodeReady(
                at=self.clock.now(),
                node=self.node,
                round=order.round,
                store_port=self.port.number,
                slowest_stop_s=self._slowest_stop_s,
                ranks=ranks,
            )
        )

    def _leave(self, order: Finish, ranks: tuple[RankProgress, ...]) -> None:
        if not self.finished.done():
            now, round = self.clock.now(), self.round
            self.report(NodeLeft(at=now, node=self.node, round=round, ranks=ranks))
            self.finished.set_result(order)


def _target(worker: Worker) -> Target:
    page = worker.standby.page if worker.standby is not None else None
    return Target(worker.rank, worker.process, page)


def _recorded_error(path: Path) -> Raised | None:
    """What torch's `record` decorator wrote, for a script that uses it."""
    try:
        content = json.loads(path.read_text())
        message = content["message"]
        if isinstance(message, str):
            return Raised(
                type="Error", message=message[:2000], where="", traceback=message[-16000:]
            )
        stack = message.get("extraInfo", {}).get("py_callstack", "")
        text = str(message.get("message", ""))
        kind = text.partition(":")[0]
        return Raised(type=kind, message=text[:2000], where="", traceback=stack[-16000:])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
