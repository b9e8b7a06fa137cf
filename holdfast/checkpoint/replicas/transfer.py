"""An image on its way, over several connections at once.

One connection seldom fills a fast network, so an image is moved in shares, each a run of its blocks
on a connection and in a thread of its own. Two rules keep that safe. Every block is claimed by one
connection and no other: what was verified is never written again. And a place is settled, complete or
given up, only once the last connection that might write to it has left.

Bytes are received straight into the place, whose memory is there already, and hashed while they are
still in the processor's cache.

What is wrong with one connection is wrong with the whole image: the first error counts, cuts the
others off at once, and is what the caller hears.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import xxhash

from holdfast.checkpoint.memory.image_store import Place
from holdfast.checkpoint.replicas.connection import CHUNK_BYTES, Connection
from holdfast.checkpoint.state.layout import BLOCK_BYTES, blocks_of
from holdfast.checkpoint.storage.digests import digest_of
from holdfast.errors import (
    BadFrame,
    Cancelled,
    HoldfastError,
    Refused,
    WireError,
)

LEAST_SHARE: Final = 4
"""Blocks for which a connection of their own is worth while."""


class Transfer:
    """The connections of one transfer. Any thread may cancel it, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self.cancelled = False
        self.incoming: Incoming | None = None
        """What comes in by it, once that is known."""

    @property
    def done(self) -> float:
        """Which part of what comes in is there."""
        return self.incoming.done if self.incoming is not None else 0.0

    def cancel(self) -> None:
        """Cut it off now: what waits on a connection of it is woken, and no new one is begun."""
        with self._lock:
            self.cancelled = True
            for connection in self._connections:
                connection.cut()

    @contextmanager
    def carried_by(self, connection: Connection) -> Iterator[None]:
        with self._lock:
            if self.cancelled:
                raise Cancelled(f"{connection.peer}: the transfer was cancelled")
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)


class Incoming:
    """An image that is being received into its place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._unclaimed = set(range(blocks_of(place.size)))
        self._missing = len(self._unclaimed)
        self._writers = 0
        self._error: HoldfastError | None = None
        self._streams = Transfer()
        self._changed = threading.Condition()

    def receive(self, connection: Connection, blocks: Sequence[int]) -> bool:
        """Take these blocks from a connection and verify them; False when they did not all come."""
        self._claim(blocks)
        try:
            with self._streams.carried_by(connection):
                self._take(connection, blocks)
            return True
        except HoldfastError as error:
            self.fail(error)
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()
        return False

    @property
    def done(self) -> float:
        return 1.0 - self._missing / blocks_of(self.place.size)

    def fail(self, error: HoldfastError) -> None:
        """It will not become whole."""
        # The error outlives this; its traceback would keep what points into the place.
        error.__traceback__ = None
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._streams.cancel()

    def settle(self, idle_s: float) -> None:
        """Return when all is there and verified; raise what prevented it. Then nobody writes.

        An image that no connection carries is given up after that many seconds.
        """
        with self._changed:
            while self._missing and self._error is None:
                if not self._changed.wait(idle_s) and not self._writers:
                    self._error = WireError(f"no blocks came for {idle_s:.3g} s")
            self._unclaimed.clear()
            while self._writers:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def _claim(self, blocks: Sequence[int]) -> None:
        with self._changed:
            if not self._unclaimed.issuperset(blocks):
                raise BadFrame("blocks that are not wanted, or that another connection brings")
            self._unclaimed.difference_update(blocks)
            self._writers += 1

    def _take(self, connection: Connection, blocks: Sequence[int]) -> None:
        place = self.place
        for block in blocks:
            hashed = xxhash.xxh3_128()
            end = min((block + 1) * BLOCK_BYTES, place.size)
            for at in range(block * BLOCK_BYTES, end, CHUNK_BYTES):
                length = min(CHUNK_BYTES, end - at)
                # Released at once: who unmaps the place later must find nothing that points there.
                with place.view as body, body[at : at + length] as chunk:
                    connection.fill(chunk)
                    hashed.update(chunk)
            if hashed.digest() != digest_of(place.digests, block):
                raise Refused(f"{name_of(place)}: block {block} changed while it was sent")
            with self._changed:
                self._missing -= 1
                self._changed.notify_all()


def name_of(image: Place) -> str:
    snapshot = image.id.snapshot
    return f"rank {image.id.rank}, step {snapshot.step}, round {snapshot.round}"


def shares(blocks: Sequence[int], streams: int) -> list[Sequence[int]]:
    """The blocks in runs of about the same length, one for each connection."""
    count = max(1, min(streams, len(blocks) // LEAST_SHARE))
    bounds = [len(blocks) * index // count for index in range(count + 1)]
    return [blocks[bounds[i] : bounds[i + 1]] for i in range(count)]
