"""Copies rank images to other nodes' memory, and fetches them back when a node is lost.

This is the side that asks; `server` answers, and `protocol` defines the messages. A restore needs no
copy of its own: `sources.PeerSource` reads an image where it is.

The worker may overwrite an image while it is being sent. Nothing locks it: the receiver finds that a
block does not match its digest and refuses the copy, so a copy is either exactly what was sealed or not
there at all. A copy never blocks a save.

One connection seldom fills a fast network, so an image is moved in shares, each a run of its blocks
on a connection and a thread of its own. Every block is claimed by one connection and no other: what
was verified is never written again. An image is completed or dropped only once the last connection
that might write to it has left. Bytes are received straight into the image, and hashed while they are
still in the cache. The first error on any connection cuts off the others, and is the one that the
caller gets:

    WireError       the peer cannot be reached, left, or made no progress: try another peer
    Cancelled       (a WireError) this side gave up
    Unusable        the image changed while it was sent: send the newer one
    StorageError    no memory for it, there or here
    NotThere        (a StorageError) the peer does not have it: try another peer
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final

import xxhash
from msgspec import Struct

from holdfast.checkpoint.memory.images import Held, ImageStore, IncomingImage, Outline
from holdfast.checkpoint.replicas.protocol import (
    CHUNK_BYTES,
    STALL_S,
    Arrived,
    Connection,
    Go,
    Kept,
    Pull,
    Push,
    PushedBlocks,
    Request,
    Sending,
    sealed,
    stretches,
    unsealed,
)
from holdfast.checkpoint.state.layout import BLOCK_BYTES, blocks_of, digest_of
from holdfast.errors import (
    BadFrame,
    Cancelled,
    HoldfastError,
    StorageError,
    Unusable,
    WireError,
)
from holdfast.messages.checkpoints import ImageId

LEAST_SHARE: Final = 4
"""Fewest blocks that are worth a connection of their own."""


class Transfer:
    """The connections of one transfer. Any thread may cancel it at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self.cancelled = False
        self.incoming: Incoming | None = None
        """The image being received, once it is known."""

    @property
    def done(self) -> float:
        """Fraction of the incoming image that has arrived."""
        return self.incoming.done if self.incoming is not None else 0.0

    def cancel(self) -> None:
        """Cut all connections, and refuse new ones."""
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
    """Receives an image over several connections."""

    def __init__(self, place: IncomingImage) -> None:
        self.place = place
        self._unclaimed = set(range(blocks_of(place.size)))
        self._missing = len(self._unclaimed)
        self._writers = 0
        self._error: HoldfastError | None = None
        self._streams = Transfer()
        self._changed = threading.Condition()

    def receive(self, connection: Connection, blocks: Sequence[int]) -> bool:
        """Receive and verify these blocks; return False if not all came."""
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
        """Give the image up."""
        # The error outlives this call; its traceback would keep views of the mapping alive.
        error.__traceback__ = None
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._streams.cancel()

    def settle(self, idle_s: float) -> None:
        """Return when all blocks are verified, or raise the first error. No thread writes afterwards.

        An image that no connection carries is given up after `idle_s` seconds.
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
                raise BadFrame("blocks that are not wanted, or that another connection carries")
            self._unclaimed.difference_update(blocks)
            self._writers += 1

    def _take(self, connection: Connection, blocks: Sequence[int]) -> None:
        place = self.place
        for block in blocks:
            hashed = xxhash.xxh3_128()
            end = min((block + 1) * BLOCK_BYTES, place.size)
            for at in range(block * BLOCK_BYTES, end, CHUNK_BYTES):
                length = min(CHUNK_BYTES, end - at)
                # Released at once: unmapping fails while a view of the mapping exists.
                with place.view as body, body[at : at + length] as chunk:
                    connection.fill(chunk)
                    hashed.update(chunk)
            if hashed.digest() != digest_of(place.digests, block):
                raise Unusable(f"{name_of(place)}: block {block} changed while it was sent")
            with self._changed:
                self._missing -= 1
                self._changed.notify_all()


def name_of(image: IncomingImage) -> str:
    snapshot = image.id.snapshot
    return f"rank {image.id.rank}, step {snapshot.step}, round {snapshot.round}"


def shares(blocks: Sequence[int], streams: int) -> list[Sequence[int]]:
    """Divide blocks into runs of about the same length, one for each connection."""
    count = max(1, min(streams, len(blocks) // LEAST_SHARE))
    bounds = [len(blocks) * index // count for index in range(count + 1)]
    return [blocks[bounds[i] : bounds[i + 1]] for i in range(count)]


# ---- asking a peer -------------------------------------------------------------------------------

_SLOWEST_ALLOCATION: Final = 200e6
"""Bytes per second at which the slowest peer allocates memory."""
_LAST_WORD_S: Final = 2.0


class Peer(Struct, frozen=True):
    """Address of another node's keeper."""

    host: str
    port: int


