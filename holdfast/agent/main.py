"""One agent, from its start to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import kernel
from holdfast.agent.environment import node_environment
from holdfast.agent.fitness import FitnessWatch, watching
from holdfast.agent.keeping import Keeping
from holdfast.agent.output import Console
from holdfast.agent.processes import ProcessTable
from holdfast.agent.standbys import Pool
from holdfast.agent.stream import CoordinatorStream, Turned
from holdfast.agent.supervisor import Supervisor
from holdfast.clock import JobClock
from holdfast.config import RunSettings
from holdfast.core.deadlines import JOIN_LIMIT_S
from holdfast.jobhome import JobHome
from holdfast.messages.actions import Finish
from holdfast.messages.events import AnyEvent, HealthFound, NodeJoined, NodeLeaving, NodeWarm
from holdfast.messages.evidence import RankEvidence
from holdfast.messages.exits import EXIT_REJOIN, EXIT_TRY_AGAIN, EXIT_TURNED_AWAY
from holdfast.messages.health import Result
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.units import NodeId
from holdfast.messages.wire import Testimony
from holdfast.platforms import topology
from holdfast.tls import client_context

log = logging.getLogger("holdfast.agent")

CONSOLE_LIMIT_S = 5.0
LAST_WORD_LIMIT_S = 2.0
SOLITUDE_LOOK_S = 1.0
SOLITUDE_TOLD_S = 5.0


@dataclass(frozen=True)
class AgentOrders:
    """All that an agent is told when it is started."""

    settings: RunSettings
    host: str
    port: int
    token: str
    terms: Terms
    address: str
    """Where other nodes reach this one."""
    store_port: int
    """Where the user wants rank 0's store; 0: anywhere."""
    run_id: str
    logs: Path
    launcher_pid: int
    home: JobHome
    images: Path
    """The directory of this node's snapshots, which outlives this agent."""

    def find_coordinator(self) -> tuple[str, int] | None:
        """Where the job's home says that the coordinator is, if it is still this job's."""
        try:
            content = self.home.read_job_file()
            known = content["token"] == self.token
            return (str(content["host"]), int(content["port"])) if known else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def run_agent(orders: AgentOrders) -> int:
    """Be the agent of this node until the job is over; the exit code."""
    kernel.name_process("holdfast-agent")
    kernel.adopt_orphans()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    return asyncio.run(_run(orders))


async def _run(orders: AgentOrders) -> int:
    settings = orders.settings
    env = node_environment(settings, os.environ)
    table = ProcessTable()
    pool = Pool(
        table=table,
        command=[settings.script, *settings.script_args],
        env=env,
        want=settings.nproc if settings.standby is None else settings.standby,
        eager=settings.node_check or _seems_to_use_torch(settings),
        preload=settings.preload,
        first_path=_first_path(settings),
        log_path=orders.logs / f"nursery-{os.getpid()}.log",
    )
    pool.open()
    agent = _Agent(orders, table, pool, env)
    try:
        with watching(agent.fitness):
            return await agent.run()
    finally:
        pool.close()
        agent.keeping.close()
        agent.console.close(CONSOLE_LIMIT_S)
        _stop_listening(
            {signal.SIGCHLD, *map(signal.Signals.__getitem__, settings.signals_to_handle)}
        )


