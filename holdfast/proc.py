"""Reads what the kernel knows of a process from /proc: in microseconds, without disturbing it.

The state tells a stopped or dead process from a living one. The system call that a thread is in
tells sleeping from reading from waiting, which a Python stack does not: `time.sleep`, `file.read`
and `tensor.item` all look like the line that called them. CPU time and bytes moved tell a process
that works from one that waits. What the kernel does not tell reads as empty or zero, never as an
error. A read costs about five microseconds, so that all threads of a process may be looked at.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, NamedTuple

RUNNING = "running"
_PIECE_BYTES = 1 << 16

LOADER_WORKER = "pt_data_worker"
"""The name that torch gives the workers of a data loader."""

_SHM_MANAGER = "torch_shm_manager"[:15]

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


_OWN_LOCK, _OPERATION = 128, 127
"""Of a futex call: the flag of one that no other process can wake, and the bits of the operation."""
_FUTEX_WAITS = frozenset({0, 6, 9, 11, 13})
"""FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET, FUTEX_WAIT_REQUEUE_PI, FUTEX_LOCK_PI2."""


class Call(NamedTuple):
    """The system call that a thread is in."""

    name: str
    """`RUNNING` if it is in none, "" if unknown."""
    arguments: tuple[int, ...] = ()

    @property
    def waits_for_own_lock(self) -> bool:
        """Whether it waits, without a timeout, for a lock that only its own process can release."""
        if self.name != "futex" or len(self.arguments) < 4:
            return False
        operation, timeout = self.arguments[1], self.arguments[3]
        waits = operation & _OPERATION in _FUTEX_WAITS
        return waits and bool(operation & _OWN_LOCK) and timeout == 0

    @property
    def waits_for_a_while(self) -> bool:
        """Whether it waits for a lock with a timeout, as for the GIL."""
        return self.name == "futex" and len(self.arguments) > 3 and self.arguments[3] != 0


class CpuTime(NamedTuple):
    """A thread's time on a CPU so far, and its time in the queue for one."""

    ran_ns: int = 0
    queued_ns: int = 0


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
    """Return the ids of a process's threads."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def thread_name(pid: int, thread: int) -> str:
    """Return the name that a thread has given itself, or inherited."""
    return _read(f"/proc/{pid}/task/{thread}/comm").rstrip("\n")


def removes_shared_memory(pid: int) -> bool:
    """Return whether it is torch's manager of shared memory files (the `file_system` strategy).

    It removes the files of processes that died, and ends by itself after the last of them: whoever
    kills it leaves those files behind.
    """
    return thread_name(pid, pid) == _SHM_MANAGER


def thread_state(pid: int, thread: int) -> str:
    """Return the kernel's letter for one thread; "" if unknown."""
    return _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].lstrip()[:1]


def system_calls(pid: int) -> dict[int, str]:
    """Return the system call that each thread is in, by thread id (see `system_call`)."""
    return {thread: system_call(pid, thread) for thread in threads(pid)}


def system_call(pid: int, thread: int) -> str:
    """Return the system call that a thread is in, `RUNNING` if it is in none, "" if unknown."""
    return call(pid, thread).name


def call(pid: int, thread: int) -> Call:
    """Return the system call that a thread is in, with its arguments."""
    words = _read(f"/proc/{pid}/task/{thread}/syscall").split()
    if not words or not words[0].isdigit():
        return Call(RUNNING if words[:1] == [RUNNING] else "")
    name = _NAMES.get(int(words[0]), f"system call {words[0]}")
    if name == "restart_syscall":
        place = _read(f"/proc/{pid}/task/{thread}/wchan")
        return Call(next((call for part, call in _RESTARTED.items() if part in place), name))
    return Call(name, tuple(int(word, 16) for word in words[1:7]))


def cpu_time(pid: int, thread: int) -> CpuTime:
    """Return how long a thread has run so far."""
    ran_ns, queued_ns, *_ = (*_read(f"/proc/{pid}/task/{thread}/schedstat").split(), 0, 0)
    return CpuTime(int(ran_ns), int(queued_ns))


def moved_bytes(pid: int, thread: int | None = None) -> int:
    """Return how many bytes a process (or one of its threads) has read and written so far."""
    counts = _fields(f"/proc/{pid}/io" if thread is None else f"/proc/{pid}/task/{thread}/io")
    names = ("rchar", "wchar", "read_bytes", "write_bytes")
    return sum(int(counts.get(name, "0")) for name in names)


def children(pid: int) -> list[int]:
    """Return the child processes of a process, whichever of its threads started them."""
    found = [_read(f"/proc/{pid}/task/{thread}/children").split() for thread in threads(pid)]
    return [int(child) for some in found for child in some]


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, their children, and so on."""
    found, parents = [], [pid]
    while parents:
        parents = [child for parent in parents for child in children(parent)]
        found += parents
    return found


def may_be_signalled(pid: int, except_for: int) -> bool:
    """Return whether a signal may come that the process waits for, and handles: from a timer, from
    somebody outside, or from a child that ends. One signal is known to do nothing of that kind."""
    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2]
    if any(catches(pid, number) for number in numbers if number != except_for):
        return True
    if _read(f"/proc/{pid}/timers"):
        return True
    # Torch's own handler, installed with a data loader's workers, releases nothing.
    others = (child for child in children(pid) if thread_name(child, child) != LOADER_WORKER)
    return catches(pid, signal.SIGCHLD) and any(others)


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


def signal_masks(pid: int) -> tuple[str, ...]:
    """Return the masks of the signals that a process blocks, ignores and handles."""
    masks = _fields(f"/proc/{pid}/status")
    return tuple(masks.get(mask, "") for mask in ("SigBlk", "SigIgn", "SigCgt"))


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
    """Return a file's text. Names of processes are any bytes; a file object would cost more than the
    read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces = list(iter(lambda: os.read(fd, _PIECE_BYTES), b""))
            return b"".join(pieces).decode(errors="replace")
        finally:
            os.close(fd)
    except OSError:
        return ""
