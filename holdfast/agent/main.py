"""Runs one agent, from its start to its exit code.

Here its parts are put together: orders come in by the stream and are carried out by the supervisor,
and the parts' events go out by the stream. The rest is what an agent reports about its node: that
it joins, that it is warm, what its checks found, and that it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from typing import Any

from holdfast import kernel, terminal_line
from holdfast.agent import launcher_error
from holdfast.agent.console import Console
from holdfast.agent.file_timer import PIPE, serving, timer_file
from holdfast.agent.health_monitor import HealthMonitor, monitoring
from holdfast.agent.lease import RoundLease
from holdfast.agent.node_sampler import NodeSampler, sampling
from holdfast.agent.nodecheck import NodeTester
from holdfast.agent.orders import AgentOrders
from holdfast.agent.processes import ProcessTable
from holdfast.agent.shutdown import Shutdown
from holdfast.agent.snapshots import Snapshots
from holdfast.agent.standbys import Pool
from holdfast.agent.starting import Starter, node_environment
from holdfast.agent.stream import CoordinatorStream, NodeRefused
from holdfast.agent.supervisor import Supervisor
from holdfast.clock import JobClock
from holdfast.messages.events import HealthFound, NodeJoined, NodeSampled, NodeWarm
from holdfast.messages.exits import EXIT_REFUSED, EXIT_REJOIN
from holdfast.messages.health import HealthResult
from holdfast.messages.records import NodeSpec
from holdfast.messages.usage import NodeUsage
from holdfast.platforms import topology
from holdfast.tasks import BackgroundTasks, TaskFailure

log = logging.getLogger("holdfast.agent")

CONSOLE_LIMIT_S = 5.0
LAST_WORD_LIMIT_S = 2.0


def run_agent(orders: AgentOrders) -> int:
    """Be the agent of this node until the job is over; return the exit code."""
    kernel.name_process("holdfast-agent")
    kernel.adopt_orphans()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    return asyncio.run(_run(orders))


async def _run(orders: AgentOrders) -> int:
    settings = orders.settings
    env = node_environment(settings, os.environ)
    timers = timer_file(os.environ, orders.launcher_pid)
    if timers is not None:
        env[PIPE] = timers
    table = ProcessTable()
    pool = Pool(orders, table, env)
    pool.open()
    agent = _Agent(orders, table, pool, env)
    try:
        pids = agent.supervisor.rank_pids
        watching = monitoring(agent.health, agent.tasks)
        with watching, sampling(agent.sampler), serving(timers, pids):
            return await agent.run()
    finally:
        agent.tasks.close()
        pool.close()
        agent.snapshots.keeper.close()
        agent.console.close(CONSOLE_LIMIT_S)
        if os.getppid() != orders.launcher_pid and agent.line is not None:
            agent.line.take_away()  # Its launcher was killed, and cannot.
        _stop_listening(
            {signal.SIGCHLD, *map(signal.Signals.__getitem__, settings.signals_to_handle)}
        )


def _stop_listening(signals: set[signal.Signals]) -> None:
    """Remove the signal handlers: a loop that is being closed must not be woken by a signal."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN if number != signal.SIGCHLD else signal.SIG_DFL)


