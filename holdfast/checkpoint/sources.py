"""Where a state can be read from: images in memory, files on storage.

Of what the ranks of the world that saved it wrote, a rank reads what it needs: its own part alone, if
that has everything and is cut as it is here, else the others' too. So files are opened only when
somebody looks into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import overload

from holdfast.checkpoint.image import Image
from holdfast.checkpoint.layout import Extent
from holdfast.checkpoint.manifest import load_manifest, refuse
from holdfast.checkpoint.names import step_directory
from holdfast.checkpoint.rankfile import FileRecord, open_file
from holdfast.checkpoint.reading import FileSource
from holdfast.checkpoint.restore import Stored, open_stored
from holdfast.checkpoint.storage import Storage
from holdfast.errors import CheckpointError, Refused


def open_image(path: Path, step: int, round: int, rank: int, until: ExitStack) -> Stored:
    """A rank's image, if it is sealed and of that step and round."""
    image = Image.open(path)
    try:
        record, digests = image.record(), image.digests()
        if record is None or digests is None:
            raise Refused(f"{path} is not whole, or its seal is damaged")
        if (record.step, record.round, record.rank) != (step, round, rank):
            raise Refused(f"{path} is of rank {record.rank}, step {record.step}")
        source = FileSource.of_image(path, image.body_at, record.size, digests)
        until.callback(source.close)
        return open_stored(source, record.contents, (Extent(0, 0, record.size),))
    finally:
        image.close()


def open_files(storage: Storage, step: int, until: ExitStack) -> Sequence[Stored]:
    """The files of a checkpoint, in the order of ranks; each is opened when it is wanted."""
    manifest = load_manifest(storage, step)
    records = {record.rank: record for record in manifest.files}
    return _Files(storage, step, [records[r] for r in range(manifest.world_size)], until)


class _Files(Sequence[Stored]):
    def __init__(
        self, storage: Storage, step: int, records: list[FileRecord], until: ExitStack
    ) -> None:
        self._storage = storage
        self._step = step
        self._records = records
        self._until = until
        self._open: dict[int, Stored] = {}

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, rank: int) -> Stored: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Stored]: ...
    def __getitem__(self, rank: int | slice) -> Stored | Sequence[Stored]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        if rank not in self._open:
            record = self._records[rank]
            self._open[rank] = _open_file(self._storage, self._step, record, self._until)
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
