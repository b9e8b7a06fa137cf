"""Guards one node of the local platform: a process that starts the node's launcher and waits for it.

    python -m holdfast.platforms.local_node RECORD LIFELINE CLAIMED LIMIT_S HOST COMMAND...

A supplier may be killed at any moment, and the next one is not the parent of what it started. So what
has to be known of a node is written down by its guard, in its *record*:

    it claims the record     before anything is started; of two guards for one request, one starts it;
                             then it closes CLAIMED, for which its supplier waits
    it writes its pid        with the time at which it was started, since pids are reused
    it writes the exit code  before it ends itself; a guard that left none was killed, with its node

The *lifeline* is a pipe whose other end only the processes of `holdfast up` hold. When they are gone it
is closed, and the guard ends its node at once, without grace. SIGTERM is passed on, once: a second one
would tell the node to hurry. A node that takes longer than the limit after that is killed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast import kernel, proc

TIDY_LIMIT_S = 5.0
"""How long an agent whose launcher was killed may take to end its workers."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class NodeRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is written down of a node."""

    pid: int
    """Of its guard."""
    started: int
    """When the guard was started, in clock ticks since boot: no other process has both."""
    host: str
    """Name of the host that the node takes itself to be."""
    code: int | None = None
    """How it ended, 128 more than the signal's number after a signal; None while it runs."""


def record_of(pid: int, host: str) -> NodeRecord:
    """Make the record of a process that runs."""
    return NodeRecord(pid=pid, started=started_at(pid), host=host)


def started_at(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 if it has ended."""
    fields = proc.stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def lives(record: NodeRecord) -> bool:
    """Whether the guard of a node runs, and not another process with its pid."""
    return started_at(record.pid) == record.started != 0


def claim(path: Path, record: NodeRecord) -> bool:
    """Write a record that nobody has written; False if somebody has."""
    draft = _draft(path, record)
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    finally:
        os.unlink(draft)


def rewrite(path: Path, record: NodeRecord) -> None:
    """Write a record in place of the one that is there."""
    os.replace(_draft(path, record), path)


def _draft(path: Path, record: NodeRecord) -> Path:
    draft = path.with_suffix(f".{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(record))
    return draft


def read_record(path: Path) -> NodeRecord | None:
    """Read a record; None if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeRecord)
    except FileNotFoundError:
        return None


class _Guard:
    """The parent of a node's launcher."""

    def __init__(self, lifeline: int, limit_s: float) -> None:
        self._lifeline, self._limit_s = lifeline, limit_s
        self._kill_at: float | None = None
        """Set once the node was told to leave."""
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        for number in HANDLED:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake)

    def run(self, command: Sequence[str]) -> int:
        """Run the launcher to its end; return how it ended."""
        launcher = _start(command)
        pidfd = os.pidfd_open(launcher)
        self._wait(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        _end_rest()
        return status if status >= 0 else 128 - status

    def _wait(self, pidfd: int) -> None:
        poller = select.poll()
        for fd in (pidfd, self._lifeline, self._wake):
            poller.register(fd, select.POLLIN)
        while True:
            ready = dict(poller.poll(self._timeout_ms()))
            if pidfd in ready:
                return
            if self._lifeline in ready or self._is_late():
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
                return
            if self._wake in ready:
                os.read(self._wake, 4096)
                if self._kill_at is None:
                    self._kill_at = time.monotonic() + self._limit_s
                    signal.pidfd_send_signal(pidfd, signal.SIGTERM)

    def _is_late(self) -> bool:
        return self._kill_at is not None and time.monotonic() >= self._kill_at

    def _timeout_ms(self) -> int | None:
        if self._kill_at is None:
            return None
        return max(0, int(1000 * (self._kill_at - time.monotonic())) + 1)


def _start(command: Sequence[str]) -> int:
    guard = os.getpid()
    # A signal to the child before it has its own handlers would go to the guard's, and be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = os.fork()
    if pid == 0:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in HANDLED:
                signal.signal(number, signal.SIG_DFL)
            kernel.unblock_signals()
            if os.getppid() == guard:
                os.execv(command[0], list(command))
        except OSError as error:
            print(f"holdfast: {command[0]}: {error.strerror}", file=sys.stderr)
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _end_rest() -> None:
    """End what a launcher left behind: nothing, unless it was killed."""
    deadline = time.monotonic() + TIDY_LIMIT_S
    for pid in kernel.children(os.getpid()):
        kernel.await_end(pid, max(0.0, deadline - time.monotonic()))
    while left := kernel.children(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main(argv: Sequence[str]) -> int:
    path, lifeline, claimed, limit_s, host, *command = argv
    os.set_inheritable(int(lifeline), False)
    guard = _Guard(int(lifeline), float(limit_s))
    record = record_of(os.getpid(), host)
    if not claim(Path(path), record):
        return 0
    os.close(int(claimed))
    kernel.name_process("holdfast-node")
    kernel.adopt_orphans()
    code = guard.run(command)
    rewrite(Path(path), replace(record, code=code))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
