"""Writes checkpoints that are a directory of their own, at a path that the script chose.

That is how `torch.distributed.checkpoint` does it, and another save to the same path replaces the one
before. Nothing of the old one is given up before all of the new one is durable:

    the ranks' files, under names that no earlier save has used
    .metadata            replaced atomically: from here on torch's readers find the new one
    holdfast.json        replaced likewise, for our own readers
    the old files        removed

So a crash at any point leaves one of the two, whole. Files that torch's own writers left there are not
ours to remove.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Final

from holdfast.checkpoint.dcp import metadata as dcp_metadata
from holdfast.checkpoint.state.layout import FileRecord
from holdfast.checkpoint.storage.backends import (
    MANIFEST,
    METADATA,
    Readable,
    Reader,
    Storage,
    StorageEntry,
    is_partial,
    open_storage,
    rank_file_name,
    read_whole,
    step_directory,
)
from holdfast.checkpoint.storage.commit import check_records, leftovers, read_back
from holdfast.checkpoint.storage.manifest import MOST_BYTES, decoded, encoded, make_manifest
from holdfast.errors import CheckpointError, UsageError

_OF_ROUND: Final = re.compile(r"\.?__[0-9]+_([0-9]+)\.distcp")


def parent_and_name(at: str) -> tuple[str, str]:
    """Split a path or URL into the parent and the name of the checkpoint's directory."""
    parent, _, name = at.rstrip("/").rpartition("/")
    if not name or name in (".", "..") or parent.endswith(":/"):
        raise UsageError(f"{at!r} names no directory that a checkpoint could be")
    return parent or "/", name


def opened(at: str) -> tuple[Storage, str]:
    """Open the storage that a checkpoint goes to; return it with the directory's name there."""
    parent, name = parent_and_name(at)
    return open_storage(parent), name


def replace(
    storage: Storage,
    directory: str,
    of: tuple[int, int, int],
    files: Sequence[FileRecord],
    *,
    job: str = "",
) -> str:
    """Make a checkpoint of these files, which are of that step, round and world size, and remove the
    one before it; return why its files could not be removed, if so."""
    step, round, world_size = of
    ordered = tuple(sorted(files, key=lambda file: file.rank))
    check_records(round, world_size, ordered)
    metadata = dcp_metadata.metadata(read_back(storage, directory, of, ordered))
    manifest = make_manifest(job, step, round, ordered, metadata, time.time())
    storage.write(f"{directory}/{METADATA}", [metadata])
    storage.write(f"{directory}/{MANIFEST}", [encoded(manifest)])
    try:
        _tidy(storage, directory, round, {METADATA, *(file.name for file in ordered)})
    except CheckpointError as error:
        return str(error)
    return ""


def _tidy(storage: Storage, directory: str, round: int, keep: set[str]) -> None:
    """Remove what earlier saves left, but nothing of a later round, which may be in progress."""
    found = leftovers(storage, directory, keep)
    old = [n for n in found if not (match := _OF_ROUND.match(n)) or int(match[1]) <= round]
    if old:
        storage.remove(directory, old)


class _AsStep:
    """Presents such a directory as the only step of another one, for readers that know steps."""

    def __init__(self, storage: Readable, step: int) -> None:
        self._storage = storage
        self._directory = step_directory(step)

    def where(self, path: str) -> str:
        return self._storage.where(self._inside(path))

    def open(self, path: str) -> AbstractContextManager[Reader]:
        return self._storage.open(self._inside(path))

    def entries(self, directory: str) -> list[StorageEntry]:
        if directory:
            return self._storage.entries(self._inside(directory))
        return [StorageEntry(self._directory, "directory")]

    def _inside(self, path: str) -> str:
        return path.removeprefix(self._directory).lstrip("/")


def open_either(where: str) -> Readable:
    """Open a directory that has a checkpoint for each step, or that is a checkpoint itself."""
    storage = open_storage(where)
    if all(entry.name != MANIFEST for entry in storage.entries("")):
        return storage
    manifest = decoded(read_whole(storage, MANIFEST, MOST_BYTES), storage.where(MANIFEST))
    return _AsStep(storage, manifest.step)


def discard(storage: Storage, directory: str, ranks: Collection[int], round: int) -> None:
    """Remove the files, whole or partial, that ranks wrote for a save that came to nothing."""
    files = [rank_file_name(rank, round) for rank in ranks]
    found = [
        entry.name
        for entry in storage.entries(directory)
        if entry.name in files
        or (is_partial(entry.name) and any(f".{file}." in entry.name for file in files))
    ]
    if found:
        storage.remove(directory, found)
