"""The launcher is the process of `holdfast run`: it starts the others and outlives them.

It forks the agent first (whose nursery begins to import torch at once) and the coordinator, and then
only waits for signals. It runs no event loop, no thread and holds no state, so there is little that
could bring it down; and when one of its children dies, the launcher restarts it:

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
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast import kernel, proc
from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.config.schema import Settings
from holdfast.config.settings import RunSettings
from holdfast.config.sources import from_environment
from holdfast.errors import HoldfastError, JobError, JournalError, UsageError
from holdfast.jobhome import JobHome
from holdfast.launch.machine import make_directories
from holdfast.launch.orders import agent_orders, coordinator_orders, node_of
from holdfast.launch.site import find_site
from holdfast.messages.exits import (
    EXIT_BROKEN,
    EXIT_FAILED,
    EXIT_REFUSED,
    EXIT_REJOIN,
    EXIT_TURNED_AWAY,
    EXIT_USAGE,
)
from holdfast.messages.units import NodeId

log = logging.getLogger("holdfast")

DEATHS_WINDOW_S = 60.0
MAX_DEATHS = 5
"""A child that dies more often than this within the window is not restarted."""
TELL_AFTER_S = 3.0
TIDY_LIMIT_S = 5.0
"""How long a manager of shared memory may take to remove what dead processes left there."""
LATE_S = 1.0
"""A launcher that wakes up this much too late was stopped itself."""

_ALWAYS = frozenset({signal.SIGTERM, signal.SIGINT})


@dataclass
class Child:
    """A process that is restarted when it dies."""

    name: str
    run: Callable[[], int]
    pid: int = 0
    pid_before: int = 0
    """Of the process whose place it took."""
    deaths: list[float] = field(default_factory=list)
    stopped_at: float | None = None
    """When it was stopped (SIGSTOP); None while it runs."""

    def start(self) -> None:
        self.stopped_at = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid_before = self.pid
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._be())

    def _be(self) -> int:
        """Run in the forked process. Signals stay blocked until `run` is ready to handle them."""
        os.setpgid(0, 0)
        try:
            return self.run()
        except (JobError, UsageError) as error:  # A restarted one would fail the same way.
            log.error("%s", error)
            return EXIT_TURNED_AWAY
        except HoldfastError as error:
            log.error("%s: %s", self.name, error)
        except BaseException:  # The edge of the process: the launcher restarts it.
            log.exception("the %s crashed with an unhandled exception", self.name)
        return EXIT_BROKEN

    def note_stops(self) -> None:
        """Note whether it was stopped or continued."""
        how = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        try:
            while (change := os.waitid(os.P_PID, self.pid, how)) is not None:
                stopped = change.si_code == os.CLD_STOPPED
                self.stopped_at = time.monotonic() if stopped else None
        except ChildProcessError:  # It has ended.
            self.stopped_at = None

    def too_often(self) -> bool:
        """Note a death; True when there were too many within a minute."""
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < DEATHS_WINDOW_S] + [now]
        return len(self.deaths) > MAX_DEATHS


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    code: int
    nodes: frozenset[NodeId] | None
    """All nodes that ever joined; None when unknown."""


@dataclass
class Launcher:
    """The parent of agent and coordinator."""

    signals: frozenset[signal.Signals]
    """Signals that are passed on to the agent, which handles them."""
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

    def run(self) -> int:
        """Start both children and keep them running until the agent reports the end of the job."""
        kernel.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals | {signal.SIGCHLD})
        self.agent.start()
        if self.coordinator is not None:
            self.coordinator.start()
        try:
            return self._wait()
        finally:
            self._end_all()

    def _wait(self) -> int:
        while True:
            got = self._next_signal()
            if got != signal.SIGCHLD:
                _signal(self.agent.pid, signal.Signals(got))
                _signal(self.agent.pid, signal.SIGCONT)
                continue
            for child in self._children():
                child.note_stops()
            gone = {pid: os.waitstatus_to_exitcode(status) for pid, status in _ended()}
            code = None
            if self.coordinator is not None and self.coordinator.pid in gone:
                code = self._coordinator_ended(self.coordinator, gone[self.coordinator.pid])
            if code is None and self.agent.pid in gone:
                code = self._agent_ended(gone[self.agent.pid])
            if code is not None:
                return code

    def _next_signal(self) -> int:
        """Wait for the next signal; meanwhile, kill a child that stays stopped for too long."""
        wanted = self.signals | {signal.SIGCHLD}
        limit_s = from_environment(os.environ).stopped_limit
        while since := [c.stopped_at for c in self._children() if c.stopped_at is not None]:
            due = min(since) + limit_s
            got = signal.sigtimedwait(wanted, max(0.0, due - time.monotonic()))
            if got is not None:
                return got.si_signo
            self._kill_stopped(due, time.monotonic())
        return signal.sigwait(wanted)

    def _kill_stopped(self, due: float, now: float) -> None:
        for child in self._children():
            if child.stopped_at is None:
                continue
            if now > due + LATE_S:  # The launcher was stopped too: the whole job may be continued.
                child.stopped_at = now
            else:
                log.warning("the %s is stopped and nobody continues it; killing it", child.name)
                child.stopped_at = None
                _signal(child.pid, signal.SIGKILL)

    def _children(self) -> list[Child]:
        return [self.agent, *([self.coordinator] if self.coordinator is not None else [])]

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
            log.warning("the agent %s after the end of the job", _how(code))
            return self.read_end().code
        if code == EXIT_REJOIN:
            self.agent.start()
        else:
            self._restart(self.agent, code)
        return None

    def _restart(self, child: Child, code: int) -> None:
        how = _how(code)
        if child.too_often():
            raise JobError(f"the {child.name} {how}, {len(child.deaths)} times within a minute")
        log.warning("the %s %s; starting it again", child.name, how)
        child.start()

    def _end_coordinator(self) -> None:
        """Kill a coordinator that no node will ever join."""
        if self.coordinator is not None:
            _signal(self.coordinator.pid, signal.SIGKILL)
            _reap(self.coordinator.pid)
            self.coordinator = None

    def _end_orphans(self) -> None:
        """Kill all processes that a dead agent left behind, which the launcher has adopted.

        Managers of shared memory come last: they remove what the others had there, and end.
        """
        while others := [pid for pid in self._orphans() if not proc.removes_shared_memory(pid)]:
            _end(others)
        deadline = time.monotonic() + TIDY_LIMIT_S
        for manager in self._orphans():
            kernel.await_end(manager, max(0.0, deadline - time.monotonic()))
        while orphans := self._orphans():
            _end(orphans)

    def _orphans(self) -> list[int]:
        ours = {self.coordinator.pid} if self.coordinator is not None else set()
        return [pid for pid in kernel.children(os.getpid()) if pid not in ours]

    def _end_all(self) -> None:
        """Let the coordinator finish the job, then kill what is left."""
        if self.coordinator is not None:
            self._await_coordinator(self.coordinator)
            self.coordinator = None
        self._end_orphans()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals | {signal.SIGCHLD})

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
            for pid, status in _ended():
                if pid == coordinator.pid and os.waitstatus_to_exitcode(status) != 0:
                    self._restart(coordinator, os.waitstatus_to_exitcode(status))


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"


def _ended() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _end(pids: Iterable[int]) -> None:
    for pid in pids:
        _signal(pid, signal.SIGKILL)
        _reap(pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


def launch(settings: RunSettings, since_monotonic: float) -> tuple[int, JobHome | None]:
    """Run this node's part of a job to its end; the exit code, and the job's home if it is hosted."""
    make_directories(settings)
    site = find_site(settings)
    os.environ.pop(Settings.token.variables[0], None)  # The site has it; scripts are not to.
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
        signals=_ALWAYS | {signal.Signals[name] for name in settings.signals_to_handle},
        agent=Child("agent", be_agent),
        coordinator=Child("coordinator", be_coordinator) if site.listener is not None else None,
        alone=settings.places == 1,
        read_end=partial(_read_end, site.home),
        launch=launch,
    )
    try:
        return launcher.run(), site.home if site.listener is not None else None
    finally:
        images.remove()


def _read_end(home: JobHome) -> JobEnd:
    from holdfast.coordinator.journal import replay

    try:
        snapshot = replay(home.journal)
    except JournalError as error:
        log.error("the job's exit code is unknown: %s", error)
        return JobEnd(EXIT_FAILED, None)
    if snapshot is None or snapshot.job.result is None:
        log.error("the job's exit code is unknown: its end is not in %s", home.journal)
        return JobEnd(EXIT_FAILED, None)
    return JobEnd(snapshot.job.result.code, frozenset(snapshot.acked))
