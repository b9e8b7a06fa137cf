"""Where a state can be read from: images in memory, files on storage.

Of what the ranks of the world that saved it wrote, a rank reads what it needs: its own part alone, if
that has everything and is cut as it is here, else the others' too. So files and images are opened only
when somebody looks into them.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import overload

from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import id_of
from holdfast.checkpoint.replicas.copies import Peer
from holdfast.checkpoint.restore.load import Stored, open_stored
from holdfast.checkpoint.restore.peer_source import PeerSource
from holdfast.checkpoint.restore.verified_read import FileSource
from holdfast.checkpoint.state.layout import Extent
from holdfast.checkpoint.storage.backends import Storage
from holdfast.checkpoint.storage.manifest import load_manifest, refuse
from holdfast.checkpoint.storage.names import step_directory
from holdfast.checkpoint.storage.rank_file import FileRecord, open_file
from holdfast.errors import CheckpointError, Refused
from holdfast.messages.checkpoints import ImageId


def open_image(path: Path, wanted: ImageId, until: ExitStack) -> Stored:
    """A rank's image on this node, if it is sealed and the one that is wanted."""
    image = Image.open(path)
    try:
        record, digests = image.record(), image.digests()
        if record is None or digests is None:
            raise Refused(f"{path} is not whole, or its seal is damaged")
        if id_of(record) != wanted:
            raise Refused(f"{path} is of rank {record.rank}, step {record.step}")
        source = FileSource.of_image(path, image.body_at, record.size, digests)
        until.callback(source.close)
        return open_stored(source, record.contents, (Extent(0, 0, record.size),))
    finally:
        image.close()


def open_peers(
    peer: Peer, token: str, tls: ssl.SSLContext | None, image: ImageId, until: ExitStack
) -> Stored:
    """A rank's image on another node."""
    source = PeerSource(peer, token, tls, image)
    until.callback(source.close)
    outline = source.outline
    return open_stored(source, outline.contents, (Extent(0, 0, outline.size),))


def open_files(storage: Storage, step: int, until: ExitStack) -> Sequence[Stored]:
    """The files of a checkpoint, in the order of ranks; each is opened when it is wanted."""
    manifest = load_manifest(storage, step)
    records = {record.rank: record for record in manifest.files}
    return WhenWanted(
        manifest.world_size, lambda rank: _open_file(storage, step, records[rank], until)
    )


class WhenWanted(Sequence[Stored]):
    """What several ranks stored; each is opened when somebody looks into it."""

    def __init__(self, count: int, open_one: Callable[[int], Stored]) -> None:
        self._count = count
        self._open_one = open_one
        self._open: dict[int, Stored] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rank: int) -> Stored: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Stored]: ...
    def __getitem__(self, rank: int | slice) -> Stored | Sequence[Stored]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        if rank not in self._open:
            if not 0 <= rank < self._count:
                raise IndexError(rank)
            self._open[rank] = self._open_one(rank)
        return self._open[rank]


def _open_file(storage: Storage, step: int, record: FileRecord, until: ExitStack) -> Stored:
    file = until.enter_context(open_file(storage, f"{step_directory(step)}/{record.name}"))
    if (file.file_size, file.trailer_digest) != (record.size, record.trailer):
        raise Refused(f"{file.name} is not the file that the manifest lists")
    return Stored(file, file.contents(record.contents), file.trailer.extents)


def set_aside(storage: Storage, step: int) -> None:
    """A checkpoint is not what its manifest says: nobody shall try it again."""
    with suppress(CheckpointError):
        refuse(storage, step)
