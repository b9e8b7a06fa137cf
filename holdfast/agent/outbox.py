"""Buffers what is to be sent to a worker.

A worker reads its control socket only while its script waits for an answer, and a script may hang
or be stopped at any time. The agent must never block on one: what the socket does not take at once
is buffered here and written when it can be, and a worker that lets too much accumulate gets nothing
more.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable

MAX_UNSENT_BYTES = 4 << 20


class Outbox:
    """Packets that a worker has yet to receive."""

    def __init__(self, control: socket.socket, most_bytes: int | None = MAX_UNSENT_BYTES) -> None:
        self._control = control
        self._most_bytes = most_bytes
        self._unsent: deque[bytes] = deque()
        self._size_bytes = 0
        self._writing = False

    def put(self, packets: Iterable[bytes]) -> bool:
        """Send packets as soon as possible; return False if too much is unsent."""
        for packet in packets:
            self._unsent.append(packet)
            self._size_bytes += len(packet)
        if self._most_bytes is not None and self._size_bytes > self._most_bytes:
            return False
        self._send()
        return True

    def close(self) -> None:
        """Drop what was not sent. Call it before the socket is closed."""
        self._unsent.clear()
        self._size_bytes = 0
        self._watch(False)

    def _send(self) -> None:
        try:
            while self._unsent:
                self._control.send(self._unsent[0])
                self._size_bytes -= len(self._unsent.popleft())
        except BlockingIOError:
            self._watch(True)
            return
        except OSError:  # The worker is gone; its pidfd will say so.
            self._unsent.clear()
            self._size_bytes = 0
        self._watch(False)

    def _watch(self, writing: bool) -> None:
        if writing == self._writing:
            return
        self._writing = writing
        loop = asyncio.get_running_loop()
        if writing:
            loop.add_writer(self._control.fileno(), self._send)
        else:
            loop.remove_writer(self._control.fileno())
