"""`holdfast run`, seen from above: one process that starts the others and outlives them.

It forks the agent first (whose nursery begins to import torch at once) and the coordinator, and then
only waits for signals. It runs no event loop, no thread and holds no state, so there is little that
could bring it down; and should one of its children die, it is the one that starts it again:

    coordinator died    it is started again on the same listening socket, which never closed
    agent died          what its workers left is ended, a new agent joins the job
    launcher died       the kernel tells the agent, which ends everything; the coordinator dies too

Whoever of the two dies, the other one adopts and ends all descendants, so that no process of a job
outlives it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast import kernel
from holdfast.config import RunSettings
from holdfast.errors import HoldfastError, JobError
from holdfast.jobhome import JobHome

log = logging.getLogger("holdfast")

EXIT_BROKEN = 70
"""What an agent or a coordinator exits with when it fell over an error of its own."""
EXIT_FAILED = 1
FEW_S = 60.0
MANY = 5
LAST_WAIT_S = 3.0

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_WAITED_FOR = _FORWARDED | {signal.SIGCHLD}


@dataclass
class Child:
    """A process that is started again when it dies."""

    name: str
    run: Callable[[], int]
    pid: int = 0
    deaths: list[float] = field(default_factory=list)

    def start(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._be())

    def _be(self) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
        os.setpgid(0, 0)
        try:
            return self.run()
        except HoldfastError as error:
            log.error("%s: %s", self.name, error)
        except BaseException:  # The edge of the process: the launcher starts another one.
            log.exception("the %s fell over an error of its own", self.name)
        return EXIT_BROKEN

    def too_often(self) -> bool:
        """Note a death; True when that happens again and again."""
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < FEW_S] + [now]
        return len(self.deaths) > MANY


@dataclass
class Launcher:
    agent: Child
    coordinator: Child

    def run(self) -> int:
        """Start both, and see to it that both run until the agent says that the job is over."""
        kernel.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        self.agent.start()
        self.coordinator.start()
        try:
            return self._wait()
        finally:
            self._end_all()

    def _wait(self) -> int:
        while True:
            got = signal.sigwait(_WAITED_FOR)
            if got != signal.SIGCHLD:
                _signal(self.agent.pid, signal.Signals(got))
                continue
            for pid, status in _ended():
                if pid == self.agent.pid:
                    code = os.waitstatus_to_exitcode(status)
                    if code >= 0 and code != EXIT_BROKEN:
                        return code
                    self._end_orphans()
                    self._start_again(self.agent, code)
                elif pid == self.coordinator.pid:
                    code = os.waitstatus_to_exitcode(status)
                    if code != 0:
                        self._start_again(self.coordinator, code)

    def _start_again(self, child: Child, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        if child.too_often():
            raise JobError(f"the {child.name} {how}, {len(child.deaths)} times within a minute")
        log.warning("the %s %s; starting it again", child.name, how)
        child.start()

    def _end_orphans(self) -> None:
        """Kill all that the dead agent left to us."""
        ours = {self.coordinator.pid}
        while orphans := [pid for pid in kernel.children(os.getpid()) if pid not in ours]:
            for pid in orphans:
                _signal(pid, signal.SIGKILL)
                _reap(pid)

    def _end_all(self) -> None:
        """Let the coordinator write its last line, then leave nobody behind."""
        deadline = time.monotonic() + LAST_WAIT_S
        while self.coordinator.pid in kernel.children(os.getpid()):
            left = deadline - time.monotonic()
            if left <= 0 or signal.sigtimedwait({signal.SIGCHLD}, left) is None:
                break
            _ended()
        self.coordinator.pid = 0
        self._end_orphans()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)


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


def launch(settings: RunSettings, home: JobHome, since_monotonic: float) -> int:
    """Run the job to its end; its exit code."""
    token = secrets.token_urlsafe(32)
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    run_id = settings.rendezvous.run_id or home.name
    home.write_job_file(
        {"job": home.name, "host": host, "port": port, "token": token, "pid": os.getpid()}
    )

    def be_agent() -> int:
        from holdfast.agent.main import AgentOrders, run_agent

        launcher_pid = os.getppid()
        logs = home.logs
        if settings.log_dir is not None:
            from pathlib import Path

            logs = Path(settings.log_dir).absolute() / home.name
            logs.mkdir(parents=True, exist_ok=True)
        return run_agent(
            AgentOrders(settings, host, port, token, "127.0.0.1", run_id, logs, launcher_pid)
        )

    def be_coordinator() -> int:
        from holdfast.coordinator.main import CoordinatorOrders, run_coordinator
        from holdfast.messages.records import Terms

        terms = Terms(
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            max_restarts=settings.max_restarts,
            grace_s=settings.shutdown_timeout_s,
        )
        return run_coordinator(CoordinatorOrders(home, listener, token, terms, since_monotonic))

    return Launcher(Child("agent", be_agent), Child("coordinator", be_coordinator)).run()


def _listen(settings: RunSettings) -> socket.socket:
    """The coordinator's door: on loopback, at a port of the kernel's choice unless told."""
    host, port = "127.0.0.1", 0
    if settings.rendezvous.coordinator is not None:
        name, _, number = settings.rendezvous.coordinator.rpartition(":")
        host, port = name.strip("[]"), int(number)
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise JobError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --rdzv-endpoint"
        ) from None
