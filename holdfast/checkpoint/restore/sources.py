"""Opens the sources of a state: images in this node's or another's memory, files on storage.

Of what the ranks that saved a state wrote, a rank reads what it needs: its own part alone if that holds
everything, cut as it is here, else others' too. So files and images are opened when first used. An
image that several nodes have is read from the nearest, and block by block from the others where that
fails.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Outline, id_of
from holdfast.checkpoint.replicas.copies import Peer, outline_of
from holdfast.checkpoint.replicas.protocol import STALL_S, Connection, More, Pull
from holdfast.checkpoint.restore.stored import OpenedLazily, StoredState, open_stored
from holdfast.checkpoint.restore.verified_read import Alternatives, FileSource, Source
from holdfast.checkpoint.state.layout import BLOCK_BYTES, Extent, FileRecord
from holdfast.checkpoint.storage.backends import Readable, Storage, step_directory
from holdfast.checkpoint.storage.manifest import load_manifest, refuse
from holdfast.checkpoint.storage.rank_file import open_listed
from holdfast.errors import CheckpointError, HoldfastError, Unusable
from holdfast.messages.checkpoints import ImageId


def open_image(path: Path, wanted: ImageId, until: ExitStack) -> StoredState:
    """Open a rank's image on this node, if it is sealed and the right one."""
    image = Image.open(path)
    try:
        record, digests = image.record(), image.digests()
        if record is None or digests is None:
            raise Unusable(f"{path} is not sealed, or its seal is damaged")
        if id_of(record) != wanted:
            raise Unusable(f"{path} is of rank {record.rank}, step {record.step}")
        source = FileSource.of_image(path, image.body_at, record.size, digests)
        until.callback(source.close)
        return open_stored(source, record.contents, (Extent(0, 0, record.size),))
    finally:
        image.close()


def open_peers(
    peer: Peer, token: str, tls: ssl.SSLContext | None, image: ImageId, until: ExitStack
) -> StoredState:
    """Open a rank's image on another node."""
    source = PeerSource(peer, token, tls, image)
    until.callback(source.close)
    outline = source.outline
    return open_stored(source, outline.contents, (Extent(0, 0, outline.size),))


def open_any(openers: Sequence[Callable[[], StoredState]]) -> StoredState:
    """Open an image in the first place that has it; the others stay at hand, for blocks that it does
    not have whole."""
    errors: list[HoldfastError | OSError] = []
    for number, opener in enumerate(openers, start=1):
        try:
            found = opener()
        except (HoldfastError, OSError) as error:
            errors.append(error)
            continue
        others = [_source_of(other) for other in openers[number:]]
        found.source = Alternatives(found.source, others)
        return found
    raise errors[0]


def _source_of(opener: Callable[[], StoredState]) -> Callable[[], Source]:
    return lambda: opener().source


def open_files(storage: Readable, step: int, until: ExitStack) -> Sequence[StoredState]:
    """Return the rank files of a checkpoint, in the order of ranks; each is opened when first used."""
    manifest = load_manifest(storage, step)
    records = {record.rank: record for record in manifest.files}

    def open_one(rank: int, until: ExitStack) -> StoredState:
        return _open_file(storage, step, records[rank], until)

    return OpenedLazily(manifest.world_size, open_one, until)


def _open_file(storage: Readable, step: int, record: FileRecord, until: ExitStack) -> StoredState:
    file = until.enter_context(open_listed(storage, step_directory(step), record))
    return StoredState(file, file.contents(record.contents), file.trailer.extents)


def set_aside(storage: Storage, step: int) -> None:
    """Mark a checkpoint that does not verify, so that it is not tried again."""
    with suppress(CheckpointError):
        refuse(storage, step)


# ---- another node's memory -----------------------------------------------------------------------


class PeerSource:
    """An image in another node's memory, as a `verified_read.Source`.

    Bytes go from the peer's memory straight into the tensors: a copy of the image here would cost fresh
    memory, which takes longer to allocate than the network needs to fill it. Each reading thread has a
    connection of its own and requests a block when it comes to it.
    """

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
        # The other end closes connections that were idle for too long.
        silent_s = monotonic() - getattr(self._own, "used_at", 0.0)
        if silent_s > self._stall_s / 2 and self._connect() != self.outline:
            raise Unusable(f"{self.name}: it changed while it was read")
        self._own.connection.send(More(blocks=((block, block + 1),)))

    def _connect(self) -> Outline:
        """Open this thread's connection, and return the image's outline."""
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
