"""Says what the kernel knows about the two ends of a TCP stream, and ends one in a way that tells."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from ipaddress import IPv6Address
from typing import Any

_SIOCOUTQ = 0x5411
_COUNT = struct.Struct("=i")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER for no time at all."""


def address_of(name: Any) -> str:
    """Write a socket's address and port so that both ends write the same one; empty if unknown."""
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    host, port = str(name[0]).partition("%")[0], name[1]
    if host.startswith("::ffff:"):  # IPv4, as a socket for both versions sees it.
        host = str(IPv6Address(host).ipv4_mapped or host)
    return f"{host} {port}"


def all_acknowledged(connection: socket.socket) -> bool:
    """Return whether the other end's kernel has acknowledged every byte that was written."""
    try:
        queued = fcntl.ioctl(connection.fileno(), _SIOCOUTQ, bytes(_COUNT.size))
    except OSError:
        return False
    return bool(_COUNT.unpack(queued)[0] == 0)


def reset(transport: asyncio.WriteTransport) -> None:
    """End a stream so that the other end sees a reset; a process that dies closes its streams."""
    connection = transport.get_extra_info("socket")
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    except OSError:  # It is closed already.
        pass
    transport.abort()
