"""Cuts TCP connections of running processes, as a pulled cable would: neither end is told.

A filter on a socket decides which packets the kernel delivers to it; one that accepts none makes it
deaf. The sender gets no acknowledgement, and no connection is closed. What the process itself sends
still leaves, until it has to wait for an answer. Once the filter is removed, TCP retransmits what was
lost on both sides, and the connection goes on.

We reach the sockets of another process with pidfd_getfd, which takes the right to trace it: a parent
has that, except where a container or its policy denies it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

_PIDFD_GETFD: Final = 438
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_ACCEPT_NOTHING: Final = struct.pack("HBBI", 0x06, 0, 0, 0)


class Cut:
    """The connections of these processes to other nodes, cut until `heal` is called."""

    def __init__(self, pids: Iterable[int]) -> None:
        connections = [connection for pid in pids for connection in _connections(pid)]
        own = {connection.getsockname()[:2] for connection in connections}
        program = ctypes.create_string_buffer(_ACCEPT_NOTHING, len(_ACCEPT_NOTHING))
        described = struct.pack("HP", 1, ctypes.addressof(program))
        self._cut: list[socket.socket] = []
        for connection in connections:
            if connection.getpeername()[:2] in own:  # Both ends are on this node.
                connection.close()
            else:
                connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
                self._cut.append(connection)

    def __len__(self) -> int:
        return len(self._cut)

    def heal(self) -> None:
        for connection in self._cut:
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        self._cut = []


def _connections(pid: int) -> list[socket.socket]:
    """Duplicate the open TCP connections of a process, as far as we may have them."""
    try:
        pidfd = os.pidfd_open(pid)
        numbers = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []
    try:
        copies = [_duplicate(pidfd, pid, number) for number in numbers]
    finally:
        os.close(pidfd)
    return [copy for copy in copies if copy is not None]


def _duplicate(pidfd: int, pid: int, number: int) -> socket.socket | None:
    """Duplicate a descriptor of a process; None unless it is an open TCP connection."""
    fd = -1
    with suppress(OSError):  # It may be closed by now.
        if os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
            fd = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, number, 0)
    if fd < 0:
        return None
    copy = socket.socket(fileno=fd)
    with suppress(OSError):  # It may listen, or its other end may be gone.
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            copy.getpeername()
            return copy
    copy.close()
    return None
