"""Serves a keeper's images to peers, which push copies here and pull images from here.

One thread accepts connections, and each connection has a thread. A new connection has a few seconds and
a few kilobytes to authenticate with the job's token, or is closed without an answer. When too many are
unauthenticated, the oldest is closed, so that silent ones cannot keep a peer out.

A limited number of peers is served at once, as backpressure: a whole world that restores may ask one
node for its images. The others wait for their turn and get `Queued` now and then, by which a peer
that has left is noticed. The blocks of a push need no turn, as the push has one.

An image becomes visible only when all of it has been verified. Until then it is dropped if anything
goes wrong: the sender dies, its bytes change, memory is full.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Final

from holdfast.checkpoint.memory.images import Held, ImageStore, Outline
from holdfast.checkpoint.replicas.copies import Incoming
from holdfast.checkpoint.replicas.protocol import (
    PROTOCOL,
    STALL_S,
    Arrived,
    Connection,
    Go,
    Kept,
    Missing,
    More,
    PeerHello,
    Pull,
    Push,
    PushedBlocks,
    Queued,
    Request,
    Sending,
    blocks_in,
    declined,
    sealed,
    stretches,
    unsealed,
)
from holdfast.checkpoint.state.layout import BLOCK_BYTES
from holdfast.errors import HoldfastError, WireError, WrongProtocol, WrongToken
from holdfast.wire.framing import FrameDecoder

log = logging.getLogger("holdfast.keeper")

HELLO_LIMIT_S: Final = 5.0
HELLO_BYTES: Final = 1 << 12
"""Most bytes that an unauthenticated connection may make the server buffer."""
MOST_UNAUTHENTICATED: Final = 32
SERVED_AT_ONCE: Final = 256
MOST_WAITING: Final = 4096
_RETRY_S: Final = 0.1


class ReplicaServer:
    """Serves an image store on a listening socket, from `start` to `close`."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        store: ImageStore,
        tls: ssl.SSLContext | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._listener = listener
        self._token = token
        self._store = store
        self._tls = tls
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._unauthenticated: dict[Connection, None] = {}
        self._peers: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._incoming: dict[str, Incoming] = {}
        self._turns = threading.Semaphore(SERVED_AT_ONCE)
        self._waiting = 0
        self._closing = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="replicas", daemon=True)

    def start(self) -> None:
        self._listener.settimeout(None)
        self._acceptor.start()

    def close(self) -> None:
        """Cut all connections, and return when every thread has ended."""
        self._closing.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("the listener was closed already")
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = list(self._threads)
            for connection in (*self._unauthenticated, *self._peers):
                connection.cut()
            self._turns.release(self._waiting + 1)
        for thread in threads:
            thread.join()

    # ---- new connections ----

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("replicas: connections cannot be accepted for now: %s", error)
                    self._closing.wait(_RETRY_S)
                continue
            self._admit(Connection(connected, f"{address[0]}:{address[1]}", self._stall_s))

    def _admit(self, connection: Connection) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="replica", daemon=True
        )
        with self._lock:
            if len(self._unauthenticated) >= MOST_UNAUTHENTICATED:
                longest = next(iter(self._unauthenticated))
                del self._unauthenticated[longest]
                longest.cut()
            self._unauthenticated[connection] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # The machine has no more threads.
            log.warning("replicas: %s: connection closed: %s", connection.peer, error)
            self._forget(connection, thread)

    def _serve(self, connection: Connection) -> None:
        try:
            self._greet(connection)
            self._answer(connection)
        except HoldfastError as error:
            log.info("replicas: %s: %s", connection.peer, error)
        finally:
            self._forget(connection, threading.current_thread())

    def _forget(self, connection: Connection, thread: threading.Thread) -> None:
        connection.close()
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._peers.discard(connection)
            self._threads.discard(thread)

    def _greet(self, connection: Connection) -> None:
        deadline = monotonic() + HELLO_LIMIT_S
        connection.begin(self._tls, server_side=True, limit_s=HELLO_LIMIT_S)
        hello = connection.receive(FrameDecoder(PeerHello, HELLO_BYTES), deadline - monotonic())
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise WrongToken("its token is not this job's")
        if hello.protocol != PROTOCOL:
            raise WrongProtocol(f"it speaks version {hello.protocol}, not {PROTOCOL}")
        with self._lock:
            self._unauthenticated.pop(connection, None)
            self._peers.add(connection)

    # ---- peers ----

    def _answer(self, connection: Connection) -> None:
        requests = FrameDecoder[Request](Request)  # type: ignore[arg-type]
        request = connection.receive(requests, self._stall_s)
        if isinstance(request, PushedBlocks):
            self._take(connection, request)
            return
        self._await_turn(connection)
        try:
            if isinstance(request, Push):
                self._keep(connection, request)
            else:
                self._give(connection, request)
        finally:
            self._turns.release()

    def _await_turn(self, connection: Connection) -> None:
        if self._turns.acquire(blocking=False):
            return
        with self._lock:
            self._waiting += 1
            many = self._waiting
        try:
            if many > MOST_WAITING:
                connection.send(declined(WireError(f"{MOST_WAITING} others wait already")))
                raise WireError("too many peers wait already")
            connection.send(Queued())
            while not self._turns.acquire(timeout=self._stall_s / 2):
                connection.send(Queued())
        finally:
            with self._lock:
                self._waiting -= 1

    def _keep(self, connection: Connection, push: Push) -> None:
        try:
            self._place(connection, unsealed(push.outline))
        except (HoldfastError, OSError) as error:
            connection.send(declined(error))
        else:
            connection.send(Kept())

    def _place(self, connection: Connection, outline: Outline) -> None:
        """Receive an image and make it visible, or leave nothing of it."""
        place = self._store.place(outline)
        with ExitStack() as undo:
            undo.callback(self._store.drop, place)
            self._gather(connection, Incoming(place))
            held = self._store.complete(place)
            undo.pop_all()
        self._store.release(held)

    def _gather(self, connection: Connection, incoming: Incoming) -> None:
        """Receive the blocks of a push; return when all have arrived."""
        transfer = secrets.token_hex(8)
        with self._lock:
            self._incoming[transfer] = incoming
        try:
            connection.send(Go(transfer=transfer))
        except WireError as error:
            incoming.fail(error)
        try:
            incoming.settle(self._stall_s)
        finally:
            with self._lock:
                del self._incoming[transfer]

    def _take(self, connection: Connection, part: PushedBlocks) -> None:
        with self._lock:
            incoming = self._incoming.get(part.transfer)
        if incoming is None:
            raise WireError("blocks of a transfer that has ended")
        if incoming.receive(connection, blocks_in(part.blocks, incoming.place.size)):
            connection.send(Arrived())

    def _give(self, connection: Connection, pull: Pull) -> None:
        held = self._store.find(pull.image)
        if held is None:
            connection.send(Missing())
            return
        try:
            connection.send(Sending(outline=sealed(held.outline)))
            self._send(connection, held, blocks_in(pull.blocks, held.size))
            more = FrameDecoder(More)
            while True:  # Until the reader has enough and disconnects.
                blocks = connection.receive(more, self._stall_s).blocks
                self._send(connection, held, blocks_in(blocks, held.size))
        finally:
            self._store.release(held)

    def _send(self, connection: Connection, held: Held, blocks: Sequence[int]) -> None:
        for first, last in stretches(blocks):
            at, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, held.size)
            connection.send_part(held, at, end)
