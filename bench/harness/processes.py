"""Knowing and ending every process a job starts, however far it strays.

The bench makes itself the subreaper of everything below it: a daemon that forks itself away from
its launcher becomes a child of the bench instead of a child of init. So "what this job started" is
simply "what hangs below the bench", and nothing has to be recognised by name.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.005
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_libc = ctypes.CDLL(None, use_errno=True)


class StuckProcessError(RuntimeError):
    """Processes that SIGKILL did not end: the numbers after this would not be worth having."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    started: int
    """In clock ticks since boot: with the pid, a name that is never given twice."""
    name: str
    cpu_s: float
    """Processor time it has used so far."""


def adopt_orphans() -> None:
    """From now on every orphan below this process becomes its child."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def die_with_parent() -> None:
    """For a child, before exec: get SIGTERM should the bench itself be killed."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return Process(pid, int(fields[1]), fields[0], int(fields[19]), name, cpu_s)


def below(root: int) -> list[Process]:
    """All processes below root, dead ones that nobody has waited for included."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := _read(int(entry))):
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return found


def descendants() -> list[Process]:
    """The living processes below the bench."""
    return [process for process in below(os.getpid()) if process.state not in "ZX"]


def reap_orphans(own: Iterable[int]) -> None:
    """Wait for dead children that were adopted; those in `own` have somebody who waits for them."""
    mine = set(own)
    for process in below(os.getpid()):
        if process.parent == os.getpid() and process.state == "Z" and process.pid not in mine:
            os.waitpid(process.pid, os.WNOHANG)


def end_descendants(own: Iterable[int], within_s: float = 20.0) -> None:
    """SIGKILL everything below the bench until nothing is left, new arrivals included."""
    pids = set(own)
    deadline = time.monotonic() + within_s
    while living := descendants():
        for process in living:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise StuckProcessError(f"SIGKILL does not end {living}")
        time.sleep(POLL_S)
        reap_orphans(pids)


def open_files(pid: int) -> int | None:
    """How many file descriptors a process has open."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
