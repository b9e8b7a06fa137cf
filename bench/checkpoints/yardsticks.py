"""What the machine can do at best: a plain copy, a plain write, a plain connection.

Each does nothing but move as many bytes as the state has, in the process and in the minutes in which
that is saved or restored.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from checkpoints.lines import Seconds
from checkpoints.timing import took

WRITE_BYTES = 16 << 20
PACKET_BYTES = 1 << 20

_libc = ctypes.CDLL(None)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p


class Memory:
    """Two buffers that were used before, and what copying from one to the other takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._source = torch.full((size,), 1, dtype=torch.uint8)
        self._target = torch.full((size,), 2, dtype=torch.uint8)

    def memcpy(self) -> Seconds:
        """One call of the C library's, on one core."""
        to, source = self._target.data_ptr(), self._source.data_ptr()
        return took(lambda: _libc.memcpy(to, source, self.size))

    def torch_copy(self) -> Seconds:
        return took(lambda: self._target.copy_(self._source))


class PlainWrite:
    """A file of so many bytes, written from memory from its start to its end, and fsync."""

    def __init__(self, folder: Path, size: int) -> None:
        self._path = folder / "plain"
        self._source = memoryview(bytearray(WRITE_BYTES))
        self._size = size

    def write(self) -> Seconds:
        os.sync()  # What others have still to write is not to be waited for here.
        try:
            return took(self._write)
        finally:
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = self._size
            while left:
                left -= os.write(fd, self._source[:left])
            os.fsync(fd)
        finally:
            os.close(fd)


# ---- a plain connection -------------------------------------------------------------------------


def serve_bytes() -> Iterator[int]:
    """Send as many bytes as are asked for on each connection; the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    yield int(listener.getsockname()[1])


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send, args=(connection,), daemon=True).start()


def _send(connection: socket.socket) -> None:
    source = memoryview(bytearray(PACKET_BYTES))
    with connection:
        left = int.from_bytes(connection.recv(8), "big")
        while left:
            count = min(left, PACKET_BYTES)
            connection.sendall(source[:count])
            left -= count


def receive_bytes(port: int, size: int, streams: int) -> Seconds:
    """How long so many bytes take to come in, and to be forgotten."""

    def receive(count: int) -> None:
        into = memoryview(bytearray(PACKET_BYTES))
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(count.to_bytes(8, "big"))
            while count:
                got = connection.recv_into(into[:count])
                if not got:
                    raise ConnectionError("the sender left")
                count -= got

    def all_streams() -> None:
        share = -(-size // streams)
        sizes = [min(share, size - share * i) for i in range(streams)]
        threads = [threading.Thread(target=receive, args=(count,)) for count in sizes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return took(all_streams)