class _Agent:
    """All parts of an agent, and the events about the node itself."""

    def __init__(
        self, orders: AgentOrders, table: ProcessTable, pool: Pool, env: dict[str, str]
    ) -> None:
        settings = orders.settings
        self.orders = orders
        self.pool = pool
        self.line = terminal_line.found(orders.home.line)
        self.console = Console(self.line)
        pool.tell = self._tell
        self.clock = JobClock()
        self.tasks = BackgroundTasks(self._task_failed)
        self.node = orders.node
        self.listener = _image_listener(orders.address)
        self.stream = CoordinatorStream(
            orders=orders,
            clock=self.clock,
            state=lambda: (self.supervisor.round, self.supervisor.busy),
            act=lambda order: self.supervisor.act(order),
            lease=RoundLease(lambda: self.supervisor),
            resumed=lambda sent: self.supervisor.resumed(sent),
        )
        self.snapshots = self._snapshots(table, env)
        self.starter = Starter(orders, self.console, table, pool, env)
        self.tester = NodeTester(self.node, orders.address, pool, self.clock, self.stream.send)
        self.supervisor = Supervisor(
            node=self.node,
            clock=self.clock,
            stream=self.stream,
            table=table,
            pool=pool,
            snapshots=self.snapshots,
            starter=self.starter,
            tester=self.tester,
            hang_terms=orders.terms.hangs,
            save_deadline_s=settings.save_deadline_s,
        )
        self.shutdown = Shutdown(orders, self.clock, self.stream, self.supervisor, self.snapshots)
        self._joined = False
        self._found: tuple[HealthResult, ...] = ()
        """What the health checks found before the node joined."""
        self.health: HealthMonitor | None = None
        terms = orders.terms
        self._usage: NodeUsage | None = None
        """The newest sample, if the node has not joined yet."""
        self.sampler = NodeSampler(terms.max_nodes + terms.spares, self._tell_usage)
        node_check = terms.node_check
        if HealthMonitor.is_useful(node_check):
            self.health = HealthMonitor(orders.home.path, node_check, self._tell_health)
            table.spared = lambda: self.health.pids if self.health is not None else ()

    def _snapshots(self, table: ProcessTable, env: dict[str, str]) -> Snapshots:
        return Snapshots(
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
        self.shutdown.handle_signals()
        talking = asyncio.ensure_future(self.stream.run(self._join))
        self.tasks.keep("watch for the coordinator", self.shutdown.watch_coordinator)
        either: set[asyncio.Future[Any]] = {talking, self.supervisor.finished}
        done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if talking in done:
            return self._refused(talking)
        order = self.supervisor.finished.result()
        try:
            await asyncio.wait_for(self.stream.drained.wait(), LAST_WORD_LIMIT_S)
        except asyncio.TimeoutError:
            log.warning("the coordinator did not acknowledge this node's last events")
        talking.cancel()
        if order.rejoin:
            log.warning("%s", order.reason)
            return EXIT_REJOIN
        if order.code != 0:
            launcher_error.write(self.supervisor.failure or order.reason)
        return order.code

    def _refused(self, talking: asyncio.Future[None]) -> int:
        self.supervisor.kill_all()
        error = talking.exception()
        if not isinstance(error, NodeRefused) and error is not None:
            raise error
        print(f"holdfast: the coordinator refused this node: {error}", file=sys.stderr)
        launcher_error.write(f"the coordinator refused this node: {error}")
        return EXIT_REFUSED

    def _join(self) -> None:
        settings = self.orders.settings
        host = topology.node_name(os.environ, socket.gethostname())
        switch, block, domain = topology.labels(os.environ)
        spec = NodeSpec(
            host=host,
            address=self.orders.address,
            slots=settings.nproc,
            pid=os.getpid(),
            role=settings.role,
            store_name=self.orders.store_name,
            node_rank=settings.node_rank,
            infra_rank=topology.infra_rank(os.environ, host),
            switch=switch,
            block=block,
            domain=domain,
            keeper_port=self.listener.getsockname()[1],
            test_port=self.tester.port,
            request=topology.request(os.environ),
        )
        port = self.starter.port.number
        self.stream.send(
            NodeJoined(
                at=self.clock.now(),
                node=self.node,
                spec=spec,
                store_port=port,
                replaces=self.orders.replaces,
            )
        )
        self._joined = True
        self.snapshots.tell_images()
        if self._found:
            self._tell_health(self._found)
        if self._usage is not None:
            self._tell_usage(self._usage)
        self.shutdown.joined()
        if self.pool.warm:
            self._tell_warm()
        self.pool.on_warm = self._tell_warm

    def _tell_health(self, results: tuple[HealthResult, ...]) -> None:
        if self._joined:
            self.stream.send(HealthFound(at=self.clock.now(), node=self.node, results=results))
        else:
            self._found = results

    def _tell_usage(self, usage: NodeUsage) -> None:
        if self._joined:
            self.stream.send(NodeSampled(at=self.clock.now(), node=self.node, usage=usage))
        else:
            self._usage = usage

    def _task_failed(self, failure: TaskFailure) -> None:
        if self._joined:
            self.stream.send(failure.event(self.node, self.clock.now()))

    def _tell(self, text: str) -> None:
        self.console.write(2, f"[holdfast] {text}\n".encode())

    def _tell_warm(self) -> None:
        self.stream.send(NodeWarm(at=self.clock.now(), node=self.node))


def _image_listener(address: str) -> socket.socket:
    """Listen for other nodes that fetch images: bound before the node joins, which announces the
    port, and served by the keeper once there is one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    return listener
