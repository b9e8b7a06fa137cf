"""The keeper: one process a node that looks after its images.

It takes digests of images when they are whole, copies them to other nodes, writes them to storage,
and fetches them back. It never imports torch, runs at the lowest priority, and decides nothing: orders
come one by one over a socket, each is carried out by a thread of its own and answered when it is done.

It may die at any moment. What it knew is in the images and on storage; orders that it had not answered
are given to the next one, and doing one twice does no harm.

Storage may hang, for ever and uninterruptibly. The thread that hangs with it is given up, and the
order is answered with an error; everything else goes on.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from holdfast import kernel
from holdfast.checkpoint import plain, replicas, retention
from holdfast.checkpoint.commit import AlreadyCommitted, commit
from holdfast.checkpoint.digests import block_digests, digest
from holdfast.checkpoint.image import Image, Record
from holdfast.checkpoint.images import Images, id_of, key_of
from holdfast.checkpoint.layout import Contents
from holdfast.checkpoint.manifest import steps
from holdfast.checkpoint.names import rank_file, step_directory
from holdfast.checkpoint.persist import extents_of, write_file
from holdfast.checkpoint.rankfile import FileRecord
from holdfast.checkpoint.replicas import Peer
from holdfast.checkpoint.replicaserver import ReplicaServer
from holdfast.checkpoint.shortage import Shortage
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.errors import HoldfastError, Refused, StepTaken
from holdfast.messages.checkpoints import Holder, ImageId, Sealed, Shard, StoredStep
from holdfast.messages.keeping import (
    AnyOrder,
    AnyReply,
    Begin,
    BeginRound,
    Commit,
    Count,
    Counted,
    Done,
    FailWrites,
    Fetch,
    Got,
    ImageSealed,
    Look,
    Open,
    Received,
    Seal,
    ShardsDone,
    Stored,
    ToKeeper,
    Write,
    Wrote,
)
from holdfast.messages.local import PACKET_BYTES, Piece
from holdfast.messages.units import Rank, RoundNumber, StepNumber
from holdfast.packets import Joiner, packets_of
from holdfast.tls import TlsFiles, client_context, server_context

log = logging.getLogger("holdfast.keeper")

STALLED_S = 120.0
"""Storage that takes no byte for so long, or for so many times its longest pause so far, hangs."""
STALLED_TIMES = 10.0
LOOK_EVERY_S = 1.0
TELL_EVERY_S = 0.5
REFUSALS_TOLD = 8
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_BEST_EFFORT_LAST = (2 << 13) | 7

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_contents_decoder = msgspec.msgpack.Decoder(Contents)


class _Checkpointer(Struct, frozen=True):
    storage: Storage | None
    keep: Any


class _Numbered(Struct):
    """All that can be read of an order that this keeper does not know."""

    number: int


class Keeper:
    def __init__(self, begin: Begin, control: socket.socket) -> None:
        self._begin = begin
        files = None
        if begin.tls is not None:
            files = TlsFiles(cert=begin.tls[0], key=begin.tls[1], ca=begin.tls[2])
        self._tls = files
        own = hashlib.sha256(f"{begin.job} {begin.token}".encode()).hexdigest()
        self._job_number = int(own[:5], 16) if begin.token else 0
        """Tells this job's files from those of others at the same place."""
        self._control = control
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._joiner = Joiner()
        self._images = Images(Path(begin.images), self._received)
        self._hashing = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2), "digest")
        self._checkpointers: dict[str, Future[_Checkpointer]] = {}
        self._opening: dict[int, Future[_Checkpointer]] = {}
        """By the number of the order. What is ordered after it waits for it."""
        self._sharing = _Sharing(self)
        self._progress = _Progress(self)
        self._shortage = Shortage()
        self._server: ReplicaServer | None = None

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
            self._progress.look()

    def _take(self, packet: bytes) -> None:
        order = self._understood(packet)
        if isinstance(order, Piece):
            whole = self._joiner.add(order)
            order = self._understood(whole) if whole is not None else None
        if order is None or isinstance(order, Piece):
            return
        if isinstance(order, Open):
            opening: Future[_Checkpointer] = Future()
            self._checkpointers[order.checkpointer] = self._opening[order.number] = opening
        self._progress.began(order)
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
        handler: Callable[[Any], AnyReply] = _HANDLERS[type(order)].__get__(self)
        try:
            reply = handler(order)
        except (HoldfastError, OSError) as error:
            reply = _failed(order, str(error))
        except Exception as error:
            # The edge of a thread: whatever it was, the order is answered, and somebody sees it.
            log.exception("order %r failed", order)
            reply = _failed(order, f"{type(error).__name__}: {error}")
        if self._progress.ended(order):
            self.send(reply)

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
                return ImageSealed(number=order.number, error="a newer one took its place")
            shared = self._shared(image.body, record.contents, record.world_size)
        id = id_of(record)
        self._images.drop_older(record.checkpointer, record.step, record.round)
        self._sharing.want(id)
        return ImageSealed(number=order.number, image=id, sealed=Sealed(Rank(record.rank), shared))

    def _shared(self, body: memoryview, where: Any, world_size: int) -> bytes:
        """The digest of all that every rank should have alike."""
        contents = _contents_decoder.decode(body[where.at : where.end])
        span = contents.shared
        if world_size == 1 or not span.size:
            return b""
        names = [(i.name, i.framed.at - span.at) for i in contents.items if i.kind == "shared"]
        return digest(digest(_encoder.encode(names)) + digest(body[span.at : span.end]))

    def _count(self, order: Count) -> Counted:
        return Counted(number=order.number, images=tuple(self._images.ids()))

    def _begin_round(self, order: BeginRound) -> Done:
        self._images.own_ranks = frozenset(order.ranks)
        self._sharing.to = order.copies
        return Done(number=order.number)

    def push(self, id: ImageId, holder: Holder) -> None:
        """Copy an image to another node; a newer image may have taken its place."""
        held = self._images.find(key_of(id))
        if held is None:
            return
        try:
            tls = client_context(self._tls)
            replicas.push(Peer(holder.address, holder.port), self._begin.token, tls, held)
        finally:
            self._images.release(held)

    def _fetch(self, order: Fetch) -> Got:
        key = key_of(order.image)
        found = self._images.sealed(key)
        if found is not None:
            return Got(number=order.number, path=str(found[0].path))
        peer = Peer(order.holder.address, order.holder.port)
        blocks = None
        if order.blocks is not None:
            blocks = [block for first, end in order.blocks for block in range(first, end)]
        tls = client_context(self._tls)
        held = replicas.pull(peer, self._begin.token, tls, key, self._images, blocks)
        try:
            return Got(number=order.number, path=os.readlink(f"/proc/self/fd/{held.fd}"))
        finally:
            self._images.release(held)

    # ---- storage ----

    def _open(self, order: Open) -> Done:
        opening = self._opening.pop(order.number)
        try:
            storage = open_storage(order.directory) if order.directory else None
            keep = msgspec.json.decode(order.keep, type=retention.Policy) if order.keep else None
        except Exception as error:
            opening.set_exception(error)
            raise
        opening.set_result(_Checkpointer(storage, keep))
        return Done(number=order.number)

    def _opened(self, checkpointer: str) -> _Checkpointer:
        opening = self._checkpointers.get(checkpointer)
        if opening is None:
            raise Refused(f"checkpointer {checkpointer} was never opened here")
        return opening.result()

    def _storage(self, checkpointer: str) -> tuple[Storage, Any]:
        known = self._opened(checkpointer)
        if known.storage is None:
            raise Refused(f"checkpointer {checkpointer} has no storage")
        return known.storage, known.keep

    def _write(self, order: Write) -> ShardsDone:
        if order.at:
            storage, directory = plain.opened(order.at)
        else:
            storage, _ = self._storage(order.snapshot.checkpointer)
            directory = step_directory(order.snapshot.step)
        shards = []
        try:
            with ExitStack() as until:
                # All of them are kept from the start: while one is written, the next must stay.
                images = [self._pinned(order, rank, until) for rank in order.ranks]
                for rank, held in zip(order.ranks, images, strict=True):
                    shards.append(self._write_rank(storage, directory, order, rank, held))
        except (_Gone, StepTaken) as error:
            return ShardsDone(number=order.number, error=str(error), gone=True)
        return ShardsDone(number=order.number, shards=tuple(shards))

    def _pinned(
        self, order: Write, rank: int, until: ExitStack
    ) -> tuple[Image, Record, int, bytes]:
        """A rank's image of the snapshot, which stays as it is until then."""
        found = self._images.sealed(key_of(ImageId(order.snapshot, Rank(rank), order.world_size)))
        if found is not None:
            image, record, state, digests = found
            if until.enter_context(self._images.pinned(image, state)):
                return image, record, state, digests
        raise _Gone(f"the image of rank {rank} made place for a newer one before")

    def _write_rank(
        self,
        storage: Storage,
        directory: str,
        order: Write,
        rank: int,
        held: tuple[Image, Record, int, bytes],
    ) -> Shard:
        image, record, state, digests = held
        snapshot = order.snapshot
        contents = _contents_decoder.decode(image.body[record.contents.at : record.contents.end])
        extents = extents_of(contents, rank, order.world_size, "slice" if order.alike else "all")
        self._shortage.strike(storage.where(directory))
        written = write_file(
            storage,
            directory,
            rank_file(rank, snapshot.round, 0 if order.at else self._job_number),
            image.body,
            extents,
            record.contents,
            snapshot.step,
            snapshot.round,
            rank,
            order.world_size,
            self._progress.of(order, len(order.ranks) * sum(e.size for e in extents)),
            once=not order.at,
        )
        if image.settled != state:
            raise _Gone(f"the image of rank {rank} was changed while it was written")
        # What is written has digests of its own. It must be what was sealed, and still be it now.
        if block_digests(image.body[: record.size], self._hashing) != digests:
            raise Refused(f"{image.path}: the image of rank {rank} changed after its seal")
        return Shard(Rank(rank), written.name, written.size, written.trailer, written.contents)

    def _fail_writes(self, order: FailWrites) -> Done:
        self._shortage.begin(order.files)
        return Done(number=order.number)

    def _commit(self, order: Commit) -> Done:
        snapshot = order.snapshot
        files = [FileRecord(s.rank, s.name, s.size, s.trailer, s.contents) for s in order.shards]
        if order.at:
            whose = (snapshot.step, snapshot.round, order.world_size)
            plain.replace(order.at, whose, files, job=self._begin.job)
            return Done(number=order.number)
        storage, keep = self._storage(snapshot.checkpointer)
        done = commit(
            storage,
            snapshot.step,
            snapshot.round,
            order.world_size,
            files,
            job=self._begin.job,
        )
        if isinstance(done, AlreadyCommitted):
            error = f"step {snapshot.step} was committed in round {done.manifest.round} before"
            return Done(number=order.number, error=error)
        if keep is not None:
            try:
                delete = retention.plan(keep, steps(storage), verified=snapshot.step)
                retention.prune(storage, delete, verified=snapshot.step)
            except HoldfastError as error:
                log.warning("old checkpoints stay for now: %s", error)
        return Done(number=order.number)

    def _look(self, order: Look) -> Stored:
        known = self._opened(order.checkpointer)
        if known.storage is None:
            return Stored(number=order.number)
        listed = steps(known.storage)
        found = tuple(
            StoredStep(
                StepNumber(one.step), RoundNumber(one.manifest.round), one.manifest.world_size
            )
            for one in listed
            if one.state == "complete" and one.manifest is not None
        )
        # What was refused before does not count; but to find nothing else is not a fresh start.
        refused = [f"step {one.step}: {one.why}" for one in listed if one.state == "refused"]
        error = "" if found else "; ".join(refused[:REFUSALS_TOLD])
        return Stored(number=order.number, steps=found, error=error)


