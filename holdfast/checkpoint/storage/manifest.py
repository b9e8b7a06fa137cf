"""Reads and writes manifests, and lists the steps of a directory.

The manifest makes files a checkpoint: it is written last and names every file with its digest. It is
readable JSON and has a digest of itself in its last line, computed over all its bytes with zeros in the
digest's place. A manifest that matches proves that every file it names was durable before it.

A step's directory without one is being written, was left by a save that never finished, or is half
deleted. It is never taken for a checkpoint.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timezone
from typing import Final, Literal

import msgspec
from msgspec import Struct

from holdfast.checkpoint.state.layout import DIGEST_BYTES, FileRecord, digest
from holdfast.checkpoint.storage.backends import (
    DELETED,
    MANIFEST,
    REFUSED,
    Readable,
    Storage,
    StorageEntry,
    is_aside,
    is_file_of,
    is_rank_file,
    read_whole,
    step_directory,
    step_of,
)
from holdfast.errors import NotThere, StorageError, Unusable

FORMAT: Final = 1
MOST_BYTES: Final = 256 << 20
_ZEROS: Final = "0" * (2 * DIGEST_BYTES)
_END: Final = re.compile(rb'"digest": "([0-9a-f]{%d})"\n}\n\Z' % len(_ZEROS))


_LINK: Final = "it is a symbolic link, which is not followed; put the directory itself there"


class MetadataRecord(Struct, frozen=True):
    """Size and digest of the `.metadata` file."""

    size: int
    digest: str


class Manifest(Struct, frozen=True):
    """A complete checkpoint."""

    format: int
    job: str
    step: int
    round: int
    world_size: int
    saved_at: datetime
    total_bytes: int
    metadata: MetadataRecord
    files: tuple[FileRecord, ...]
    digest: str = _ZEROS


class StepFound(Struct, frozen=True):
    """A step's directory, and its state."""

    step: int
    state: Literal["complete", "partial", "refused"]
    why: str = ""
    """Why it is not complete."""
    manifest: Manifest | None = None
    half_deleted: bool = False


def make_manifest(
    job: str,
    step: int,
    round: int,
    files: tuple[FileRecord, ...],
    metadata: bytes,
    saved_at: float,
) -> Manifest:
    return Manifest(
        format=FORMAT,
        job=job,
        step=step,
        round=round,
        world_size=len(files),
        saved_at=datetime.fromtimestamp(saved_at, timezone.utc),
        total_bytes=len(metadata) + sum(file.size for file in files),
        metadata=MetadataRecord(len(metadata), digest(metadata).hex()),
        files=files,
    )


def encoded(manifest: Manifest) -> bytes:
    """Encode a manifest, with its digest."""
    blank = msgspec.structs.replace(manifest, digest=_ZEROS)
    text = msgspec.json.format(msgspec.json.encode(blank), indent=1) + b"\n"
    return _END.sub(b'"digest": "%s"\n}\n' % digest(text).hex().encode(), text)


def decoded(data: bytes, where: str) -> Manifest:
    """Decode and verify a manifest."""
    end = _END.search(data)
    if end is None:
        raise Unusable(f"{where}: does not end like a manifest; it is cut off, or damaged")
    blank = data[: end.start(1)] + _ZEROS.encode() + data[end.end(1) :]
    if digest(blank).hex().encode() != end[1]:
        raise Unusable(f"{where}: is not what its own digest says")
    try:
        form = msgspec.json.decode(data, type=_Form).format
        if form != FORMAT:
            raise Unusable(f"{where}: has format {form}, and this Holdfast reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise Unusable(f"{where}: cannot be read: {error}") from None
    # Names become paths of files that are read and deleted.
    ranks = range(manifest.world_size)
    named = len(manifest.files) == len(ranks) and all(
        is_file_of(file.name, rank, manifest.round)
        for rank, file in zip(ranks, manifest.files, strict=True)
    )
    if not named:
        raise Unusable(f"{where}: does not list one file of each of {manifest.world_size} ranks")
    return manifest


class _Form(Struct):
    format: int


def load_manifest(storage: Readable, step: int, name: str = MANIFEST) -> Manifest:
    """Read a step's manifest; raise `NotThere` if it has none, `Unusable` if it is damaged."""
    path = f"{step_directory(step)}/{name}"
    manifest = decoded(read_whole(storage, path, MOST_BYTES), storage.where(path))
    if manifest.step != step:
        raise Unusable(f"{storage.where(path)}: is the manifest of step {manifest.step}")
    return manifest


def refuse(storage: Storage, step: int) -> None:
    """Set a step's manifest aside because the step does not verify; it may be saved again."""
    with suppress(NotThere):
        storage.set_aside(f"{step_directory(step)}/{MANIFEST}", REFUSED)


def steps(storage: Readable) -> list[StepFound]:
    """List all steps that have a directory, newest first. One that cannot be read hides no other."""
    found = []
    for entry in storage.entries(""):
        step = step_of(entry.name)
        if step is not None and entry.kind == "directory":
            try:
                found.append(find_step(storage, step))
            except StorageError as error:
                found.append(StepFound(step, "refused", str(error)))
    return sorted(found, key=lambda one: one.step, reverse=True)


def links(storage: Readable) -> list[StepFound]:
    """List the steps that are symbolic links. They are not followed, let alone deleted; but whoever
    finds nothing else has to say so."""
    named = ((step_of(entry.name), entry.kind) for entry in storage.entries(""))
    return [StepFound(step, "refused", _LINK) for step, kind in named if step and kind == "other"]


def find_step(storage: Readable, step: int) -> StepFound:
    """Look at a step's directory; raise `StorageError` if that fails."""
    entries = storage.entries(step_directory(step))
    present = {entry.name for entry in entries}
    if MANIFEST not in present:
        return _without_manifest(step, entries)
    try:
        manifest = load_manifest(storage, step)
    except Unusable as error:
        return StepFound(step, "refused", str(error))
    except NotThere:  # Another process has just set it aside.
        return _without_manifest(step, storage.entries(step_directory(step)))
    missing = [file.name for file in manifest.files if file.name not in present]
    if missing:
        why = f"{missing[0]} is missing" + (f", and {len(missing) - 1} more" * (len(missing) > 1))
        return StepFound(step, "refused", why, manifest)
    return StepFound(step, "complete", "", manifest)


def _without_manifest(step: int, entries: list[StorageEntry]) -> StepFound:
    if any(is_aside(entry.name, DELETED) for entry in entries):
        return StepFound(step, "partial", "half deleted", half_deleted=True)
    if any(is_aside(entry.name, REFUSED) for entry in entries):
        return StepFound(step, "refused", "it did not verify, and was set aside")
    files = sum(is_rank_file(entry.name) for entry in entries)
    return StepFound(step, "partial", f"not committed; rank files there: {files}")
