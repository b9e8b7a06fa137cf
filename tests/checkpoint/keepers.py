"""Keepers for tests: shelves in shared memory, servers on loopback, and a network in between."""

from __future__ import annotations

import gc
import mmap
import os
import random
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.memory.images import Held, IncomingImage, Outline
from holdfast.checkpoint.replicas import copies as replicas
from holdfast.checkpoint.replicas import copies as transfer
from holdfast.checkpoint.replicas import server as replicaserver
from holdfast.checkpoint.replicas.copies import Peer, TransferLimits
from holdfast.checkpoint.replicas.protocol import Connection
from holdfast.checkpoint.replicas.server import ReplicaServer
from holdfast.checkpoint.restore import sources as peersource
from holdfast.checkpoint.restore import verified_read as reading
from holdfast.checkpoint.state import layout
from holdfast.checkpoint.state import layout as digests
from holdfast.checkpoint.state.layout import BLOCK_BYTES, ByteSpan, block_digests
from holdfast.errors import StorageError
from holdfast.messages.checkpoints import ImageId, SnapshotId
from holdfast.messages.units import Rank, RoundNumber, StepNumber

TOKEN = "the job's token"
BODY_AT = 8192
QUICK = TransferLimits(stall_s=0.5)
SMALL = BLOCK_BYTES + 12345
"""Two blocks, one of them short: one connection."""
LARGE = 4 * BLOCK_BYTES + 54321
"""Five blocks: two connections, as these tests have it."""
NOISE = memoryview(random.Random(1).randbytes(BLOCK_BYTES) * 9)


def an_image(step: int = 7, rank: int = 3, checkpointer: str = "main") -> ImageId:
    return ImageId(SnapshotId(checkpointer, StepNumber(step), RoundNumber(2)), Rank(rank), 8)


def a_body(id: ImageId, size: int) -> bytearray:
    """Bytes of which no two blocks, and no two images, are alike."""
    made = bytearray(NOISE[:size])
    for at in range(0, size, BLOCK_BYTES):
        stamp = f"{id} {at}".encode()[: size - at]
        made[at : at + len(stamp)] = stamp
    return made


def body(held: Held) -> bytes:
    return os.pread(held.fd, held.size, held.body_at)


def small_blocks(patch: pytest.MonkeyPatch, size: int = 1 << 12) -> None:
    """Images of many blocks without many megabytes."""
    ours = (layout, digests, reading, peersource, replicas, replicaserver, transfer)
    for module in (*ours, sys.modules[__name__]):
        patch.setattr(module, "BLOCK_BYTES", size)


def until(condition: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.005)


# ---- nodes ----


class MappedImage(IncomingImage):
    fd: int
    mapping: Any

    @property
    def view(self) -> memoryview:
        with memoryview(self.mapping) as all_of_it:
            return all_of_it[BODY_AT:]


