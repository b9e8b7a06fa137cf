"""What is still to be said to a worker.

A worker reads its control socket only while its script waits for an answer, and a script may hang or
be stopped at any time. The agent must never wait for one: what the socket does not take at once is
kept here and written when it can be, and a worker that lets too much pile up is not spoken to again.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable

MAX_UNSENT_BYTES = 4 << 20


class Mailbox:
    def __init__(self, control: socket.socket, most_bytes: int | None = MAX_UNSENT_BYTES) -> None:
        self._control = control
        self._most_bytes = most_bytes
        self._unsent: deque[bytes] = deque()
        self._size_bytes = 0
        self._writing = False

    def put(self, packets: Iterable[bytes]) -> bool:
        """Send these as soon as possible; False when there is too much already."""
        for packet in packets:
            self._unsent.append(packet)
            self._size_bytes += len(packet)
        if self._most_bytes is not None and self._size_bytes > self._most_bytes:
            return False
        self._send()
        return True

    def close(self) -> None:
        """Forget what was not sent. To be called before the socket is closed."""
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
        except OSError:  # It is gone; its pidfd will say so.
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
