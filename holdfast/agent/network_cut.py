"""Cuts connections of running processes, as a pulled cable would: nobody is told.

A filter on a socket decides which packets the kernel hands to it; one that takes none makes it deaf.
Whoever sends to it gets no answer, not even that its packets came, and no connection is closed. What
the process itself sends still leaves, until it has to wait for an answer. When the filter is gone,
the kernels on both sides send again what was lost, and it goes on as if nothing had been.

We get at another process's sockets with pidfd_getfd, which takes the right to trace it: a parent has
that, except where a container or its policy takes it away.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any, Final

_PIDFD_GETFD: Final = 438
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_TAKE_NOTHING: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


class Cut:
    """The connections of these processes with anybody else, made deaf until it is healed."""

    def __init__(self, pids: Iterable[int]) -> None:
        connections = [one for pid in pids for one in _connections(pid)]
        own = {one.getsockname()[:2] for one in connections}
        self._cut: list[socket.socket] = []
        for one in connections:
            if _peer(one) in own:  # Both ends are on this node.
                one.close()
            else:
                _deafen(one)
                self._cut.append(one)

    def __len__(self) -> int:
        return len(self._cut)

    def heal(self) -> None:
        for one in self._cut:
            try:
                one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            finally:
                one.close()
        self._cut = []


def _deafen(connection: socket.socket) -> None:
    program = ctypes.create_string_buffer(_TAKE_NOTHING, len(_TAKE_NOTHING))
    described = struct.pack("HP", 1, ctypes.addressof(program))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


def _peer(connection: socket.socket) -> Any:
    return connection.getpeername()[:2]


def _connections(pid: int) -> list[socket.socket]:
    """Copies of a process's TCP connections; none when we may not have them."""
    found = []
    try:
        pidfd = os.pidfd_open(pid)
        numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    try:
        for number in numbers:
            one = _copied(pidfd, pid, number)
            if one is not None:
                found.append(one)
    finally:
        os.close(pidfd)
    return found


def _copied(pidfd: int, pid: int, number: int) -> socket.socket | None:
    try:
        if not os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
            return None
    except OSError:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        return None
    one = socket.socket(fileno=fd)
    try:
        if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
            one.getpeername()
            return one
    except OSError:
        pass  # It listens, or the other end is gone.
    one.close()
    return None
