"""Connects a worker or a nursery to its agent, over a Unix socket that the agent created.

The socket must survive whatever the script does. Its descriptor is moved far up, so that the script's
own files get the numbers they would have had, and before each packet it is checked that the descriptor
is still that socket. A script that closes it, forks or hangs does no harm: the agent watches the
process, not the socket.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket

import msgspec

from holdfast.messages.local import PACKET_BYTES, Local

_encoder = msgspec.msgpack.Encoder()
_HIGHEST_FD = 1 << 16
_LONGEST_MS = 1 << 30


class Channel:
    """One end of a control socket. Only the process that created it can use it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=move_up(fd))
        self._inode = os.fstat(self._socket.fileno()).st_ino
        self._pid = os.getpid()

    def send(self, message: Local) -> bool:
        """Send a message; return False if the agent cannot be reached any more."""
        return self.send_packet(_encoder.encode(message))

    def send_with(self, message: Local, fd: int) -> bool:
        """Send a message with a descriptor."""
        if os.getpid() != self._pid or not self._is_open():
            return False
        try:
            socket.send_fds(self._socket, [_encoder.encode(message)], [fd])
        except OSError:
            return False
        return True

    def send_packet(self, packet: bytes) -> bool:
        if os.getpid() != self._pid or not self._is_open():
            return False
        try:
            self._socket.send(packet)
        except OSError:
            return False
        return True

    def receive_within(self, limit_s: float | None) -> bytes | None:
        """Return one packet: None if none arrived in time, empty if the agent is gone."""
        if not self._is_open():
            return b""
        try:
            waiting = select.poll()
            waiting.register(self._socket.fileno(), select.POLLIN)
            if not waiting.poll(None if limit_s is None else min(limit_s * 1000, _LONGEST_MS)):
                return None
            return self._socket.recv(PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def receive(self, max_fds: int) -> tuple[bytes, list[int]]:
        """Wait for one packet with its descriptors; it is empty if the agent is gone."""
        packet, fds, _, _ = socket.recv_fds(
            self._socket, PACKET_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC
        )
        return packet, list(fds)

    def close(self) -> None:
        self._socket.close()

    def _is_open(self) -> bool:
        """Return whether the descriptor is still the socket: the script may have closed it."""
        try:
            return os.fstat(self._socket.fileno()).st_ino == self._inode
        except OSError:
            return False


def move_up(fd: int) -> int:
    """Move a descriptor to a high number, out of the way of the script's own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _HIGHEST_FD if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST_FD)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(3, limit - 16))
    os.close(fd)
    return high