class TransferLimits(Struct, frozen=True, kw_only=True):
    """Limits of a transfer."""

    stall_s: float = STALL_S
    """Time without progress after which a peer is given up."""
    streams: int = 4
    """Connections for a large image."""


USUAL: Final = TransferLimits()


class _Call(Struct, frozen=True):
    """Everything needed to send requests to a peer."""

    peer: Peer
    token: str
    tls: ssl.SSLContext | None
    limits: TransferLimits
    transfer: Transfer

    @contextmanager
    def request(self, request: Request) -> Iterator[Connection]:
        """Open a connection and send a request on it."""
        connection = Connection.dial(self.peer.host, self.peer.port, self.limits.stall_s)
        try:
            with self.transfer.carried_by(connection):
                connection.greet(self.tls, self.token)
                connection.send(request)
                yield connection
        finally:
            connection.close()

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Report errors that a cancellation caused as `Cancelled`."""
        try:
            yield
        except HoldfastError as error:
            if self.transfer.cancelled and not isinstance(error, Cancelled):
                raise Cancelled(f"{self.peer.host}: the transfer was cancelled") from None
            raise


# ---- push ----


def push(
    peer: Peer,
    token: str,
    tls: ssl.SSLContext | None,
    held: Held,
    limits: TransferLimits = USUAL,
    transfer: Transfer | None = None,
) -> None:
    """Copy an image to a peer. When this returns, the peer has verified all of it."""
    call = _Call(peer, token, tls, limits, transfer or Transfer())
    with call.cancellable(), call.request(Push(outline=sealed(held.outline))) as control:
        go = control.expect(Go, limits.stall_s + held.size / _SLOWEST_ALLOCATION)
        runs = shares(range(blocks_of(held.size)), limits.streams)
        data = Transfer()
        errors = _each(runs, data, lambda run: _send(call, data, go.transfer, held, run))
        try:
            control.expect(Kept, _LAST_WORD_S if errors else limits.stall_s)
        except WireError as error:
            raise (errors or [error])[0] from None


def _send(call: _Call, data: Transfer, transfer: str, held: Held, run: Sequence[int]) -> None:
    at, end = run[0] * BLOCK_BYTES, min((run[-1] + 1) * BLOCK_BYTES, held.size)
    part = PushedBlocks(transfer=transfer, blocks=stretches(run))
    with call.request(part) as connection, data.carried_by(connection):
        connection.send_part(held, at, end)
        connection.expect(Arrived)


def _each(
    runs: Sequence[Sequence[int]], data: Transfer, send: Callable[[Sequence[int]], None]
) -> list[HoldfastError]:
    """Send all runs in parallel; return the errors, the one that stopped the others first."""
    errors: list[HoldfastError] = []

    def one(run: Sequence[int]) -> None:
        try:
            send(run)
        except HoldfastError as error:
            errors.append(error)
            data.cancel()

    with ThreadPoolExecutor(len(runs), "push") as threads:
        list(threads.map(one, runs))
    return errors


# ---- pull ----


def pull(
    peer: Peer,
    token: str,
    tls: ssl.SSLContext | None,
    image: ImageId,
    store: ImageStore,
    limits: TransferLimits = USUAL,
    transfer: Transfer | None = None,
) -> Held:
    """Copy an image from a peer."""
    call = _Call(peer, token, tls, limits, transfer or Transfer())
    with call.cancellable(), ExitStack() as undo:
        with call.request(Pull(image=image, blocks=())) as connection:
            outline = outline_of(image, connection)
        place = _room(store, outline)
        undo.callback(store.drop, place)
        incoming = call.transfer.incoming = Incoming(place)
        _fetch(call, outline, incoming)
        held = store.complete(place)
        undo.pop_all()
    return held


def outline_of(image: ImageId, connection: Connection) -> Outline:
    """Receive the outline of an image that a peer was asked for."""
    outline = unsealed(connection.expect(Sending).outline)
    if outline.id != image:
        raise Unusable(f"{connection.peer}: sent {outline.id} when asked for {image}")
    return outline


def _room(store: ImageStore, outline: Outline) -> IncomingImage:
    try:
        return store.place(outline)
    except OSError as error:
        raise StorageError(f"no memory for an image of {outline.size} bytes: {error}") from None


def _fetch(call: _Call, outline: Outline, incoming: Incoming) -> None:
    """Receive all blocks of an image over several connections."""

    def one(run: Sequence[int]) -> None:
        try:
            with call.request(Pull(image=outline.id, blocks=stretches(run))) as connection:
                if outline_of(outline.id, connection) != outline:
                    raise Unusable(f"{connection.peer}: the image changed while it was sent")
                incoming.receive(connection, run)
        except HoldfastError as error:
            incoming.fail(error)

    runs = shares(range(blocks_of(outline.size)), call.limits.streams)
    with ThreadPoolExecutor(len(runs), "pull") as threads:
        list(threads.map(one, runs))
    incoming.settle(call.limits.stall_s)
