"""Serves torch's file-based timers: a script that does not leave a section in time is killed.

With TORCHELASTIC_ENABLE_FILE_TIMER=1 scripts may use `FileTimerClient` of
`torch.distributed.elastic.timer`, and find the named pipe in TORCHELASTIC_TIMER_FILE. A client writes
one JSON object a line: a process, a scope, when it expires (by the wall clock) and the signal that the
process shall get then. A negative time releases the scope. As anything could be in the pipe, only
processes of this node's ranks are ever signalled: a rank leads a session, and all it starts is in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import msgspec

from holdfast.agent.output import READ_BYTES
from holdfast.errors import JobError

log = logging.getLogger("holdfast.agent")

ENABLED = "TORCHELASTIC_ENABLE_FILE_TIMER"
PIPE = "TORCHELASTIC_TIMER_FILE"


class Timer(msgspec.Struct, frozen=True):
    """A client's request."""

    pid: Annotated[int, msgspec.Meta(gt=0)]
    scope_id: str
    expiration_time: float
    signal: Annotated[int, msgspec.Meta(le=64)]


class FileTimers:
    """The named pipe of a node, and the timers that run."""

    def __init__(self, path: str, ranks: Callable[[], Collection[int]]) -> None:
        self.path = path
        self._ranks = ranks
        """Returns the pids of this node's ranks."""
        self._timers: dict[tuple[int, str], Timer] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._rest = b""
        _make_pipe(path)
        # Open for writing too: the pipe would be at its end whenever no client has it open.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close(self) -> None:
        """Forget all timers and remove the pipe."""
        self._set_alarm(None)
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        try:
            os.unlink(self.path)
        except OSError:
            pass  # A script removed it.

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._fd, READ_BYTES)).split(b"\n")
        for line in lines:
            try:
                self._take(msgspec.json.decode(line, type=Timer))
            except msgspec.DecodeError as error:
                log.warning("%s: not a timer: %s", self.path, error)
        self._rest = self._rest[-READ_BYTES:]
        self._look()

    def _take(self, timer: Timer) -> None:
        key = timer.pid, timer.scope_id
        if timer.expiration_time < 0:
            self._timers.pop(key, None)
        else:
            self._timers[key] = timer

    def _look(self) -> None:
        """Signal the processes whose timers have expired, and wait for the next to do so."""
        now = time.time()
        due = [timer for timer in self._timers.values() if timer.expiration_time <= now]
        for timer in sorted(due, key=lambda timer: timer.expiration_time):
            if self._timers.pop((timer.pid, timer.scope_id), None) is not None:
                self._expire(timer)
        ahead = [timer.expiration_time for timer in self._timers.values()]
        self._set_alarm(min(ahead, default=None))

    def _expire(self, timer: Timer) -> None:
        if timer.signal <= 0 or not self._is_ours(timer.pid):
            return
        log.warning("process %d did not leave %s in time; killing it", timer.pid, timer.scope_id)
        for key in [key for key in self._timers if key[0] == timer.pid]:
            del self._timers[key]
        try:
            os.kill(timer.pid, timer.signal)
        except OSError as error:
            log.warning("process %d cannot be signalled: %s", timer.pid, error)

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.getsid(pid) in self._ranks()
        except ProcessLookupError:
            return False

    def _set_alarm(self, at: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if at is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.0, at - time.time()), self._look)


def timer_file(environ: Mapping[str, str], launcher_pid: int) -> str | None:
    """Return the path of the pipe to serve; None if the user did not enable timers.

    An agent that is restarted has the same, so that none is left behind.
    """
    if environ.get(ENABLED) != "1":
        return None
    own = os.path.join(tempfile.gettempdir(), f"holdfast-timers-{launcher_pid}")
    return environ.get(PIPE) or own


@contextmanager
def serving(path: str | None, ranks: Callable[[], Collection[int]]) -> Iterator[None]:
    """Serve timers, if the user wants any."""
    timers = FileTimers(path, ranks) if path is not None else None
    try:
        yield
    finally:
        if timers is not None:
            timers.close()


def _make_pipe(path: str) -> None:
    """Create the pipe, in place of one that an earlier agent left."""
    try:
        if os.path.exists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):
            os.unlink(path)
        os.mkfifo(path, 0o600)
    except OSError as error:
        raise JobError(f"{PIPE}={path}: no pipe can be created ({error.strerror})") from None
