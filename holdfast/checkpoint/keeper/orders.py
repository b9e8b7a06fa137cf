"""Hears orders, has each carried out by a thread of its own, and answers it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import select
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from holdfast.checkpoint.keeper.exchange import Exchange
from holdfast.checkpoint.keeper.files import Filing
from holdfast.checkpoint.keeper.progress import Movement
from holdfast.checkpoint.memory.images import Images, id_of
from holdfast.checkpoint.replicas.server import ReplicaServer
from holdfast.checkpoint.state.layout import Contents, digest
from holdfast.errors import HoldfastError
from holdfast.messages.checkpoints import ImageId, Sealed
from holdfast.messages.keeper import (
    AnyOrder,
    AnyReply,
    Begin,
    BeginRound,
    Commit,
    Done,
    FailWrites,
    Fetch,
    ImageSealed,
    Look,
    Open,
    Received,
    Seal,
    ShardsDone,
    Stored,
    ToKeeper,
    Where,
    WhereFound,
    Write,
)
from holdfast.messages.local import PACKET_BYTES, Piece
from holdfast.messages.units import Rank
from holdfast.wire.packets import Joiner, packets_of
from holdfast.wire.tls import TlsFiles, server_context

log = logging.getLogger("holdfast.keeper")

LOOK_EVERY_S = 1.0
CORES_TO_HASH = 16
"""One of so many takes digests: it does tens of gigabytes a second, and the others train."""

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_contents_decoder = msgspec.msgpack.Decoder(Contents)

Handler = Callable[[Any], AnyReply]


class _Numbered(Struct):
    """All that can be read of an order that this keeper does not know."""

    number: int


class Keeper:
    def __init__(self, begin: Begin, control: socket.socket) -> None:
        self._begin = begin
        self._control = control
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._joiner = Joiner(None)  # An order may list every rank of a large world.
        self._tls = TlsFiles.of(begin.tls)
        self._images = Images(Path(begin.images), self._received)
        cores = len(os.sched_getaffinity(0))
        self._hashing = ThreadPoolExecutor(max(1, cores // CORES_TO_HASH), "digest")
        self._exchange = Exchange(self._images, begin.token, self._tls)
        self._movement = Movement(self.send)
        own = hashlib.sha256(f"{begin.job} {begin.token}".encode()).hexdigest()
        number = int(own[:5], 16) if begin.token else 0
        self._filing = Filing(self._images, self._movement, self._hashing, begin.job, number)
        self._server: ReplicaServer | None = None
        self._handlers: dict[type, tuple[Handler, Callable[..., AnyReply]]] = {
            Open: (self._filing.open, Done),
            Seal: (self._seal, ImageSealed),
            BeginRound: (self._begin_round, Done),
            Write: (self._filing.write, ShardsDone),
            Commit: (self._filing.commit, Done),
            Look: (self._filing.look, Stored),
            Fetch: (self._fetch, Done),
            Where: (self._where, WhereFound),
            FailWrites: (self._filing.fail_writes, Done),
        }
        """Who carries out an order, and what answers it."""

    # ---- orders in, answers out ----

    def run(self) -> None:
        """Serve until the other end is closed."""
        if self._begin.listener_fd is not None:
            listener = socket.socket(fileno=self._begin.listener_fd)
            tls = server_context(self._tls)
            self._server = ReplicaServer(listener, self._begin.token, self._images, tls)
            self._server.start()
        self._images.let_all_go()
        waiting = select.poll()
        waiting.register(self._control.fileno(), select.POLLIN)
        while True:
            if waiting.poll(LOOK_EVERY_S * 1000):
                try:
                    packet = self._control.recv(PACKET_BYTES)
                except ConnectionResetError:
                    return  # The other end was killed before it had read an answer.
                if not packet:
                    return
                self._take(packet)
            for order, why in self._movement.stuck():
                self.send(self._failed(order, why))

    def _take(self, packet: bytes) -> None:
        order = self._joiner.message(packet, self._understood)
        if order is None or isinstance(order, Piece):
            return
        if isinstance(order, Open):
            self._filing.announce(order)
        self._movement.began(order)
        # Not a pool: one that is full of threads that hang with their storage does nothing more.
        threading.Thread(target=self._carry_out, args=(order,), daemon=True).start()

    def _understood(self, packet: bytes) -> ToKeeper | None:
        """An order, or None; whoever sent what this is not is told so, if it has a number."""
        try:
            return _order_decoder.decode(packet)
        except msgspec.DecodeError as error:
            log.warning("an order that cannot be read: %s", error)
        try:
            number = msgspec.msgpack.decode(packet, type=_Numbered).number
        except msgspec.DecodeError:
            return None
        self.send(Done(number=number, error="this keeper does not know such an order"))
        return None

    def _carry_out(self, order: AnyOrder) -> None:
        handler, _ = self._handlers[type(order)]
        try:
            reply = handler(order)
        except (HoldfastError, OSError) as error:
            reply = self._failed(order, str(error))
        except Exception as error:
            # The edge of a thread: whatever it was, the order is answered, and somebody sees it.
            log.exception("order %r failed", order)
            reply = self._failed(order, f"{type(error).__name__}: {error}")
        if self._movement.ended(order):
            self.send(reply)

    def _failed(self, order: AnyOrder, error: str) -> AnyReply:
        _, reply = self._handlers[type(order)]
        return reply(number=order.number, error=error)

    def send(self, message: Struct) -> None:
        with self._sending:
            try:
                for packet in packets_of(message):
                    self._control.send(packet)
            except OSError:
                self.end()  # Whoever started us is gone.

    def end(self) -> NoReturn:
        """Whoever started us is gone, or closes us. What was a script's own goes with it."""
        with self._ending:
            if self._begin.own:
                _remove_abandoned(self._begin.images)
            os._exit(0)  # A thread may hang with its storage.

    def _received(self, image: ImageId) -> None:
        self.send(Received(image=image))

    # ---- images ----

    def _seal(self, order: Seal) -> ImageSealed:
        image = self._images.image(Path(order.path))
        # Nobody shall overwrite it while it is read; a worker that already does is not stopped.
        with self._images.pinned(image, order.state) as held:
            sealed = held and image.seal(order.state, self._hashing) is not None
            record = image.record()
            if not sealed or record is None:
                return ImageSealed(number=order.number)
            shared = _shared(image.body, record.contents, record.world_size)
        id = id_of(record)
        self._images.drop_older(record.checkpointer, record.step, record.round)
        self._exchange.share(id)
        return ImageSealed(number=order.number, image=id, sealed=Sealed(Rank(record.rank), shared))

    def _begin_round(self, order: BeginRound) -> Done:
        self._images.own_ranks = frozenset(order.ranks)
        self._exchange.to = order.copies
        return Done(number=order.number)

    def _fetch(self, order: Fetch) -> Done:
        self._exchange.fetch(order.image, order.holder)
        return Done(number=order.number)

    def _where(self, order: Where) -> WhereFound:
        path = self._exchange.path(order.image)
        return WhereFound(number=order.number, path=str(path) if path is not None else "")


def _shared(body: memoryview, where: Any, world_size: int) -> bytes:
    """The digest of all that every rank should have alike."""
    contents = _contents_decoder.decode(body[where.at : where.end])
    span = contents.shared
    if world_size == 1 or not span.size:
        return b""
    names = [(i.name, i.framed.at - span.at) for i in contents.items if i.kind == "shared"]
    return digest(digest(_encoder.encode(names)) + digest(body[span.at : span.end]))


def _remove_abandoned(images: str) -> None:
    """Wait until the script is dead; until then it has a lock on them."""
    with suppress(OSError):
        home = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(home, fcntl.LOCK_EX)
        shutil.rmtree(images, ignore_errors=True)
