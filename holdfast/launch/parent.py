"""A parent is a process that starts others, restarts them when they die, and outlives them.

It runs no event loop and no thread, and only waits for signals, so there is little that could bring it
down. It is a child subreaper: what its children leave behind becomes its own, and is ended with it, so
that no process of a job outlives it. Who its children are, and what their ends mean, is for those who
derive from it: the launcher of a node (`launch/process.py`) and that of a job (`launch/up.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast import kernel, proc
from holdfast.config.sources import from_environment
from holdfast.errors import JobError, JournalError
from holdfast.jobhome import JobHome
from holdfast.launch.beside import Viewers
from holdfast.launch.child import Child, ended_children, how, reap, send
from holdfast.messages.exits import EXIT_FAILED
from holdfast.messages.units import NodeId

log = logging.getLogger("holdfast")

TIDY_LIMIT_S = 5.0
"""How long a manager of shared memory may take to remove what dead processes left there."""
LATE_S = 1.0
"""A parent that wakes up this much too late was stopped itself."""

ALWAYS_HANDLED = frozenset({signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    code: int
    nodes: frozenset[NodeId] | None
    """All nodes that ever joined; None when unknown."""


@dataclass
class Parent:
    """A process that keeps its children running until the job is over."""

    signals: frozenset[signal.Signals]
    """Signals that it handles."""
    viewers: Viewers = field(default_factory=Viewers, kw_only=True)
    """Processes that look at the job; see `launch/beside.py`."""

    def run(self) -> int:
        """Start the children and keep them running; return the exit code. Signals stay blocked."""
        kernel.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals | {signal.SIGCHLD})
        for child in self._children():
            child.start()
        self.viewers.start()
        try:
            return self._wait()
        finally:
            self._end_all()
            self.viewers.dismiss(self.signals)
            self._end_orphans()  # What a viewer that was killed had started.

    # ---- what a launcher of its kind decides ----

    def _children(self) -> list[Child]:
        """List the children that are to run, in the order in which they are started."""
        raise NotImplementedError

    def _signalled(self, number: signal.Signals) -> int | None:
        """Take in a signal; return an exit code to end with at once."""
        raise NotImplementedError

    def _ended(self, gone: Mapping[int, int]) -> int | None:
        """Take in the exit codes of children by pid; return an exit code if that is the end."""
        raise NotImplementedError

    def _end_all(self) -> None:
        """Let those finish who should, then kill what is left."""
        raise NotImplementedError

    # ---- waiting ----

    def _wait(self) -> int:
        while True:
            got = self._next_signal()
            if got != signal.SIGCHLD:
                code = self._signalled(signal.Signals(got))
            else:
                for child in self._children():
                    child.note_stops()
                code = self._ended(self._gone())
            if code is not None:
                return code

    def _gone(self) -> dict[int, int]:
        """Reap the children that have ended, and see to the viewers among them."""
        gone = ended_children()
        self.viewers.ended(gone)
        return gone

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
            if now > due + LATE_S:  # The parent was stopped too: the whole job may be continued.
                child.stopped_at = now
            else:
                log.warning("the %s is stopped and nobody continues it; killing it", child.name)
                child.stopped_at = None
                send(child.pid, signal.SIGKILL)

    def _restart(self, child: Child, code: int) -> None:
        if child.too_often():
            times = f"{len(child.deaths)} times within a minute"
            raise JobError(f"the {child.name} {how(code)}, {times}")
        log.warning("the %s %s; starting it again", child.name, how(code))
        child.start()

    def _end_orphans(self) -> None:
        """Kill all processes that dead children left behind, which this process has adopted.

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
        ours = {child.pid for child in self._spared()} | self.viewers.pids()
        return [pid for pid in kernel.children(os.getpid()) if pid not in ours]

    def _spared(self) -> list[Child]:
        """List the children that are not ended with the orphans."""
        return []

    def listen_again(self) -> None:
        """Handle signals in the default way after the end; those that came before were for the job."""
        while signal.sigtimedwait(self.signals, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals | {signal.SIGCHLD})


def _end(pids: Iterable[int]) -> None:
    for pid in pids:
        send(pid, signal.SIGKILL)
        reap(pid)


def has_ended(home: JobHome) -> bool:
    """Whether the journal says that the job is over."""
    from holdfast.coordinator.journal import replay

    try:
        snapshot = replay(home.journal)
    except JournalError:
        return False
    return snapshot is not None and snapshot.job.state.name == "ended"


def read_end(home: JobHome) -> JobEnd:
    """Read the end of a job from its journal."""
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