class _Gone(Exception):
    """An image was overwritten before it could be written."""


def _failed(order: AnyOrder, error: str) -> AnyReply:
    return _REPLIES[type(order)](number=order.number, error=error)


_HANDLERS: dict[type, Any] = {
    Open: Keeper._open,
    Seal: Keeper._seal,
    BeginRound: Keeper._begin_round,
    Write: Keeper._write,
    Commit: Keeper._commit,
    Look: Keeper._look,
    Fetch: Keeper._fetch,
    Count: Keeper._count,
    FailWrites: Keeper._fail_writes,
}
_REPLIES: dict[type, Callable[..., AnyReply]] = {
    Open: Done,
    Seal: ImageSealed,
    BeginRound: Done,
    Write: ShardsDone,
    Commit: Done,
    Look: Stored,
    Fetch: Got,
    Count: Counted,
    FailWrites: Done,
}


class _Sharing:
    """Copies each rank's newest image to the peers, one after the other."""

    def __init__(self, keeper: Keeper) -> None:
        self.to: tuple[Holder, ...] = ()
        self._keeper = keeper
        self._changed = threading.Condition()
        self._wanted: dict[tuple[str, int], ImageId] = {}
        threading.Thread(target=self._run, name="sharing", daemon=True).start()

    def want(self, id: ImageId) -> None:
        with self._changed:
            self._wanted[id.snapshot.checkpointer, id.rank] = id
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted:
                    self._changed.wait()
                id = self._wanted.pop(next(iter(self._wanted)))
            for holder in self.to:
                try:
                    self._keeper.push(id, holder)
                except (HoldfastError, OSError) as error:
                    log.warning("no copy of rank %d on %s: %s", id.rank, holder.node, error)


