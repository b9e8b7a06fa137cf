"""`holdfast run`, seen from above: one process that starts the others and outlives them.

It forks the agent first (whose nursery begins to import torch at once) and the coordinator, and then
only waits for signals. It runs no event loop, no thread and holds no state, so there is little that
could bring it down; and should one of its children die, it is the one that starts it again:

    coordinator died    it is started again on the same listening socket, which never closed
    agent died          what its workers left is ended, a new agent joins the job
    one was stopped     (SIGSTOP) and nobody continues it: it is killed, and so started again
    launcher died       the kernel tells the agent, which ends everything; the coordinator dies too

Whoever of the two dies, the other one adopts and ends all descendants, so that no process of a job
outlives it.

A coordinator that ended in good order has ended the job. An agent that dies after that is not started
again, and one that was started too late to hear of it is ended: it would look in vain for somebody to
join. The exit code is then the one that the journal has.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import jobhome, kernel
from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.config.settings import RunSettings
from holdfast.errors import HoldfastError, JobError, JournalError, UsageError
from holdfast.jobhome import JobHome
from holdfast.messages.exits import EXIT_BROKEN, EXIT_FAILED, EXIT_REJOIN, EXIT_TURNED_AWAY

if TYPE_CHECKING:
    from holdfast.messages.records import Terms
    from holdfast.messages.units import NodeId

log = logging.getLogger("holdfast")

FEW_S = 60.0
MANY = 5
TELL_AFTER_S = 3.0
STOPPED_LIMIT_S = 15.0
"""Whoever stopped an agent or a coordinator has so long to continue it."""
STOPPED_LIMIT = "HOLDFAST_STOPPED_LIMIT"
"""In the environment: another limit in seconds, for tests."""
LATE_S = 1.0
"""A launcher whose turn comes so much too late was not running itself."""
JOB_FILE_LIMIT_S = 5.0
JOB_FILE_LOOK_S = 0.02

_ALWAYS = frozenset({signal.SIGTERM, signal.SIGINT})


@dataclass
class Child:
    """A process that is started again when it dies."""

    name: str
    run: Callable[[], int]
    pid: int = 0
    deaths: list[float] = field(default_factory=list)
    stopped_at: float | None = None
    """When it was stopped, if it still is."""

    def start(self) -> None:
        self.stopped_at = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._be())

    def _be(self) -> int:
        """Run in the forked process. Signals are blocked until `run` is ready to handle them."""
        os.setpgid(0, 0)
        try:
            return self.run()
        except JobError as error:  # Another one would not fare better.
            log.error("%s", error)
            return EXIT_TURNED_AWAY
        except HoldfastError as error:
            log.error("%s: %s", self.name, error)
        except BaseException:  # The edge of the process: the launcher starts another one.
            log.exception("the %s fell over an error of its own", self.name)
        return EXIT_BROKEN

    def note_stops(self) -> None:
        """See whether it was stopped or continued."""
        how = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        try:
            while (change := os.waitid(os.P_PID, self.pid, how)) is not None:
                stopped = change.si_code == os.CLD_STOPPED
                self.stopped_at = time.monotonic() if stopped else None
        except ChildProcessError:  # It has ended.
            self.stopped_at = None

    def too_often(self) -> bool:
        """Note a death; True when that happens again and again."""
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < FEW_S] + [now]
        return len(self.deaths) > MANY


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    code: int
    nodes: frozenset[NodeId] | None
    """All that ever joined it; None when that is not known."""


@dataclass
class Launcher:
    signals: frozenset[signal.Signals]
    """Those that are passed on to the agent, which knows what to do about them."""
    agent: Child
    coordinator: Child | None
    """None on a node that joins a coordinator elsewhere."""
    alone: bool
    """Whether there are no other nodes, and never will be."""
    read_end: Callable[[], JobEnd]
    """What the journal says, after the coordinator ended in good order."""
    _over: bool = False

    def run(self) -> int:
        """Start both, and see to it that both run until the agent says that the job is over."""
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
        """The next that comes; meanwhile a child that stays stopped for too long is killed."""
        wanted = self.signals | {signal.SIGCHLD}
        limit_s = float(os.environ.get(STOPPED_LIMIT, STOPPED_LIMIT_S))
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
            if now > due + LATE_S:  # We were stopped ourselves: perhaps all are to go on.
                child.stopped_at = now
            else:
                log.warning("the %s is stopped and nobody continues it; it is ended", child.name)
                child.stopped_at = None
                _signal(child.pid, signal.SIGKILL)

    def _children(self) -> list[Child]:
        return [self.agent, *([self.coordinator] if self.coordinator is not None else [])]

    def _coordinator_ended(self, coordinator: Child, code: int) -> int | None:
        """The job's exit code, or None when there is still somebody to wait for."""
        if code != 0:
            self._start_again(coordinator, code)
            return None
        self.coordinator, self._over = None, True
        if self.agent.deaths:  # Only one that was started again may have come too late.
            end = self.read_end()
            if end.nodes is not None and node_of(self.agent.pid) not in end.nodes:
                return end.code
        return None

    def _agent_ended(self, code: int) -> int | None:
        """The job's exit code, or None when another agent takes its place."""
        if code == EXIT_TURNED_AWAY:
            self._end_coordinator()
            return EXIT_FAILED
        if code >= 0 and code not in (EXIT_BROKEN, EXIT_REJOIN):
            return code
        self._end_orphans()
        if self._over:
            log.warning("the agent %s after the end of the job", _how(code))
            return self.read_end().code
        self._start_again(self.agent, code)
        return None

    def _start_again(self, child: Child, code: int) -> None:
        how = _how(code)
        if child.too_often():
            raise JobError(f"the {child.name} {how}, {len(child.deaths)} times within a minute")
        log.warning("the %s %s; starting it again", child.name, how)
        child.start()

    def _end_coordinator(self) -> None:
        """Nobody will ever join it."""
        if self.coordinator is not None:
            _signal(self.coordinator.pid, signal.SIGKILL)
            _reap(self.coordinator.pid)
            self.coordinator = None

    def _end_orphans(self) -> None:
        """Kill all that the dead agent left to us."""
        ours = {self.coordinator.pid} if self.coordinator is not None else set()
        while orphans := [pid for pid in kernel.children(os.getpid()) if pid not in ours]:
            for pid in orphans:
                _signal(pid, signal.SIGKILL)
                _reap(pid)

    def _end_all(self) -> None:
        """Let the coordinator see the job through, then leave nobody behind."""
        if self.coordinator is not None:
            self._await_coordinator(self.coordinator)
            self.coordinator = None
        self._end_orphans()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals | {signal.SIGCHLD})

    def _await_coordinator(self, coordinator: Child) -> None:
        """It ends by itself once all nodes are gone; other nodes may go on after this one left."""
        told = False
        while coordinator.pid in kernel.children(os.getpid()):
            got = signal.sigtimedwait(self.signals | {signal.SIGCHLD}, TELL_AFTER_S)
            if got is None and self.alone:
                return  # The agent did not come so far as to tell it that the job is over.
            if got is None and not told:
                log.info("this node has left the job; its coordinator stays for the other nodes")
                told = True
            elif got is not None and got.si_signo != signal.SIGCHLD:
                return
            for pid, status in _ended():
                if pid == coordinator.pid and os.waitstatus_to_exitcode(status) != 0:
                    self._start_again(coordinator, os.waitstatus_to_exitcode(status))


