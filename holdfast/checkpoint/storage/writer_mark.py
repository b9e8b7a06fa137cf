"""Marks a directory of checkpoints with the job that writes there, so that a second one is told.

Two jobs in one directory damage no checkpoint: a step belongs to the one that commits it first, and
rank files of different jobs have different names. But each would go on from the other's steps, and find
its own taken. So the first save of a job puts its mark there, and a job that finds the mark of another
one that is alive does not write.

A mark proves nothing by itself: its job may have been killed, and its host may be gone. Locks do not
tell either, for a server of network files keeps those of a host that is gone. What a dead job cannot do
is change something. So a writer touches its mark every second, and whoever finds another job's mark
watches it for some seconds: if it changes, the other one is alive, and if it does not, it is replaced.
Only in the other direction a process id is proof: where it is known here and the process is gone,
nobody need watch.

A job that was stopped for longer than that finds its mark replaced when it goes on, and is told at its
next save. The same job, started again, is known by its name and never watched. In object stores there
are no marks.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from holdfast import proc
from holdfast.errors import CheckpointError

MARK: Final = ".holdfast-writer"
BEAT_S: Final = 1.0
WATCH_S: Final = 6.0
"""A writer has the lowest priority on its node, and may be late."""
_LOOK_EVERY_S: Final = 0.1
_MOST_BYTES: Final = 4096


class Writer(Struct, frozen=True):
    """A job that writes checkpoints, and the process that does it."""

    identity: str
    """The same after a restart of the job, and different for any other."""
    job: str
    host: str
    pid: int
    """The process that the user knows; the keeper is its child."""
    keeper_pid: int
    keeper_ticks: int
    """When the keeper began, by the kernel's count since the boot."""
    namespace: str
    """Where these process ids are valid: a boot of a machine, and a PID namespace of it."""

    @classmethod
    def of_keeper(cls, job: str) -> Writer:
        """Describe the job of this process, a keeper."""
        pid, namespace = os.getppid(), _namespace()
        identity = f"job {job}" if job else _launched() or f"{namespace} {pid} {_ticks(pid)}"
        own = os.getpid()
        return cls(identity, job, socket.gethostname(), pid, own, _ticks(own), namespace)

    @property
    def gone(self) -> bool:
        """Whether its keeper is known to have ended."""
        if self.namespace != _namespace():
            return False
        return proc.process_state(self.keeper_pid) in "XZ" or (
            _ticks(self.keeper_pid) != self.keeper_ticks
        )

    def __str__(self) -> str:
        named = f"job {self.job}" if self.job else "another script"
        return f"{named} (process {self.pid} on {self.host})"


def _launched() -> str:
    """Return what launchers call the job, if it is the same after a restart and for no other job."""
    env = os.environ
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        return f"torchrun {run}"
    if "SLURM_JOB_ID" in env:
        return f"Slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    if env.get("WORLD_SIZE", "1") != "1" and "MASTER_PORT" in env:
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    return ""


def _namespace() -> str:
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"unknown {os.getpid()}"


def _ticks(pid: int) -> int:
    fields = proc.stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


class WriterMark:
    """The mark in one directory, as one writer sees it."""

    def __init__(self, directory: str, me: Writer, watch_s: float = WATCH_S) -> None:
        self.directory = Path(directory)
        self._path = self.directory / MARK
        self._me = me
        self._watch_s = watch_s
        self._lock = threading.Lock()
        self._beating: int | None = None
        """The open mark that is touched; None when it is not this writer's."""

    def other(self) -> Writer | None:
        """Return another job that writes there and is alive; this may take seconds."""
        known = self._read()
        if known is None or known[0].identity == self._me.identity or known[0].gone:
            return None
        until = time.monotonic() + self._watch_s
        while time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            now = self._read()
            if now != known:
                return None if now is None or now[0].identity == self._me.identity else now[0]
        return None

    def claim(self, make_directory: Callable[[], None]) -> None:
        """Put this writer's mark there, and keep it up; raise if another job is alive that has."""
        with self._lock:
            if self._beating is not None:
                return
            other = self.other()
            if other is not None:
                raise CheckpointError(taken(self.directory, other))
            make_directory()
            # Whatever forbids a mark forbids checkpoints too, and they are what the user wants.
            with suppress(OSError):
                self._beating = self._put()
                threading.Thread(target=self._beat, name="mark", daemon=True).start()

    def _put(self) -> int:
        partial = self._path.with_name(f"{MARK}.{self._me.keeper_pid}")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, msgspec.json.encode(self._me))
            os.replace(partial, self._path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _beat(self) -> None:
        """Touch the mark, until it is replaced or removed."""
        fd = self._beating
        assert fd is not None
        with suppress(OSError):
            while os.stat(self._path).st_ino == os.fstat(fd).st_ino:
                os.utime(fd)
                time.sleep(BEAT_S)
        self._beating = None
        os.close(fd)

    def _read(self) -> tuple[Writer, int] | None:
        """Return the writer that has its mark there, and when the mark was touched. The file is opened
        each time: else a client of network files answers from its cache."""
        with suppress(OSError, msgspec.DecodeError), self._path.open("rb") as file:
            writer = msgspec.json.decode(file.read(_MOST_BYTES), type=Writer)
            return writer, os.fstat(file.fileno()).st_mtime_ns
        return None


def taken(directory: Path | str, other: Writer) -> str:
    return (
        f"{directory}: {other} writes checkpoints there and is alive; give this job a directory of its"
        " own, or end the other one"
    )
