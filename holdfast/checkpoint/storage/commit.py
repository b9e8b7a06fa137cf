"""Commits a step, and verifies one that was committed.

All rank files are durable, and the committer has a record of each. What storage has is read back and
compared: the files exist, whole, of this step and round, one for each rank. Then `.metadata` is
written, and last the manifest is published: if there is one already it stays, and this commit came
too late. Other files in the directory make no difference.

Only when the manifest is durable are files removed that it does not name: those of other rounds, and
partial ones. Files that Holdfast did not write stay.

In a committed step the manifest guards the trailers, and the trailers guard the blocks; so every byte
that a reader could take is checked, and each failure is named: file, block and reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from msgspec import Struct

from holdfast.checkpoint.dcp import metadata as dcp_metadata
from holdfast.checkpoint.state.layout import (
    BLOCK_BYTES,
    Contents,
    Extent,
    FileRecord,
    blocks_of,
    digest,
)
from holdfast.checkpoint.storage.backends import (
    DELETED,
    MANIFEST,
    METADATA,
    Readable,
    Storage,
    is_aside,
    is_file_of,
    is_partial,
    is_rank_file,
    read_whole,
    step_directory,
)
from holdfast.checkpoint.storage.manifest import (
    Manifest,
    encoded,
    find_step,
    load_manifest,
    make_manifest,
    refuse,
)
from holdfast.checkpoint.storage.rank_file import RankFile, is_ours, open_listed
from holdfast.errors import CheckpointError, StorageError, Unusable

_AT_ONCE: Final = 8

File = tuple[str, Contents, tuple[Extent, ...]]


class Committed(Struct, frozen=True):
    """A checkpoint that is complete now."""

    manifest: Manifest
    untidy: str = ""
    """Why leftovers could not be removed; the checkpoint is complete all the same."""


class AlreadyCommitted(Struct, frozen=True):
    """Another commit of that step came first, and stays."""

    manifest: Manifest


def commit(
    storage: Storage,
    step: int,
    round: int,
    world_size: int,
    files: Sequence[FileRecord],
    *,
    job: str = "",
    saved_at: float | None = None,
) -> Committed | AlreadyCommitted:
    """Make a checkpoint of these files; idempotent."""
    ordered = tuple(sorted(files, key=lambda file: file.rank))
    check_records(round, world_size, ordered)
    there = _existing(storage, step)
    if there is None:
        whose = (step, round, world_size)
        found = read_back(storage, step_directory(step), whose, ordered)
        metadata = dcp_metadata.metadata(found)
        when = time.time() if saved_at is None else saved_at
        there = _publish(
            storage, make_manifest(job, step, round, ordered, metadata, when), metadata
        )
    untidy = _finish(storage, there)
    if (there.round, there.files) != (round, ordered):
        return AlreadyCommitted(there)
    return Committed(there, untidy)


def check_records(round: int, world_size: int, files: tuple[FileRecord, ...]) -> None:
    """Refuse records that are not one file of each rank, written in that round."""
    ranks = [file.rank for file in files]
    if ranks != list(range(world_size)):
        lacking = sorted(set(range(world_size)) - set(ranks))
        problem = f"no file of rank {lacking[0]}" if lacking else f"too many files: {ranks}"
        raise Unusable(f"a checkpoint of {world_size} ranks cannot be committed: {problem}")
    for file in files:
        if not is_file_of(file.name, file.rank, round):
            raise Unusable(f"{file.name} is not the file of rank {file.rank} in round {round}")


def _existing(storage: Storage, step: int) -> Manifest | None:
    """Return the manifest of a committed step. One that is damaged, or lacks files, is set aside."""
    found = find_step(storage, step)
    if found.state == "complete":
        return found.manifest
    refuse(storage, step)
    return None


# ---- reading back -------------------------------------------------------------------------------


def read_back(
    storage: Storage, directory: str, whose: tuple[int, int, int], files: Sequence[FileRecord]
) -> list[File]:
    """Read the contents of files; refuse one that is not of that step, round and world."""

    def one(record: FileRecord) -> File:
        return _read_file(storage, directory, record, whose)

    with ThreadPoolExecutor(_AT_ONCE, "commit") as threads:
        return list(threads.map(one, files))


def _read_file(
    storage: Storage, directory: str, record: FileRecord, whose: tuple[int, int, int]
) -> File:
    with open_listed(storage, directory, record) as file:
        contents = file.contents(record.contents)
        for said in (file.trailer, contents):
            if (said.step, said.round, said.world_size, said.rank) != (*whose, record.rank):
                raise Unusable(
                    f"{file.name}: is of rank {said.rank} of {said.world_size} in round"
                    f" {said.round} at step {said.step}, not rank {record.rank} of {whose[2]} in"
                    f" round {whose[1]} at step {whose[0]}"
                )
        return record.name, contents, file.trailer.extents


# ---- publishing ---------------------------------------------------------------------------------


def _publish(storage: Storage, manifest: Manifest, metadata: bytes) -> Manifest:
    """Write `.metadata` and the manifest; return the manifest that is there afterwards."""
    directory = step_directory(manifest.step)
    storage.write(f"{directory}/{METADATA}", [metadata])
    storage.publish(f"{directory}/{MANIFEST}", encoded(manifest))
    return load_manifest(storage, manifest.step)


def _finish(storage: Storage, manifest: Manifest) -> str:
    """Tidy up once the manifest is durable; return why that failed, if it did."""
    try:
        _mend_metadata(storage, manifest)
        tidy(storage, manifest)
    except CheckpointError as error:
        return str(error)
    return ""


def tidy(storage: Storage, manifest: Manifest) -> None:
    """Remove what saves of a step left that is not in its manifest."""
    directory = step_directory(manifest.step)
    keep = {METADATA, *(file.name for file in manifest.files)}
    found = leftovers(storage, directory, keep)
    if found:
        storage.remove(directory, found)


def _mend_metadata(storage: Storage, manifest: Manifest) -> None:
    """Repair `.metadata`: concurrent commits may leave that of one and the manifest of the other."""
    if not metadata_refusals(storage, manifest):
        return
    whose = (manifest.step, manifest.round, manifest.world_size)
    directory = step_directory(manifest.step)
    metadata = dcp_metadata.metadata(read_back(storage, directory, whose, manifest.files))
    if digest(metadata).hex() == manifest.metadata.digest:
        storage.write(f"{directory}/{METADATA}", [metadata])


def leftovers(storage: Storage, directory: str, keep: Set[str] = frozenset()) -> list[str]:
    """List the files that saves or deletions left in a step's directory, less those to keep."""
    files = [entry.name for entry in storage.entries(directory) if entry.kind == "file"]
    parts = [name for name in files if is_rank_file(name) and name not in keep]
    mine = [name for name in parts if is_ours(storage, f"{directory}/{name}")]
    begun = [n for n in files if is_partial(n) or is_aside(n, DELETED)]
    # Torch's own writer uses the same names; if it wrote one, `.metadata` may be its, too.
    metadata = {METADATA} & set(files) - keep if len(mine) == len(parts) else set()
    return [*metadata, *mine, *begun]


