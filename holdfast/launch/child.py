"""A child is a process that its parent starts again when it dies."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError, JobError, UsageError
from holdfast.messages.exits import EXIT_BROKEN, EXIT_TURNED_AWAY

log = logging.getLogger("holdfast")

DEATHS_WINDOW_S = 60.0
MAX_DEATHS = 5
"""A child that dies more often than this within the window is not restarted."""


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
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # It may log though `stty tostop` is set.
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


def how(code: int) -> str:
    """Say in words how a process ended."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process, if it is still there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def ended_children() -> dict[int, int]:
    """Reap all children that have ended: their exit codes by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def reap(pid: int) -> None:
    """Wait for the end of a child."""
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
