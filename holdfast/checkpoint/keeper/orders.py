"""Receives orders, has each carried out by a thread of its own, and replies."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from holdfast.checkpoint.keeper.exchange import Exchange
from holdfast.checkpoint.keeper.files import CheckpointFiles, Opened
from holdfast.checkpoint.keeper.progress import StorageAction, StorageProgress
from holdfast.checkpoint.memory.image_home import remove_home
from holdfast.checkpoint.memory.images import Images, id_of
from holdfast.checkpoint.replicas.server import ReplicaServer
from holdfast.checkpoint.state.layout import Contents, digest
from holdfast.clock import machine_time
from holdfast.errors import HoldfastError
from holdfast.messages.checkpoints import ImageId, Sealed
from holdfast.messages.events import ImagesHeld, SnapshotMissed, SnapshotsSealed
from holdfast.messages.keeper import (
    BeginRound,
    FailWrites,
    FetchImage,
    KeeperEvent,
    KeeperOrder,
    KeeperReply,
    KeeperTerms,
    SealImage,
    ToKeeper,
    missed_by,
)
from holdfast.messages.local import PACKET_BYTES, Piece
from holdfast.messages.requests import ImageAt, LocateImage
from holdfast.wire.packets import Joiner, packets_of
from holdfast.wire.tls import TlsFiles, server_context

log = logging.getLogger("holdfast.keeper")

CHECK_EVERY_S = 1.0
CORES_PER_HASHING_THREAD = 16
"""One core of so many takes digests, at tens of gigabytes a second; the others train."""

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_contents_decoder = msgspec.msgpack.Decoder(Contents)


class _Numbered(Struct):
    """What can be read of an order whose action this keeper does not know."""

    number: int


class Keeper:
    def __init__(self, terms: KeeperTerms, control: socket.socket) -> None:
        self._terms = terms
        self._control = control
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._joiner = Joiner(None)  # An order may list every rank of a large world.
        self._tls = TlsFiles.of(terms.tls)
        self._images = Images(Path(terms.images), self._received)
        cores = len(os.sched_getaffinity(0))
        self._hashing = ThreadPoolExecutor(max(1, cores // CORES_PER_HASHING_THREAD), "digest")
        self._exchange = Exchange(self._images, terms.token, self._tls)
        self._progress = StorageProgress(self.send)
        job = hashlib.sha256(f"{terms.job} {terms.token}".encode()).hexdigest()
        number = int(job[:5], 16) if terms.token else 0
        self._files = CheckpointFiles(
            self._images, self._progress, self._hashing, terms.job, number
        )
        self._server: ReplicaServer | None = None
        self._handlers: dict[type, Callable[[Any], KeeperEvent | ImageAt | None]] = {
            SealImage: self._seal,
            BeginRound: self._begin_round,
            FetchImage: self._fetch,
            LocateImage: self._locate,
            FailWrites: self._files.fail_writes,
        }
        """For the actions that touch no storage."""

    # ---- orders in, replies out ----

    def run(self) -> None:
        """Serve until the other end is closed."""
        if self._terms.listener_fd is not None:
            listener = socket.socket(fileno=self._terms.listener_fd)
            tls = server_context(self._tls)
            self._server = ReplicaServer(listener, self._terms.token, self._images, tls)
            self._server.start()
        self._images.unpin_all()
        waiting = select.poll()
        waiting.register(self._control.fileno(), select.POLLIN)
        while True:
            if waiting.poll(CHECK_EVERY_S * 1000):
                try:
                    packet = self._control.recv(PACKET_BYTES)
                except ConnectionResetError:
                    return  # The other end was killed before it had read a reply.
                if not packet:
                    return
                self._take(packet)
            for reply in self._progress.give_up_stuck():
                self.send(reply)

    def _take(self, packet: bytes) -> None:
        order = self._joiner.message(packet, self._decoded)
        if order is None or isinstance(order, Piece):
            return
        storage = None
        if isinstance(order.action, StorageAction):
            storage = self._files.storage_of(order.action)
        self._progress.began(order)
        # Not a pool: its threads could all hang with their storage.
        threading.Thread(target=self._carry_out, args=(order, storage), daemon=True).start()

    def _decoded(self, packet: bytes) -> ToKeeper | None:
        """Decode an order; refuse one that cannot be read, if it has a number."""
        try:
            return _order_decoder.decode(packet)
        except msgspec.DecodeError as error:
            log.warning("an order cannot be read: %s", error)
        with suppress(msgspec.DecodeError):
            number = msgspec.msgpack.decode(packet, type=_Numbered).number
            self.send(KeeperReply(number, error="this keeper does not know such an order"))
        return None

    def _carry_out(self, order: KeeperOrder, storage: Future[Opened] | None) -> None:
        action, why = order.action, ""
        event: KeeperEvent | ImageAt | None = None
        try:
            if storage is not None and isinstance(action, StorageAction):
                event = self._files.carry_out(order.number, action, storage)
            else:
                event = self._handlers[type(action)](action)
        except (HoldfastError, OSError) as error:
            why = str(error)
        except Exception as error:
            # The edge of a thread: whatever it was, the order is answered and the log shows it.
            log.exception("order %r failed", order)
            why = f"{type(error).__name__}: {error}"
        if self._progress.ended(order):
            self.send(KeeperReply(order.number, event, why))

    def send(self, reply: KeeperReply) -> None:
        with self._sending:
            try:
                for packet in packets_of(reply):
                    self._control.send(packet)
            except OSError:
                self.end()  # The process that started this keeper is gone.

    def end(self) -> NoReturn:
        """Exit, because the other end is gone or was closed. A script's own images go with it."""
        with self._ending:
            if self._terms.own:
                remove_home(self._terms.images)
            os._exit(0)  # A thread may hang with its storage.

    def _received(self, image: ImageId) -> None:
        held = ImagesHeld(at=machine_time(), node=self._terms.node, images=(image,))
        self.send(KeeperReply(0, held))

    # ---- images ----

    def _seal(self, action: SealImage) -> SnapshotsSealed | SnapshotMissed:
        image = self._images.image(Path(action.path))
        # Nobody may overwrite it while it is read; a worker that already does is not stopped.
        with self._images.pinned(image, action.state) as held:
            sealed = held and image.seal(action.state, self._hashing) is not None
            record = image.record()
            if not sealed or record is None:
                return missed_by(action, "skipped", "a newer one took its place", machine_time())
            shared = _shared_digest(image.body, record.contents, record.world_size)
        self._images.drop_older(record.checkpointer, record.step, record.round)
        self._exchange.share(id_of(record))
        return SnapshotsSealed(
            at=machine_time(),
            node=action.node,
            snapshot=action.image.snapshot,
            world_size=action.image.world_size,
            ranks=(Sealed(action.image.rank, shared),),
            wish=action.wish,
            attempt=action.attempt,
        )

    def _begin_round(self, action: BeginRound) -> None:
        self._images.own_ranks = frozenset(action.ranks)
        self._exchange.to = action.copies

    def _fetch(self, action: FetchImage) -> None:
        self._exchange.fetch(action.image, action.holder)

    def _locate(self, action: LocateImage) -> ImageAt:
        path = self._exchange.path(action.image)
        return ImageAt(
            path="" if path is None else str(path), token=self._terms.token, tls=self._terms.tls
        )


def _shared_digest(body: memoryview, where: Any, world_size: int) -> bytes:
    """Return the digest of everything that should be equal on all ranks."""
    contents = _contents_decoder.decode(body[where.at : where.end])
    span = contents.shared
    if world_size == 1 or not span.size:
        return b""
    names = [(i.name, i.framed.at - span.at) for i in contents.items if i.kind == "shared"]
    return digest(digest(_encoder.encode(names)) + digest(body[span.at : span.end]))