def node_of(agent_pid: int) -> NodeId:
    """The name of the node that an agent of this machine is."""
    from holdfast.messages.units import NodeId

    return NodeId(f"{socket.gethostname()}:{agent_pid}")


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


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass


@dataclass(frozen=True)
class Site:
    """Where the job's coordinator is, what lets one in, and where this node's files go."""

    host: str
    port: int
    token: str
    home: JobHome
    listener: socket.socket | None
    """The coordinator's door, when it is for us to run it."""


def launch(settings: RunSettings, since_monotonic: float) -> tuple[int, JobHome | None]:
    """Run this node's part of a job to its end; the exit code, and the job's home if it is ours."""
    site = find_site(settings)
    images = ImageHome(site.home.name)
    try:
        return _launch(settings, site, images, since_monotonic)
    finally:
        images.remove()


def _launch(
    settings: RunSettings, site: Site, images: ImageHome, since_monotonic: float
) -> tuple[int, JobHome | None]:
    run_id = settings.rendezvous.run_id or site.home.name

    def be_agent() -> int:
        from holdfast.agent.main import run_agent
        from holdfast.agent.orders import AgentOrders

        orders = AgentOrders(
            node=node_of(os.getpid()),
            settings=settings,
            host=site.host,
            port=site.port,
            token=site.token,
            terms=_terms(settings),
            address=_own_address(settings, site.host),
            store_port=0 if _meets_at_master(settings) else settings.rendezvous.master_port or 0,
            run_id=run_id,
            logs=_logs(settings, site.home),
            launcher_pid=os.getppid(),
            home=site.home,
            images=images.path,
        )
        return run_agent(orders)

    signals = _ALWAYS | {signal.Signals[name] for name in settings.signals_to_handle}
    agent = Child("agent", be_agent)
    read_end = partial(_read_end, site.home)
    if site.listener is None:
        return Launcher(signals, agent, None, False, read_end).run(), None
    listener = site.listener

    def be_coordinator() -> int:
        from holdfast.coordinator.main import CoordinatorOrders, run_coordinator

        orders = CoordinatorOrders(
            home=site.home,
            listener=listener,
            token=site.token,
            tls=settings.tls,
            terms=_terms(settings),
            since_monotonic=since_monotonic,
        )
        run_coordinator(orders)
        return 0  # It ended in good order, whatever the job's exit code is: that is the agent's.

    coordinator = Child("coordinator", be_coordinator)
    alone = settings.max_nodes + settings.spares == 1
    return Launcher(signals, agent, coordinator, alone, read_end).run(), site.home


