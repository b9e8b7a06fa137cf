"""Reads what the kernel knows of a process from /proc: in microseconds, without disturbing it.

The state tells a stopped or dead process from a living one. The system call that a thread is in
tells sleeping from reading from waiting, which a Python stack does not: `time.sleep`, `file.read`
and `tensor.item` all look like the line that called them. CPU time and bytes moved tell a thread
that works from one that waits. What the kernel does not tell reads as empty or zero, never as an
error.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, NamedTuple

RUNNING = "running"

Reaction = Literal["dies", "handles", "ignores"]


def _numbered(table: str) -> dict[int, str]:
    pairs = (word.split(":") for word in table.split())
    return {int(number): name for number, name in pairs}


_SYSTEM_CALLS = {
    "x86_64": """
        0:read 1:write 7:poll 16:ioctl 17:pread64 18:pwrite64 19:readv 20:writev 23:select
        24:sched_yield 34:pause 35:nanosleep 42:connect 43:accept 44:sendto 45:recvfrom 46:sendmsg
        47:recvmsg 61:wait4 72:fcntl 73:flock 74:fsync 75:fdatasync 202:futex 219:restart_syscall
        230:clock_nanosleep 232:epoll_wait 247:waitid 257:openat 262:newfstatat 270:pselect6
        271:ppoll 281:epoll_pwait 288:accept4 332:statx
        """,
    "aarch64": """
        22:epoll_pwait 25:fcntl 29:ioctl 32:flock 56:openat 63:read 64:write 65:readv 66:writev
        67:pread64 68:pwrite64 72:pselect6 73:ppoll 79:newfstatat 82:fsync 83:fdatasync 95:waitid
        98:futex 101:nanosleep 115:clock_nanosleep 124:sched_yield 128:restart_syscall 202:accept
        203:connect 206:sendto 207:recvfrom 211:sendmsg 212:recvmsg 242:accept4 260:wait4 291:statx
        """,
}
_NAMES = _numbered(_SYSTEM_CALLS.get(os.uname().machine, ""))

_RESTARTED = {"nanosleep": "clock_nanosleep", "futex": "futex", "poll": "poll"}
"""What `wchan` contains while an interrupted call continues; its own number is hidden then."""


class Effort(NamedTuple):
    """What a thread has done since it began, as the kernel counts it."""

    cpu_s: float = 0.0
    moved_bytes: int = 0
    """Bytes read and written."""


def stat(pid: int | Literal["self"]) -> list[str]:
    """Return the fields of /proc/PID/stat from the state (field 3) on; empty if it cannot be read."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def process_state(pid: int) -> str:
    """Return the kernel's letter for the main thread; "X" if there is no such process, "?" if
    unknown."""
    fields = stat(pid)
    if fields:
        return fields[0]
    return "?" if os.path.exists(f"/proc/{pid}") else "X"


def threads(pid: int) -> list[int]:
    """Return the thread ids of a process; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Return the child processes of a process, whichever of its threads started them."""
    found = [_read(f"/proc/{pid}/task/{thread}/children").split() for thread in threads(pid)]
    return [int(child) for some in found for child in some]


def system_calls(pid: int) -> dict[int, str]:
    """Return the system call that each thread is in, by thread id (see `system_call`)."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return {}
    return {thread: system_call(pid, thread) for thread in threads}


def system_call(pid: int, thread: int) -> str:
    """Return the system call that a thread is in, `RUNNING` if it is in none, "" if unknown."""
    word = _read(f"/proc/{pid}/task/{thread}/syscall").split(" ", 1)[0].strip()
    if word == RUNNING or not word.isdigit():
        return RUNNING if word == RUNNING else ""
    name = _NAMES.get(int(word), f"system call {word}")
    if name == "restart_syscall":
        place = _read(f"/proc/{pid}/task/{thread}/wchan")
        return next((call for part, call in _RESTARTED.items() if part in place), name)
    return name


def effort(pid: int, thread: int) -> Effort:
    """Return what a thread (0: the main one) has done so far."""
    folder = f"/proc/{pid}/task/{thread or pid}"
    on_cpu_ns = _read(f"{folder}/schedstat").partition(" ")[0]
    counts = _fields(f"{folder}/io")
    names = ("rchar", "wchar", "read_bytes", "write_bytes")
    moved_bytes = sum(int(counts.get(name, "0")) for name in names)
    return Effort(int(on_cpu_ns or 0) / 1e9, moved_bytes)


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal and does not block it."""
    masks = _fields(f"/proc/{pid}/status")
    return _has(masks, "SigCgt", number) and not _has(masks, "SigBlk", number)


def is_handling(pid: int, number: int) -> bool:
    """Return whether a signal is pending for the main thread or its handler has not returned."""
    masks = _fields(f"/proc/{pid}/status")
    return any(_has(masks, mask, number) for mask in ("ShdPnd", "SigPnd", "SigBlk"))


def reaction_to(pid: int, number: int) -> Reaction:
    """Return what a signal whose default is to terminate does to a process."""
    masks = _fields(f"/proc/{pid}/status")
    if _has(masks, "SigIgn", number) or _has(masks, "SigBlk", number):
        return "ignores"
    return "handles" if _has(masks, "SigCgt", number) else "dies"


def has_capability(bit: int) -> bool:
    """Return whether this process holds a capability."""
    return bool(int(_fields("/proc/self/status").get("CapEff", "0"), 16) & 1 << bit)


def available_memory_bytes() -> int:
    """Return how much memory can be allocated without swapping."""
    return int(_fields("/proc/meminfo").get("MemAvailable", "0 kB").split()[0]) * 1024


def resume(pid: int, pidfd: int) -> None:
    """Continue a process that was left stopped."""
    if process_state(pid) == "T":
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        except ProcessLookupError:
            pass


def _has(masks: dict[str, str], mask: str, number: int) -> bool:
    return bool(int(masks.get(mask, "0"), 16) & 1 << (number - 1))


def _fields(path: str) -> dict[str, str]:
    lines = (line.partition(":") for line in _read(path).splitlines())
    return {name: value.strip() for name, _, value in lines}


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:  # Names of processes are any bytes.
            return file.read()
    except OSError:
        return ""
