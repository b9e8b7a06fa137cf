"""Counts the bytes of TCP connections, from outside of the processes that own them.

The kernel's socket diagnostics (`sock_diag`, what `ss` reads) tell for each connection how many bytes
its peer has acknowledged and how many it received; /proc tells which process has which socket open.
Where diagnostics are not permitted, the lengths of the queues in /proc/PID/net/tcp remain: they show
that something moves, though not everything that does.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Container, Iterator
from typing import NamedTuple

_SOCK_DIAG, _BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI48x")
_OPEN_STATES = 0b1011_0011_0110
"""Of the TCP states, those of a connection that may still carry bytes or has just stopped to."""
_INFO = 2
"""The attribute with a connection's `tcp_info`."""
_MESSAGE_BYTES = 72
_PORTS_AT, _INODE_AT = 4, 68
_ATTRIBUTE = struct.Struct("=HH")
_COUNTERS = struct.Struct("=QQ")
_COUNTERS_AT = 120
"""Offset of bytes_acked and bytes_received in `tcp_info`, since Linux 4.1."""
_BUFFER_BYTES = 1 << 18


class TcpConnection(NamedTuple):
    """An open TCP connection."""

    ports: tuple[int, int]
    moved: int
    """A number that changes when bytes are moved."""


def inodes(pid: int) -> set[int]:
    """Return the numbers of the sockets that a process has open."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue  # It was closed meanwhile.
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    except OSError:
        pass
    return found


def connections(pid: int, wanted: Container[int]) -> dict[int, TcpConnection]:
    """Return the wanted TCP connections by socket number; `pid` sees the same network as they do."""
    if _same_network(pid):
        try:
            return {n: one for n, one in _diagnosed() if n in wanted}
        except OSError:
            pass  # Not permitted, as in many containers.
    return {n: one for n, one in _queues(pid) if n in wanted}


def _same_network(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def _diagnosed() -> Iterator[tuple[int, TcpConnection]]:
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asked:
            query = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _OPEN_STATES)
            size = _HEADER.size + len(query)
            asked.settimeout(1.0)
            asked.send(_HEADER.pack(size, _BY_FAMILY, _REQUEST_DUMP, 1, 0) + query)
            yield from _answers(asked)


def _answers(asked: socket.socket) -> Iterator[tuple[int, TcpConnection]]:
    while True:
        data = memoryview(asked.recv(_BUFFER_BYTES))
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == _DONE:
                return
            if kind == _ERROR or size < _HEADER.size:
                raise OSError("socket diagnostics refused")
            yield _connection(data[_HEADER.size : size])
            data = data[(size + 3) & ~3 :]


def _connection(message: memoryview) -> tuple[int, TcpConnection]:
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    moved, at = 0, _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO and size >= _ATTRIBUTE.size + _COUNTERS_AT + _COUNTERS.size:
            moved = sum(_COUNTERS.unpack_from(message, at + _ATTRIBUTE.size + _COUNTERS_AT))
        at += max(_ATTRIBUTE.size, (size + 3) & ~3)
    return inode, TcpConnection(struct.unpack_from(">HH", message, _PORTS_AT), moved)


def _queues(pid: int) -> Iterator[tuple[int, TcpConnection]]:
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{name}") as table:
                rows = [line.split() for line in table][1:]
        except OSError:
            continue
        for _, local, remote, _, queues, _, _, _, _, inode, *_ in rows:
            ports = int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16)
            yield int(inode), TcpConnection(ports, int(queues.replace(":", ""), 16))