def _read_end(home: JobHome) -> JobEnd:
    from holdfast.coordinator.journal import replay

    try:
        snapshot = replay(home.journal)
    except JournalError as error:
        log.error("how the job ended is not known: %s", error)
        return JobEnd(EXIT_FAILED, None)
    if snapshot is None or snapshot.job.ended is None:
        log.error("how the job ended is not known: its end is not in %s", home.journal)
        return JobEnd(EXIT_FAILED, None)
    return JobEnd(snapshot.job.ended.code, frozenset(snapshot.acked))


def find_site(settings: RunSettings) -> Site:
    """Run a coordinator where we are meant to, join one where it is already."""
    hosts, address = settings.rendezvous.hosts_coordinator, settings.rendezvous.coordinator
    if _meets_at_master(settings):
        rendezvous = settings.rendezvous
        address = f"{rendezvous.master_addr}:{rendezvous.master_port}"
        hosts = settings.node_rank in (None, 0)
    if address is None:
        return _host(settings, "127.0.0.1", 0)
    name, _, number = address.rpartition(":")
    host, port = name.strip("[]"), int(number)
    if hosts is False:
        return _join(settings, host, port)
    try:
        return _host(settings, host, port)
    except PortTaken:
        if hosts or settings.max_nodes + settings.spares == 1:  # Nobody else could be there.
            raise
        return _join(settings, host, port)


def _meets_at_master(settings: RunSettings) -> bool:
    """torchrun's static way: node 0 is at the address where everybody meets."""
    rendezvous = settings.rendezvous
    several = settings.max_nodes > 1 and rendezvous.coordinator is None
    return several and rendezvous.master_addr is not None