def check_not_foreign(storage: Readable, directory: str) -> None:
    """Refuse a step's directory that is a checkpoint of somebody else's."""
    names = [entry.name for entry in storage.entries(directory) if entry.kind == "file"]
    if METADATA not in names or any(name.startswith(MANIFEST) for name in names):
        return
    files = [name for name in names if name.endswith(".distcp")]
    if not all(is_rank_file(name) and is_ours(storage, f"{directory}/{name}") for name in files):
        raise StorageError(
            f"{storage.where(directory)}: holds a checkpoint that Holdfast did not write, and is not"
            " written into; save to another directory, or move it away"
        )


# ---- verification --------------------------------------------------------------------------------


class Refusal(Struct, frozen=True):
    """A part of a checkpoint that must not be used."""

    file: str
    why: str
    block: int | None = None


def _nothing(size: int) -> None: ...


def verify(
    storage: Readable, step: int, on_progress: Callable[[int], None] = _nothing
) -> list[Refusal]:
    """Return all that is wrong with a step, including `.metadata`, which only other readers need."""
    try:
        manifest = load_manifest(storage, step)
    except (Unusable, StorageError) as error:
        return [Refusal(MANIFEST, str(error))]
    refusals = []
    for record in manifest.files:
        refusals += _verify_file(storage, manifest, record, on_progress)
    return refusals + metadata_refusals(storage, manifest)


def metadata_refusals(storage: Readable, manifest: Manifest) -> list[Refusal]:
    """Return what is wrong with `.metadata`."""
    path = f"{step_directory(manifest.step)}/{METADATA}"
    try:
        data = read_whole(storage, path, manifest.metadata.size)
    except StorageError as error:
        return [Refusal(METADATA, str(error))]
    if digest(data).hex() != manifest.metadata.digest:
        return [Refusal(METADATA, f"{storage.where(path)}: is not what its digest says")]
    return []


def _verify_file(
    storage: Readable, manifest: Manifest, record: FileRecord, on_progress: Callable[[int], None]
) -> list[Refusal]:
    try:
        with open_listed(storage, step_directory(manifest.step), record) as file:
            bad = list(_bad_blocks(file, record.name, on_progress))
            if not bad:
                file.contents(record.contents)
            return bad
    except (Unusable, StorageError) as error:
        return [Refusal(record.name, str(error))]


def _bad_blocks(file: RankFile, name: str, on_progress: Callable[[int], None]) -> Iterator[Refusal]:
    buffer = memoryview(bytearray(min(BLOCK_BYTES, file.size)))
    for block in range(blocks_of(file.size)):
        try:
            on_progress(len(file.read_block(block, buffer)))
        except (Unusable, StorageError) as error:
            yield Refusal(name, str(error), block)
