"""Ports for clusters that several test processes start at the same time."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile

PORTS_EACH = 64

_FIRST_PORT, _PORT_BLOCKS = 21_000, 100


class PortBlock:
    """Ports below the ephemeral range that no other cluster on this machine uses."""

    def __init__(self) -> None:
        for number in range(_PORT_BLOCKS):
            self.first = _FIRST_PORT + number * PORTS_EACH
            self._lock = os.open(
                f"{tempfile.gettempdir()}/engine-ports-{self.first}.lock",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o666,
            )
            if self._take():
                return
            self.close()
        raise RuntimeError(f"no {PORTS_EACH} free ports in a row from {_FIRST_PORT} on")

    def _take(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return all(_is_free(self.first + index) for index in range(PORTS_EACH))

    def close(self) -> None:
        os.close(self._lock)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
