"""The launcher is the process of `holdfast run`: it starts the others and outlives them.

It forks the agent first (whose nursery begins to import torch at once) and the coordinator, and then
only waits for signals (see `launch/parent.py`). When one of its children dies, it is restarted:

    coordinator died    it is restarted on the same listening socket, which never closed
    agent died          the workers it left are killed, a new agent joins the job
    agent was fenced    (another node had its places) the same, and it does not count as a death
    child stopped       (SIGSTOP) for longer than a limit: it is killed, and so restarted
    launcher died       the kernel tells the agent, which ends everything; the coordinator dies too

Launcher and agent are child subreapers: whichever of them dies, the other one adopts and kills all
descendants, so that no process of a job outlives it.

A coordinator that ended in order has ended the job. An agent that dies after that is not restarted,
and one that was restarted too late to hear of it is killed: it would wait for a coordinator that no
longer exists. The exit code is then the one in the journal.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast import kernel
from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings
from holdfast.jobhome import JobHome
from holdfast.launch.beside import terminal_of, viewers_of
from holdfast.launch.child import Child, how, reap, send
from holdfast.launch.machine import make_directories
from holdfast.launch.orders import agent_orders, coordinator_orders, node_of
from holdfast.launch.parent import (
    ALWAYS_HANDLED,
    JobEnd,
    Parent,
    read_end,
)
from holdfast.launch.site import find_site
from holdfast.messages.exits import (
    EXIT_BROKEN,
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_REJOIN,
    EXIT_TURNED_AWAY,
    EXIT_USAGE,
)

log = logging.getLogger("holdfast")

TELL_AFTER_S = 3.0


@dataclass
class Launcher(Parent):
    """The parent of agent and coordinator. Signals are passed on to the agent, which handles them."""

    agent: Child
    coordinator: Child | None
    """None on a node that joins a coordinator elsewhere."""
    alone: bool
    """Whether no other node can ever join."""
    read_end: Callable[[], JobEnd]
    """Reads the job's end from the journal, after the coordinator ended in order."""
    launch: str = ""
    """Drawn for this launcher: part of its agents' ids."""
    _over: bool = False

    def _children(self) -> list[Child]:
        return [self.agent, *self._spared()]

    def _spared(self) -> list[Child]:
        return [self.coordinator] if self.coordinator is not None else []

    def _signalled(self, number: signal.Signals) -> int | None:
        send(self.agent.pid, number)
        send(self.agent.pid, signal.SIGCONT)
        return None

    def _ended(self, gone: Mapping[int, int]) -> int | None:
        code = None
        if self.coordinator is not None and self.coordinator.pid in gone:
            code = self._coordinator_ended(self.coordinator, gone[self.coordinator.pid])
        if code is None and self.agent.pid in gone:
            code = self._agent_ended(gone[self.agent.pid])
        return code

    def _coordinator_ended(self, coordinator: Child, code: int) -> int | None:
        """The job's exit code, or None while the agent still runs."""
        if code == EXIT_TURNED_AWAY:
            self.coordinator = None
            return EXIT_FAILED
        if code != 0:
            self._restart(coordinator, code)
            return None
        self.coordinator, self._over = None, True
        if self.agent.pid_before:  # Only a restarted agent may have been too late to join.
            end = self.read_end()
            if end.nodes is not None and node_of(self.agent.pid, self.launch) not in end.nodes:
                return end.code
        return None

    def _agent_ended(self, code: int) -> int | None:
        """The job's exit code, or None when another agent takes its place."""
        if code in (EXIT_TURNED_AWAY, EXIT_REFUSED):
            self._end_coordinator()
            return EXIT_USAGE if code == EXIT_REFUSED else EXIT_FAILED
        if code >= 0 and code not in (EXIT_BROKEN, EXIT_REJOIN):
            return code
        self._end_orphans()
        if self._over:
            log.warning("the agent %s after the end of the job", how(code))
            return self.read_end().code
        if code == EXIT_REJOIN:
            self.agent.start()
        else:
            self._restart(self.agent, code)
        return None

    def _end_coordinator(self) -> None:
        """Kill a coordinator that no node will ever join."""
        if self.coordinator is not None:
            send(self.coordinator.pid, signal.SIGKILL)
            reap(self.coordinator.pid)
            self.coordinator = None

    def _end_all(self) -> None:
        """Let the coordinator finish the job, then kill what is left."""
        if self.coordinator is not None:
            self._await_coordinator(self.coordinator)
            self.coordinator = None
        self._end_orphans()

    def _await_coordinator(self, coordinator: Child) -> None:
        """Wait for the coordinator, which ends once all nodes have left, this one and the others."""
        told = False
        while coordinator.pid in kernel.children(os.getpid()):
            got = signal.sigtimedwait(self.signals | {signal.SIGCHLD}, TELL_AFTER_S)
            if got is None and self.alone:
                return  # The agent died before it could tell the coordinator that the job is over.
            if got is None and not told:
                log.info("this node has left the job; the coordinator keeps running for the others")
                told = True
            elif got is not None and got.si_signo != signal.SIGCHLD:
                return
            if code := self._gone().get(coordinator.pid):
                self._restart(coordinator, code)


def launch(settings: RunSettings, since_monotonic: float) -> tuple[int, JobHome | None]:
    """Run this node's part of a job to its end; the exit code, and the job's home if it is hosted."""
    make_directories(settings)
    site = find_site(settings)
    for secret in (Settings.token, Settings.notify):  # They are read by now; scripts are not to.
        os.environ.pop(secret.variables[0], None)
    images = ImageHome(site.home.name, Path(settings.image_dir) if settings.image_dir else None)
    launch = secrets.token_hex(4)

    def be_agent() -> int:
        from holdfast.agent.main import run_agent

        before = launcher.agent.pid_before
        return run_agent(agent_orders(settings, site, images.path, launch, before))

    def be_coordinator() -> int:
        from holdfast.coordinator.main import run_coordinator

        assert launcher.coordinator is not None
        first = launcher.coordinator.pid_before == 0
        requeued = settings.requeued and first
        orders = coordinator_orders(
            site, settings.tls, settings.terms, since_monotonic, requeued=requeued
        )
        run_coordinator(orders)
        return 0  # The coordinator ended in order; the job's exit code is the agent's.

    launcher = Launcher(
        signals=ALWAYS_HANDLED | {signal.Signals[name] for name in settings.signals_to_handle},
        agent=Child("agent", be_agent),
        coordinator=Child("coordinator", be_coordinator) if site.listener is not None else None,
        alone=settings.places == 1,
        read_end=partial(read_end, site.home),
        launch=launch,
    )
    hosts = site.listener is not None
    try:
        with terminal_of(settings, site.home, hosts) as line:
            if hosts:
                launcher.viewers = viewers_of(settings, site.home, line)
            code = launcher.run()
    finally:
        images.remove()
    if not hosts:
        return code, None
    launcher.listen_again()
    return code, site.home
