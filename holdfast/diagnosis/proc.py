"""What the kernel says of a process, in microseconds and without disturbing it.

Its state tells a stopped or dead process from a living one. The system call that a thread is in tells
sleeping from reading from waiting, which a Python stack does not: `time.sleep`, `file.read` and
`tensor.item` all look like the line that called them.
"""

from __future__ import annotations

import platform
import signal
from typing import cast, get_args

from holdfast.messages.evidence import ProcessState

RUNNING = "running"

_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    17: "pread64",
    18: "pwrite64",
    19: "readv",
    20: "writev",
    16: "ioctl",
    23: "select",
    24: "sched_yield",
    34: "pause",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    44: "sendto",
    45: "recvfrom",
    46: "sendmsg",
    47: "recvmsg",
    61: "wait4",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    202: "futex",
    219: "restart_syscall",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    257: "openat",
    262: "newfstatat",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
    288: "accept4",
    332: "statx",
}
_AARCH64 = {
    22: "epoll_pwait",
    25: "fcntl",
    29: "ioctl",
    32: "flock",
    56: "openat",
    63: "read",
    64: "write",
    65: "readv",
    66: "writev",
    67: "pread64",
    68: "pwrite64",
    72: "pselect6",
    73: "ppoll",
    79: "newfstatat",
    82: "fsync",
    83: "fdatasync",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    124: "sched_yield",
    128: "restart_syscall",
    202: "accept",
    203: "connect",
    206: "sendto",
    207: "recvfrom",
    211: "sendmsg",
    212: "recvmsg",
    242: "accept4",
    260: "wait4",
    291: "statx",
}
_NAMES = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})

_RESTARTED = {"nanosleep": "clock_nanosleep", "futex": "futex", "poll": "poll"}
"""A call that was interrupted and goes on hides its number; where it waits in the kernel tells."""


def process_state(pid: int) -> ProcessState:
    """The state of its main thread; "X" when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            letter = stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:
        return "?"
    if letter == "I":
        return "S"
    # A traced process ("t") is being looked at: that says nothing about how it was.
    return cast(ProcessState, letter) if letter in get_args(ProcessState) else "?"


def system_call(pid: int, thread: int) -> str:
    """The system call that a thread is in, `RUNNING` when it is in none, empty when not known."""
    word = _read(f"/proc/{pid}/task/{thread}/syscall").split(" ", 1)[0].strip()
    if word == RUNNING or not word.isdigit():
        return RUNNING if word == RUNNING else ""
    name = _NAMES.get(int(word), f"system call {word}")
    if name == "restart_syscall":
        place = _read(f"/proc/{pid}/task/{thread}/wchan")
        return next((call for part, call in _RESTARTED.items() if part in place), name)
    return name


def catches(pid: int, number: int) -> bool:
    """Whether it has a handler for that signal and would take it now."""
    return _in_mask(pid, "SigCgt", number) and not _in_mask(pid, "SigBlk", number)


def is_handling(pid: int, number: int) -> bool:
    """Whether that signal still waits for its main thread, or its handler has not returned."""
    return any(_in_mask(pid, mask, number) for mask in ("ShdPnd", "SigPnd", "SigBlk"))


def _in_mask(pid: int, mask: str, number: int) -> bool:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(mask + ":"):
            return bool(int(line.split()[1], 16) & 1 << (number - 1))
    return False


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def resume(pid: int, pidfd: int) -> None:
    """Let a process go on that somebody left stopped."""
    if process_state(pid) == "T":
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        except ProcessLookupError:
            pass