def _stop_listening(signals: set[signal.Signals]) -> None:
    """A loop that is being closed must not be woken up by a signal any more."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN if number != signal.SIGCHLD else signal.SIG_DFL)


class _Agent:
    """Joins the stream and the supervisor, and minds the signals."""

    def __init__(
        self, orders: AgentOrders, table: ProcessTable, pool: Pool, env: dict[str, str]
    ) -> None:
        self.orders = orders
        self.pool = pool
        self.console = Console()
        self.clock = JobClock()
        self.node = NodeId(f"{socket.gethostname()}:{os.getpid()}")
        self.finished: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.listener = _image_listener(orders.address)
        self.keeping = Keeping(
            node=self.node,
            images=orders.images,
            job=orders.home.name,
            token=orders.token,
            tls=orders.settings.tls,
            listener=self.listener,
            table=table,
            clock=self.clock,
            report=self._report,
            tell=self._tell,
            env=env,
        )
        self.supervisor = Supervisor(
            keeping=self.keeping,
            testify=self._testify,
            written=lambda: self.stream.drained.wait(),
            fall_silent=lambda seconds: self.stream.fall_silent(seconds),
            hang_terms=orders.terms.hangs,
            node=self.node,
            address=orders.address,
            store_port=orders.store_port,
            settings=orders.settings,
            table=table,
            run_id=orders.run_id,
            logs=orders.logs,
            clock=self.clock,
            pool=pool,
            console=self.console,
            report=self._report,
            finished=self.finished,
            env=env,
        )
        self.stream = CoordinatorStream(
            host=orders.host,
            port=orders.port,
            find=orders.find_coordinator,
            token=orders.token,
            node=self.node,
            clock=self.clock,
            state=lambda: (self.supervisor.round, self.supervisor.busy),
            act=self.supervisor.act,
            terms=orders.terms,
            tls=client_context(orders.settings.tls),
            resumed=self.supervisor.courier.ask_again,
        )
        self._found: tuple[Result, ...] = ()
        """What the node's checks found before it could be told."""
        self.fitness: FitnessWatch | None = None
        thorough = orders.settings.node_check
        if FitnessWatch.worth_while(thorough):
            self.fitness = FitnessWatch(orders.home.path, thorough, self._tell_health)
            table.spared = lambda: self.fitness.pids if self.fitness is not None else ()
        self._joined = False
        self._leaving: Finish | None = None
        """What we would do by ourselves, once we were told to stop."""

    async def run(self) -> int:
        self._mind_signals()
        talking = asyncio.ensure_future(self.stream.run(self._join))
        minding = asyncio.ensure_future(self._mind_solitude())
        either: set[asyncio.Future[Any]] = {talking, self.finished}
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        minding.cancel()
        if talking in done:
            return self._turned_away(talking)
        order = self.finished.result()
        try:
            await asyncio.wait_for(self.stream.drained.wait(), LAST_WORD_LIMIT_S)
        except asyncio.TimeoutError:
            log.warning("the coordinator did not hear this node's last word")
        talking.cancel()
        if order.rejoin:
            log.warning("%s", order.reason)
            return EXIT_REJOIN
        return order.code

    def _turned_away(self, talking: asyncio.Future[None]) -> int:
        self.supervisor.kill_all()
        error = talking.exception()
        if not isinstance(error, Turned) and error is not None:
            raise error
        print(f"holdfast: the coordinator refused this node: {error}", file=sys.stderr)
        return EXIT_TURNED_AWAY

    def _join(self) -> None:
        settings = self.orders.settings
        host = socket.gethostname()
        switch, block, domain = topology.labels(os.environ)
        spec = NodeSpec(
            host=host,
            address=self.orders.address,
            slots=settings.nproc,
            pid=os.getpid(),
            node_rank=settings.node_rank,
            infra_rank=topology.infra_rank(os.environ, host),
            switch=switch,
            block=block,
            domain=domain,
            keeper_port=self.listener.getsockname()[1],
            test_port=self.supervisor.tester.port,
        )
        port = self.supervisor.port.number
        self.stream.send(
            NodeJoined(at=self.clock.now(), node=self.node, spec=spec, store_port=port)
        )
        self._joined = True
        self.keeping.tell_images()
        if self._found:
            self._tell_health(self._found)
        if self._leaving is not None:
            self._tell_leaving(self._leaving)
        if self.pool.warm:
            self._tell_warm()
        self.pool.on_warm = self._tell_warm

    def _testify(self, inquest: int, evidence: Sequence[RankEvidence]) -> None:
        """One rank at a time: a frame has a limit, and a node may have many ranks."""
        for index, one in enumerate(evidence):
            more = index + 1 < len(evidence)
            self.stream.tell(Testimony(inquest=inquest, evidence=(one,), more=more))
        if not evidence:
            self.stream.tell(Testimony(inquest=inquest, evidence=()))

    def _tell_health(self, results: tuple[Result, ...]) -> None:
        if self._joined:
            self.stream.send(HealthFound(at=self.clock.now(), node=self.node, results=results))
        else:
            self._found = results

    def _report(self, event: AnyEvent) -> None:
        self.stream.send(event)

    def _tell(self, text: str) -> None:
        self.console.write(2, f"[holdfast] {text}\n".encode())

    def _tell_warm(self) -> None:
        self.stream.send(NodeWarm(at=self.clock.now(), node=self.node))

    async def _mind_solitude(self) -> None:
        """Give up when there is nothing to do and nobody to ask for far too long."""
        limit_s = self.orders.settings.rendezvous.join_timeout_s or JOIN_LIMIT_S
        where = f"the coordinator at {self.orders.host}:{self.orders.port}"
        told = False
        while not self.finished.done():
            await asyncio.sleep(SOLITUDE_LOOK_S)
            alone_s = 0.0 if self.stream.connected else time.monotonic() - self.stream.lost_at
            if alone_s > SOLITUDE_TOLD_S and not told:
                log.warning("no word from %s; knocking on", where)
            told = alone_s > SOLITUDE_TOLD_S
            if alone_s > limit_s and not self.supervisor.busy:
                reason = f"{where} cannot be reached"
                print(f"holdfast: {reason}; try again", file=sys.stderr)
                order = Finish(node=self.node, code=EXIT_TRY_AGAIN, reason=reason, grace_s=0.0)
                self.supervisor.act(order)

    # ---- signals ----

    def _mind_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in self.orders.settings.signals_to_handle:
            number = signal.Signals[name]
            loop.add_signal_handler(number, self._on_signal, number)
        kernel.unblock_signals()
        if os.getppid() != self.orders.launcher_pid:
            self._on_signal(signal.SIGTERM)

    def _on_signal(self, number: signal.Signals) -> None:
        orphaned = os.getppid() != self.orders.launcher_pid
        if orphaned or self._leaving is not None:
            # The launcher is gone, or somebody insists: no more courtesy.
            self.keeping.hurry()
            self.supervisor.act(self._own_finish(number, grace_s=0.0))
            self.supervisor.kill_all()
            return
        self._leaving = self._own_finish(number, grace_s=30.0)
        if self._joined:
            self._tell_leaving(self._leaving)
        if not self.stream.connected:
            # It may be about to start, or to come back; if it does not, we go without its leave.
            loop = asyncio.get_running_loop()
            loop.call_later(LAST_WORD_LIMIT_S, self.supervisor.act, self._leaving)

    def _tell_leaving(self, finish: Finish) -> None:
        now = self.clock.now()
        self.stream.send(
            NodeLeaving(at=now, node=self.node, reason=finish.reason, code=finish.code)
        )

    def _own_finish(self, number: signal.Signals, grace_s: float) -> Finish:
        code = 1 if number == signal.SIGINT else EXIT_TRY_AGAIN
        reason = f"stopped by {number.name}"
        return Finish(node=self.node, code=code, reason=reason, grace_s=grace_s)


def _image_listener(address: str) -> socket.socket:
    """Where other nodes ask for images; bound now, so that its number can be told, and served by
    the keeper once there is one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    return listener


def _first_path(settings: RunSettings) -> str:
    """Where python would look first for what the script imports."""
    if settings.entry == "module":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(settings.script))


def _seems_to_use_torch(settings: RunSettings) -> bool:
    """Whether the first ranks will import torch anyway, judged by the script's own text."""
    if settings.entry == "script":
        try:
            return b"torch" in Path(settings.script).read_bytes()
        except OSError:
            return True
    return settings.entry != "command"
