"""A way to a server that can be cut, as a network is: without a word to either side."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Wire:
    """Forwards connections to a port. While it is cut nothing passes and nothing is closed."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def cut(self) -> None:
        self._whole.clear()

    def mend(self, *, forgets: bool) -> None:
        """Let it pass again; one that `forgets` has lost the connections of before, and resets them."""
        if forgets:
            ends, self._ends = self._ends, []
            for end in ends:
                _shut(end)
        self._whole.set()

    def close(self) -> None:
        """End all connections, and every thread."""
        self._whole.set()
        _shut(self._listener)
        self._threads[0].join()  # It accepts: from now on there are no new connections.
        for end in self._ends:
            _shut(end)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._whole.wait()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                self._begin(self._pass, near, far)
                self._begin(self._pass, far, near)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._whole.wait()
                target.sendall(data)
        _shut(source)
        _shut(target)

    def _begin(self, run: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