class MemoryStore:
    """Images in a folder in shared memory, and an account of what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trouble: StorageError | OSError | None = None
        self.images: dict[ImageId, Held] = {}
        self.placed = self.completed = self.dropped = self.lent = 0
        self._lock = threading.Lock()

    def find(self, id: ImageId) -> Held | None:
        with self._lock:
            self.lent += id in self.images
            return self.images.get(id)

    def release(self, held: Held) -> None:
        with self._lock:
            self.lent -= 1

    def place(self, outline: Outline) -> IncomingImage:
        if self.trouble is not None:
            raise self.trouble
        with self._lock:
            self.placed += 1
            path = self.folder / f"{outline.id.rank}.{self.placed}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        end = BODY_AT + outline.size
        try:
            os.posix_fallocate(fd, 0, end)
        except OSError:
            self.dropped += 1
            os.close(fd)
            raise
        mapping, o = mmap.mmap(fd, end), outline
        return MappedImage(o.id, o.size, o.digests, o.contents, fd, mapping)

    def complete(self, place: IncomingImage) -> Held:
        fd = self._unmapped(place)
        with self._lock:
            self.completed += 1
            self.lent += 1
            held = Held(place.id, fd, BODY_AT, place.size, place.digests, place.contents)
            self.images[place.id] = held
            return held

    def drop(self, place: IncomingImage) -> None:
        os.close(self._unmapped(place))
        with self._lock:
            self.dropped += 1

    def _unmapped(self, place: IncomingImage) -> int:
        """Fails if anything still points into the mapping."""
        assert isinstance(place, MappedImage)
        place.mapping.close()
        return place.fd

    def put(self, id: ImageId, size: int = SMALL) -> Held:
        """An image of a rank of this node."""
        bytes_of_it = memoryview(a_body(id, size))
        contents = ByteSpan(size - 100, 100)
        place = self.place(Outline(id, size, block_digests(bytes_of_it), contents))
        with place.view as view:
            view[:] = bytes_of_it
        held = self.complete(place)
        self.release(held)
        return held

    @property
    def quiet(self) -> bool:
        """Nothing is half done, and nothing was forgotten."""
        return self.lent == 0 and self.placed == self.completed + self.dropped


class Node:
    """A keeper: a store, and a server that others reach it by."""

    def __init__(self, folder: Path, tls: ssl.SSLContext | None = None, stall_s: float = 5.0):
        self.store = MemoryStore(folder)
        listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(*listener.getsockname())
        self.server = ReplicaServer(listener, TOKEN, self.store, tls, stall_s)
        self.server.start()

    def close(self) -> None:
        self.server.close()
        for held in self.store.images.values():
            os.close(held.fd)
        assert self.store.quiet


NewNode = Callable[..., Node]


def open_descriptors() -> set[tuple[str, str]]:
    """Each with what it stands for: of sockets there are no two alike."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the listing itself.
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@contextmanager
def keepers() -> Iterator[NewNode]:
    """Nodes, as many as are asked for; after them no thread, descriptor or memory is left."""
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    nodes: list[Node] = []

    def new(tls: ssl.SSLContext | None = None, stall_s: float = 5.0) -> Node:
        place = folder / str(len(nodes))
        place.mkdir()
        nodes.append(Node(place, tls, stall_s))
        return nodes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "LEAST_SHARE", 2)
        try:
            yield new
        finally:
            shutil.rmtree(folder)
            for node in nodes:
                node.close()
    until(lambda: set(threading.enumerate()) <= threads, "every thread ends")
    gc.collect()
    # What tests before this one left may be closed in the midst of it; nothing may be new.
    assert open_descriptors() <= descriptors


@contextmanager
def connected(peer: Peer) -> Iterator[Connection]:
    """A connection on which anything may be said."""
    connection = Connection(socket.create_connection((peer.host, peer.port)), "server", 2.0)
    try:
        yield connection
    finally:
        connection.close()


# ---- the network ----

Meddle = Callable[[int, bool, int, bytes], bytes]
"""(which connection, is it towards the server, bytes before, bytes) -> bytes to pass on"""


class Proxy:
    """A network in between, which may do anything to what passes."""

    def __init__(self, target: Peer, meddle: Meddle) -> None:
        self._target = target
        self._meddle = meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(*self._listener.getsockname())
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        for index in range(1000):
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                pump = threading.Thread(
                    target=self._pump, args=(index, source is client, source, sink)
                )
                self._threads.append(pump)
                pump.start()

    def _pump(self, index: int, up: bool, source: socket.socket, sink: socket.socket) -> None:
        before = 0
        with suppress(OSError):
            while data := source.recv(1 << 20):
                sink.sendall(self._meddle(index, up, before, data))
                before += len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for connected in self._sockets:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connected in (self._listener, *self._sockets):
            connected.close()


@contextmanager
def between(target: Peer, meddle: Meddle) -> Iterator[Peer]:
    proxy = Proxy(target, meddle)
    try:
        yield proxy.peer
    finally:
        proxy.close()


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :] if 0 <= at < len(data) else data
