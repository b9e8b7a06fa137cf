"""Wraps the few Linux system calls that Python does not."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

_READ_WRITE = 3
_SHARED = 1


def prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Mapping:
    """Shared memory mapped from a descriptor, which may be closed afterwards.

    The standard library's mmap keeps a descriptor of its own; a worker must not have one that its
    script could close, or count.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            *[ctypes.c_int] * 3,
            ctypes.c_long,
        ]
        address = self._libc.mmap(None, size_bytes, _READ_WRITE, _SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.address: int = address
        self._size_bytes = size_bytes
        self.view = memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")

    def close(self) -> None:
        """Unmap the memory. All views of it must have been released."""
        self.view.release()
        self._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self._size_bytes))


def open_many_files() -> None:
    """Raise this process's limit of open files to the maximum."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_alive(connection: socket.socket, every_s: float = 1.0) -> None:
    """Have the kernel close a connection whose peer is cut off, after four intervals.

    Probing thousands of peers each second would drown their answers, so with many use a longer one.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        seconds = max(1, round(every_s))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000 * seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show; 15 characters at most."""
    prctl(PR_SET_NAME, name.encode()[:15])


def unblock_signals() -> None:
    """Unblock all signals; pending ones are delivered now."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (a child subreaper)."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listing:
            return [int(word) for word in listing.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def await_end(pid: int, limit_s: float) -> None:
    """Wait until a process has ended, within a limit. A child stays a zombie: it is not reaped."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [], limit_s)
    finally:
        os.close(pidfd)
