"""Copies of rank images in the memory of other nodes: pushed there, pulled back when a node is lost.

This is the side that asks; `replicaserver` is the one that answers, `replicamessages` says what is
said, and `transfer` how an image travels. A restore does not need a copy of its own: `peersource`
reads an image where it is.

The worker may write over an image while it is being sent. Nobody locks it for that: the receiver
finds that a block does not have its digest and refuses the copy, so an image is either as it was when
its digests were taken or it is not there at all. A copy never blocks a save.

What can go wrong, and who can do something about it:

    WireError       the peer cannot be reached, left, or nothing moved for a while: try another peer
    Cancelled       (a WireError) this side gave it up
    Refused         the image changed while it was sent: send the newer one
    StorageError    no room for it, there or here
    NotThere        (a StorageError) the peer does not have it: try another peer
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final

from msgspec import Struct

from holdfast.checkpoint.memory.image_store import Held, Outline, Place, Shelf
from holdfast.checkpoint.replicas.connection import STALL_S, Connection
from holdfast.checkpoint.replicas.messages import (
    Arrived,
    Go,
    Kept,
    Part,
    Pull,
    Push,
    Request,
    Sending,
    sealed,
    stretches,
    unsealed,
)
from holdfast.checkpoint.replicas.transfer import Incoming, Transfer, shares
from holdfast.checkpoint.state.layout import BLOCK_BYTES, blocks_of
from holdfast.errors import Cancelled, HoldfastError, Refused, StorageError, WireError
from holdfast.messages.checkpoints import ImageId

_SLOWEST_ALLOCATION: Final = 200e6
"""Bytes a second at which a peer makes room, at worst."""
_LAST_WORD_S: Final = 2.0


class Peer(Struct, frozen=True):
    """Where another node's keeper listens."""

    host: str
    port: int


class Limits(Struct, frozen=True, kw_only=True):
    """What a transfer may use, and how long it waits."""

    stall_s: float = STALL_S
    """A peer with which nothing moves for so long is given up."""
    streams: int = 4
    """Connections for a large image."""


USUAL: Final = Limits()


class _Call(Struct, frozen=True):
    """Everything that is needed to ask a peer for something."""

    peer: Peer
    token: str
    tls: ssl.SSLContext | None
    limits: Limits
    transfer: Transfer

    @contextmanager
    def request(self, request: Request) -> Iterator[Connection]:
        """A connection on which that was asked, and nothing answered yet."""
        connection = Connection.dial(self.peer.host, self.peer.port, self.limits.stall_s)
        try:
            with self.transfer.carried_by(connection):
                connection.greet(self.tls, self.token)
                connection.send(request)
                yield connection
        finally:
            connection.close()

    @contextmanager
    def told(self) -> Iterator[None]:
        """What breaks because of a cancellation is a cancellation."""
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
    limits: Limits = USUAL,
    transfer: Transfer | None = None,
) -> None:
    """Copy an image to a peer. When this returns, the peer has all of it, verified."""
    call = _Call(peer, token, tls, limits, transfer or Transfer())
    with call.told(), call.request(Push(outline=sealed(held.outline))) as control:
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
    part = Part(transfer=transfer, blocks=stretches(run))
    with call.request(part) as connection, data.carried_by(connection):
        connection.send_part(held, at, end)
        connection.expect(Arrived)


def _each(
    runs: Sequence[Sequence[int]], data: Transfer, send: Callable[[Sequence[int]], None]
) -> list[HoldfastError]:
    """Send all runs at the same time; the errors, the one that stopped the others first."""
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
    shelf: Shelf,
    limits: Limits = USUAL,
    transfer: Transfer | None = None,
) -> Held:
    """Fetch an image from a peer."""
    call = _Call(peer, token, tls, limits, transfer or Transfer())
    with call.told(), ExitStack() as undo:
        with call.request(Pull(image=image, blocks=())) as connection:
            outline = outline_of(image, connection)
        place = _room(shelf, outline)
        undo.callback(shelf.drop, place)
        incoming = call.transfer.incoming = Incoming(place)
        _fetch(call, outline, incoming)
        held = shelf.complete(place)
        undo.pop_all()
    return held


def outline_of(image: ImageId, connection: Connection) -> Outline:
    """What a peer says of an image that it was asked for."""
    outline = unsealed(connection.expect(Sending).outline)
    if outline.id != image:
        raise Refused(f"{connection.peer}: sent {outline.id} when asked for {image}")
    return outline


def _room(shelf: Shelf, outline: Outline) -> Place:
    try:
        return shelf.place(outline)
    except OSError as error:
        raise StorageError(f"no room for an image of {outline.size} bytes: {error}") from None


def _fetch(call: _Call, outline: Outline, incoming: Incoming) -> None:
    """Have everything that is wanted of an image come in."""

    def one(run: Sequence[int]) -> None:
        try:
            with call.request(Pull(image=outline.id, blocks=stretches(run))) as connection:
                if outline_of(outline.id, connection) != outline:
                    raise Refused(f"{connection.peer}: the image changed while it was sent")
                incoming.receive(connection, run)
        except HoldfastError as error:
            incoming.fail(error)

    runs = shares(range(blocks_of(outline.size)), call.limits.streams)
    with ThreadPoolExecutor(len(runs), "pull") as threads:
        list(threads.map(one, runs))
    incoming.settle(call.limits.stall_s)
