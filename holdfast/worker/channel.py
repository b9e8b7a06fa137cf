"""A process's end of the socket to its agent.

It must survive whatever the script does: the descriptor is moved far up, so that the script's own
files get the numbers they would have had, and before each packet it is checked that the descriptor is
still that socket. A script that closes it, or forks, or hangs, does no harm: the agent watches the
process, not the socket.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
from collections.abc import Sequence

import msgspec

from holdfast.messages.local import PACKET_BYTES, Local

_encoder = msgspec.msgpack.Encoder()
_HIGHEST_FD = 1 << 16
_LONGEST_MS = 1 << 30


class Channel:
    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=move_up(fd))
        self._inode = os.fstat(self._socket.fileno()).st_ino
        self._pid = os.getpid()

    def send(self, message: Local, fds: Sequence[int] = ()) -> bool:
        """Say something; False when the agent cannot hear it any more."""
        return self.send_packet(_encoder.encode(message), fds)

    def send_packet(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        if os.getpid() != self._pid or not self._is_ours():
            return False
        try:
            socket.send_fds(self._socket, [packet], fds)
        except OSError:
            return False
        return True

    def receive_within(self, limit_s: float | None) -> bytes | None:
        """One packet; None when none came in that time, empty when none will come any more."""
        if not self._is_ours():
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

    def _is_ours(self) -> bool:
        """Whether the descriptor is still the socket: a script may have closed it."""
        try:
            return os.fstat(self._socket.fileno()).st_ino == self._inode
        except OSError:
            return False

    def receive(self, max_fds: int) -> tuple[bytes, list[int]]:
        """One packet and the descriptors with it; empty when the agent is gone."""
        packet, fds, _, _ = socket.recv_fds(
            self._socket, PACKET_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC
        )
        return packet, list(fds)

    def adopt(self) -> None:
        """This process, a fork of the one that made the channel, owns it from now on."""
        self._pid = os.getpid()

    def close(self) -> None:
        self._socket.close()


def move_up(fd: int) -> int:
    """Move a descriptor out of the way of the script's own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _HIGHEST_FD if soft == resource.RLIM_INFINITY else min(soft, _HIGHEST_FD)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(3, limit - 16))
    os.close(fd)
    return high
