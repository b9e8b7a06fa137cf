"""Where a state can be read from: images in memory, files on storage.

Of the ranks of the world that saved it, a rank reads what it needs: in a world of the same size its
own part alone, if that has everything, else all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

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


def open_files(
    storage: Storage, step: int, rank: int, world_size: int, until: ExitStack
) -> Sequence[Stored]:
    """The files of a checkpoint that a rank needs to restore it."""
    manifest = load_manifest(storage, step)
    records = {record.rank: record for record in manifest.files}
    if manifest.world_size == world_size:
        own = _open_file(storage, step, records[rank], until)
        if all(own.at(item.raw) is not None for item in own.contents.items):
            return [own]
    return [_open_file(storage, step, records[r], until) for r in range(manifest.world_size)]


def _open_file(storage: Storage, step: int, record: FileRecord, until: ExitStack) -> Stored:
    file = until.enter_context(open_file(storage, f"{step_directory(step)}/{record.name}"))
    if (file.file_size, file.trailer_digest) != (record.size, record.trailer):
        raise Refused(f"{file.name} is not the file that the manifest lists")
    return Stored(file, file.contents(record.contents), file.trailer.extents)


def set_aside(storage: Storage, step: int) -> None:
    """A checkpoint is not what its manifest says: nobody shall try it again."""
    with suppress(CheckpointError):
        refuse(storage, step)
