"""Ports for the stores of rounds.

Rank 0's worker will listen on the port, but it is promised before that worker exists. A socket that
is bound and does not listen keeps the kernel from giving the number to anybody else, while the
worker, which asks for address reuse as every server does, may still bind it.
"""

from __future__ import annotations

import socket


class ReservedPort:
    def __init__(self, number: int = 0) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", number))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()