def _host(settings: RunSettings, host: str, port: int) -> Site:
    listener = listen(host, port)
    home = jobhome.create(settings.job or settings.rendezvous.run_id, settings.script)
    token = given_token(settings.token_file) or secrets.token_urlsafe(32)
    host, port = reachable(listener)
    home.write_job_file(
        {"job": home.name, "host": host, "port": port, "token": token, "pid": os.getpid()}
    )
    return Site(host, port, token, home, listener)


def _join(settings: RunSettings, host: str, port: int) -> Site:
    name = settings.job or settings.rendezvous.run_id
    token = given_token(settings.token_file)
    if token is not None:
        return Site(host, port, token, jobhome.share(name or f"joined-{port}"), None)
    # A coordinator that is being started on this machine has its port before it has its job.json.
    deadline = time.monotonic() + JOB_FILE_LIMIT_S
    while (home := jobhome.at_port(port)) is None and time.monotonic() < deadline:
        time.sleep(JOB_FILE_LOOK_S)
    if home is None:
        raise JobError(
            f"no token for the coordinator at {host}:{port}; set HOLDFAST_TOKEN or --token-file"
            " (it is in the job.json where the coordinator runs)"
        )
    if name is not None and name != home.name:
        raise JobError(f"the coordinator at {host}:{port} is of job {home.name}, not of {name}")
    return Site(host, port, str(home.read_job_file()["token"]), home, None)


class PortTaken(JobError):
    """Somebody listens there already."""


def listen(host: str, port: int) -> socket.socket:
    """A coordinator's door."""
    try:
        return socket.create_server((host, port), backlog=4096)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        kind = PortTaken if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) else JobError
        raise kind(f"cannot listen on {host}:{port} ({reason}); choose another address") from None


def reachable(listener: socket.socket) -> tuple[str, int]:
    """Where others find it: a listener on all interfaces is found by the machine's name."""
    host, port = listener.getsockname()[:2]
    return (socket.gethostname() if host in ("0.0.0.0", "::") else host), port


def given_token(path: str | None) -> str | None:
    """The token that the user brings along, if any."""
    if path is None:
        return os.environ.get("HOLDFAST_TOKEN")
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}") from None


def _terms(settings: RunSettings) -> Terms:
    from holdfast.messages.hangs import HangTerms
    from holdfast.messages.records import Terms

    return Terms(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        node_unit=settings.node_unit,
        segment=settings.segment,
        spares=settings.spares,
        copies=settings.copies,
        node_check=settings.node_check,
        exclude_stragglers=settings.exclude_stragglers,
        hangs=HangTerms(
            detect=settings.hangs.detect,
            initial_rank_heartbeat_timeout=settings.hangs.initial_rank_heartbeat_timeout,
            rank_heartbeat_timeout=settings.hangs.rank_heartbeat_timeout,
            rank_out_of_section_timeout=settings.hangs.rank_out_of_section_timeout,
            rank_section_timeouts=settings.hangs.rank_section_timeouts,
            safety_factor=settings.hangs.safety_factor,
        ),
        max_restarts=settings.max_restarts,
        grace_s=settings.shutdown_timeout_s,
        last_call_s=settings.rendezvous.last_call_timeout_s,
        join_limit_s=settings.rendezvous.join_timeout_s,
        chaos=settings.chaos,
    )


def _own_address(settings: RunSettings, coordinator: str) -> str:
    """Where other nodes reach this one: as said, or the way on which it reaches the coordinator."""
    if settings.rendezvous.local_addr is not None:
        return settings.rendezvous.local_addr
    try:
        family = socket.getaddrinfo(coordinator, 1)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((coordinator, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _logs(settings: RunSettings, home: JobHome) -> Path:
    if settings.log_dir is None:
        return home.logs
    logs = Path(settings.log_dir).absolute() / home.name
    logs.mkdir(parents=True, exist_ok=True)
    return logs
