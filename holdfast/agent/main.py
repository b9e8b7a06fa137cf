"""One agent, from its start to its exit code.

Here its parts are put together: orders come in by the stream and are carried out by the supervisor,
and whatever the parts have to tell goes out by the stream again. The rest is what an agent says of
itself: who it is when it joins, whether it is warm, what its checks found, and its last word.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import kernel
from holdfast.agent.environment import node_environment
from holdfast.agent.health_monitor import FitnessWatch, watching
from holdfast.agent.nodecheck import Tester
from holdfast.agent.output import Console
from holdfast.agent.processes import ProcessTable
from holdfast.agent.shutdown import Leaving
from holdfast.agent.snapshots import Keeping
from holdfast.agent.standbys import Pool
from holdfast.agent.starting import Starter
from holdfast.agent.stream import CoordinatorStream, Turned
from holdfast.agent.supervisor import Supervisor
from holdfast.clock import JobClock
from holdfast.config.settings import RunSettings
from holdfast.core.patience import JOIN_LIMIT_S
from holdfast.jobhome import JobHome
from holdfast.messages.events import HealthFound, NodeJoined, NodeWarm
from holdfast.messages.exits import EXIT_REJOIN, EXIT_TURNED_AWAY
from holdfast.messages.health import HealthResult
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.units import NodeId
from holdfast.platforms import topology
from holdfast.wire.tls import client_context

log = logging.getLogger("holdfast.agent")

CONSOLE_LIMIT_S = 5.0
LAST_WORD_LIMIT_S = 2.0


@dataclass(frozen=True)
class AgentOrders:
    """All that an agent is told when it is started."""

    node: NodeId
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
        eager=orders.terms.node_check or _seems_to_use_torch(settings),
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
        agent.keeping.keeper.close()
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
    """All parts of an agent, and what it says of itself."""

    def __init__(
        self, orders: AgentOrders, table: ProcessTable, pool: Pool, env: dict[str, str]
    ) -> None:
        settings = orders.settings
        self.orders = orders
        self.pool = pool
        self.console = Console()
        self.clock = JobClock()
        self.node = orders.node
        self.listener = _image_listener(orders.address)
        self.stream = self._stream()
        self.keeping = self._keeping(table, env)
        self.starter = Starter(
            settings=settings,
            run_id=orders.run_id,
            address=orders.address,
            store_port=orders.store_port,
            logs=orders.logs,
            images=orders.images,
            console=self.console,
            table=table,
            pool=pool,
            env=env,
        )
        self.tester = Tester(self.node, orders.address, pool, self.clock, self.stream.send)
        self.supervisor = Supervisor(
            node=self.node,
            clock=self.clock,
            stream=self.stream,
            table=table,
            pool=pool,
            keeping=self.keeping,
            starter=self.starter,
            tester=self.tester,
            hang_terms=orders.terms.hangs,
            save_deadline_s=settings.save_deadline_s,
        )
        self.leaving = Leaving(
            node=self.node,
            signals=[signal.Signals[name] for name in settings.signals_to_handle],
            launcher_pid=orders.launcher_pid,
            solitude_limit_s=orders.terms.join_limit_s or JOIN_LIMIT_S,
            clock=self.clock,
            stream=self.stream,
            supervisor=self.supervisor,
            keeping=self.keeping,
        )
        self._joined = False
        self._found: tuple[HealthResult, ...] = ()
        """What the node's checks found before it could be told."""
        self.fitness: FitnessWatch | None = None
        node_check = orders.terms.node_check
        if FitnessWatch.worth_while(node_check):
            self.fitness = FitnessWatch(orders.home.path, node_check, self._tell_health)
            table.spared = lambda: self.fitness.pids if self.fitness is not None else ()

    def _stream(self) -> CoordinatorStream:
        return CoordinatorStream(
            host=self.orders.host,
            port=self.orders.port,
            find=self.orders.find_coordinator,
            token=self.orders.token,
            node=self.node,
            clock=self.clock,
            state=lambda: (self.supervisor.round, self.supervisor.busy),
            act=lambda order: self.supervisor.act(order),
            terms=self.orders.terms,
            tls=client_context(self.orders.settings.tls),
            resumed=lambda sent: self.supervisor.courier.ask_again(sent),
        )

    def _keeping(self, table: ProcessTable, env: dict[str, str]) -> Keeping:
        return Keeping(
            node=self.node,
            images=self.orders.images,
            job=self.orders.home.name,
            token=self.orders.token,
            tls=self.orders.settings.tls,
            listener=self.listener,
            table=table,
            clock=self.clock,
            report=self.stream.send,
            tell=self._tell,
            env=env,
        )

    async def run(self) -> int:
        self.leaving.mind_signals()
        talking = asyncio.ensure_future(self.stream.run(self._join))
        minding = asyncio.ensure_future(self.leaving.mind_solitude())
        either: set[asyncio.Future[Any]] = {talking, self.supervisor.finished}
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        minding.cancel()
        if talking in done:
            return self._turned_away(talking)
        order = self.supervisor.finished.result()
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
            test_port=self.tester.port,
        )
        port = self.starter.port.number
        self.stream.send(
            NodeJoined(at=self.clock.now(), node=self.node, spec=spec, store_port=port)
        )
        self._joined = True
        self.keeping.tell_images()
        if self._found:
            self._tell_health(self._found)
        self.leaving.joined()
        if self.pool.warm:
            self._tell_warm()
        self.pool.on_warm = self._tell_warm

    def _tell_health(self, results: tuple[HealthResult, ...]) -> None:
        if self._joined:
            self.stream.send(HealthFound(at=self.clock.now(), node=self.node, results=results))
        else:
            self._found = results

    def _tell(self, text: str) -> None:
        self.console.write(2, f"[holdfast] {text}\n".encode())

    def _tell_warm(self) -> None:
        self.stream.send(NodeWarm(at=self.clock.now(), node=self.node))


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