_TOUCHES_STORAGE = Open | Write | Commit | Look


class _Progress:
    """How far each order has come that storage can hold up, and whether it still moves."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._lock = threading.Lock()
        self._orders: dict[int, AnyOrder] = {}
        self._moved_at: dict[int, float] = {}
        self._longest_s = 0.0
        self._done: dict[int, int] = {}
        self._told_at = 0.0

    def began(self, order: AnyOrder) -> None:
        if isinstance(order, _TOUCHES_STORAGE):
            with self._lock:
                self._orders[order.number] = order
                self._moved_at[order.number] = time.monotonic()

    def of(self, order: Write, of_bytes: int) -> Callable[[int], None]:
        """To be called with each number of bytes that were written."""

        def went_on(size: int) -> None:
            now = time.monotonic()
            with self._lock:
                last = self._moved_at.get(order.number)
                if last is None:
                    raise Refused("it was given up")
                self._longest_s = max(self._longest_s, now - last)
                self._moved_at[order.number] = now
                done = self._done[order.number] = self._done.get(order.number, 0) + size
                tell = now - self._told_at >= TELL_EVERY_S
                if tell:
                    self._told_at = now
            if tell:
                step = order.snapshot.step
                self._keeper.send(Wrote(step=step, done_bytes=done, of_bytes=of_bytes))

        return went_on

    def ended(self, order: AnyOrder) -> bool:
        """Whether anybody still waits for its answer."""
        if not isinstance(order, _TOUCHES_STORAGE):
            return True
        with self._lock:
            self._orders.pop(order.number, None)
            self._done.pop(order.number, None)
            return self._moved_at.pop(order.number, None) is not None

    def look(self) -> None:
        """Give up what has not moved for far too long."""
        limit_s = max(STALLED_S, STALLED_TIMES * self._longest_s)
        now = time.monotonic()
        with self._lock:
            numbers = [n for n, at in self._moved_at.items() if now - at > limit_s]
            stuck = [self._orders.pop(number) for number in numbers]
            for number in numbers:
                del self._moved_at[number]
        for order in stuck:
            self._keeper.send(_failed(order, f"storage hangs: nothing moved for {limit_s:.0f} s"))


def run_keeper(control: socket.socket) -> None:
    """Be a keeper until the other end of the socket is closed."""
    kernel.name_process("holdfast-keeper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _yield_to_training()
    begin = msgspec.msgpack.decode(control.recv(PACKET_BYTES), type=Begin)
    keeper = Keeper(begin, control)
    keeper.run()
    keeper.end()


def _remove_abandoned(images: str) -> None:
    """Wait until the script is dead; until then it has a lock on them."""
    with suppress(OSError):
        home = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(home, fcntl.LOCK_EX)
        shutil.rmtree(images, ignore_errors=True)


def _yield_to_training() -> None:
    """Take what time and disk the ranks leave."""
    os.nice(10)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _BEST_EFFORT_LAST)


def main() -> None:
    logging.basicConfig(format="[holdfast keeper] %(message)s", level=logging.WARNING)
    run_keeper(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
