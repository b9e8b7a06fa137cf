"""Reads all of a checkpoint and says what is wrong with it.

The manifest guards the trailers, the trailers guard the blocks; so every byte that any reader could
take from a checkpoint is checked, and what does not verify is named: file, block, and why. One bad
file does not keep the others from being looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from holdfast.checkpoint.state.layout import BLOCK_BYTES, blocks_of
from holdfast.checkpoint.storage.backends import Readable, read_whole
from holdfast.checkpoint.storage.digests import digest
from holdfast.checkpoint.storage.manifest import Manifest, load_manifest
from holdfast.checkpoint.storage.names import MANIFEST, METADATA, step_directory
from holdfast.checkpoint.storage.rank_file import FileRecord, RankFile, open_file
from holdfast.errors import Refused, StorageError


class Refusal(Struct, frozen=True):
    """Something of a checkpoint that must not be used."""

    file: str
    why: str
    block: int | None = None


def _nothing(size: int) -> None: ...


def verify(
    storage: Readable, step: int, went_on: Callable[[int], None] = _nothing
) -> list[Refusal]:
    """All that is wrong with a step; nothing when it can be trusted. `.metadata` is for others to
    read: our own restore does well without it."""
    try:
        manifest = load_manifest(storage, step)
    except (Refused, StorageError) as error:
        return [Refusal(MANIFEST, str(error))]
    refusals = []
    for record in manifest.files:
        refusals += _verify_file(storage, manifest, record, went_on)
    return refusals + metadata_refusals(storage, manifest)


def metadata_refusals(storage: Readable, manifest: Manifest) -> list[Refusal]:
    """What is wrong with `.metadata`."""
    path = f"{step_directory(manifest.step)}/{METADATA}"
    try:
        data = read_whole(storage, path, manifest.metadata.size)
    except StorageError as error:
        return [Refusal(METADATA, str(error))]
    if digest(data).hex() != manifest.metadata.digest:
        return [Refusal(METADATA, f"{storage.where(path)}: is not what its digest says")]
    return []


def _verify_file(
    storage: Readable, manifest: Manifest, record: FileRecord, went_on: Callable[[int], None]
) -> list[Refusal]:
    try:
        with open_file(storage, f"{step_directory(manifest.step)}/{record.name}") as file:
            _check_whose(file, manifest, record)
            bad = list(_bad_blocks(file, record.name, went_on))
            if not bad:
                file.contents(record.contents)
            return bad
    except (Refused, StorageError) as error:
        return [Refusal(record.name, str(error))]


def _check_whose(file: RankFile, manifest: Manifest, record: FileRecord) -> None:
    said = file.trailer
    if file.trailer_digest == record.trailer and file.file_size == record.size:
        return
    if (said.step, said.round, said.rank) == (manifest.step, manifest.round, record.rank):
        raise Refused(f"{file.name}: is another file than the one that was committed")
    raise Refused(
        f"{file.name}: is the file of rank {said.rank} at step {said.step} in round {said.round}"
    )


def _bad_blocks(file: RankFile, name: str, went_on: Callable[[int], None]) -> Iterator[Refusal]:
    buffer = memoryview(bytearray(min(BLOCK_BYTES, file.size)))
    for block in range(blocks_of(file.size)):
        try:
            went_on(len(file.read_block(block, buffer)))
        except (Refused, StorageError) as error:
            yield Refusal(name, str(error), block)
