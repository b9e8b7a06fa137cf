"""Reads an image in another node's memory, where it is.

A restore wants some blocks of it, often all, and wants them in tensors: a copy of the image here would
cost fresh memory, which takes longer to get than the network to fill, and would be read once and no
more. So bytes go from the peer's memory into the tensors themselves. Each thread that reads has a
connection of its own, and asks for a block when it comes to it; `reading` trusts none before its digest
was right, as with a file.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from time import monotonic

from holdfast.checkpoint.memory.image_store import Outline
from holdfast.checkpoint.replicas.connection import STALL_S, Connection
from holdfast.checkpoint.replicas.copies import Peer, outline_of
from holdfast.checkpoint.replicas.messages import More, Pull
from holdfast.checkpoint.state.layout import BLOCK_BYTES
from holdfast.errors import Refused
from holdfast.messages.checkpoints import ImageId


class PeerSource:
    """A source (see `reading`). A block is read from its start to its end by one thread."""

    def __init__(
        self,
        peer: Peer,
        token: str,
        tls: ssl.SSLContext | None,
        image: ImageId,
        stall_s: float = STALL_S,
    ) -> None:
        self._peer = peer
        self._token = token
        self._tls = tls
        self._image = image
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._connections: list[Connection] = []
        self._own = threading.local()
        try:
            self.outline = self._connect()
        except BaseException:
            self.close()
            raise
        self.name = f"rank {image.rank}'s image on {peer.host}:{peer.port}"
        self.size = self.outline.size
        self.digests = self.outline.digests

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        if at % BLOCK_BYTES == 0:
            self._ask(at // BLOCK_BYTES)
        for view in views:
            self._own.connection.fill(view)
        self._own.used_at = monotonic()

    def _ask(self, block: int) -> None:
        # Who is silent for too long is closed at the other end.
        silent_s = monotonic() - getattr(self._own, "used_at", 0.0)
        if silent_s > self._stall_s / 2 and self._connect() != self.outline:
            raise Refused(f"{self.name}: it changed while it was read")
        self._own.connection.send(More(blocks=((block, block + 1),)))

    def _connect(self) -> Outline:
        """Have this thread's connection, and hear what the image is."""
        connection = Connection.dial(self._peer.host, self._peer.port, self._stall_s)
        with self._lock:
            self._connections.append(connection)
        connection.greet(self._tls, self._token)
        connection.send(Pull(image=self._image, blocks=()))
        outline = outline_of(self._image, connection)
        self._own.connection, self._own.used_at = connection, monotonic()
        return outline

    def close(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
