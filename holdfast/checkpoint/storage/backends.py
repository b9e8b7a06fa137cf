"""Defines what checkpoints need of a storage: a few operations, each safe to die in, and names.

A file appears under its name only when all of it is durable. `publish` creates a file, whole or not at
all, and never replaces one: of two writers that try, one succeeds. So a manifest that is visible proves
that what it names was written, whatever became of the writer.

On a disk that is a temporary name in the same directory, fsync, rename (or link, to publish), fsync of
the directory. In an object store it is a multipart upload, which is visible only once it is complete,
and a conditional put.

Paths are relative to the storage's root: `name` or `directory/name`. No operation removes a directory
that is not empty, and none follows a symbolic link out of the root to change something.

    <root>/
        .holdfast-writer                      which job writes there: see `writer_mark`
        step_000000500/
            __<rank>_<round>.distcp           a rank file; two rounds never write the same one
            .metadata                         for readers that know only torch's own format
            holdfast.json                     the manifest, written last: it makes this a checkpoint
            holdfast.json.refused             a manifest set aside: what it lists does not verify
            holdfast.json.deleted             a manifest whose files are being deleted
            .<name>.<16 hex digits>.partial   a file that is being written, or was never finished

Files with other names are not Holdfast's, and are never touched.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal, NamedTuple, Protocol

from holdfast.errors import StorageError

Buffer = bytes | memoryview


class StorageEntry(NamedTuple):
    """A name in a directory."""

    name: str
    kind: Literal["file", "directory", "other"]
    """A symbolic link is "other", wherever it leads."""


class Reader(Protocol):
    size: int

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        """Fill the views in order, from that byte on; raise if the file is shorter."""


class Readable(Protocol):
    def where(self, path: str) -> str:
        """Return the full path or URL, for messages."""

    def open(self, path: str) -> AbstractContextManager[Reader]: ...

    def entries(self, directory: str) -> list[StorageEntry]:
        """List a directory, sorted by name; empty if it does not exist."""


class Storage(Readable, Protocol):
    def write(self, path: str, pieces: Iterable[Buffer]) -> int:
        """Write a file in place of what had that name; return its size."""

    def publish(self, path: str, data: bytes) -> bool:
        """Create a file; return False, with nothing changed, if the name is taken."""

    def remove(self, directory: str, files: Iterable[str]) -> None:
        """Remove files durably; those that are gone already are no error."""

    def make_directory(self, directory: str) -> None: ...

    def remove_directory(self, directory: str) -> bool:
        """Remove a directory if it is empty; return whether it is gone."""

    def set_aside(self, path: str, why: str) -> str:
        """Rename a file to `<path>.<why>`, numbered if that is taken; return its new path."""


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """Open a directory, or a URL like `s3://bucket/prefix`."""
    text = os.fspath(where)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        from holdfast.checkpoint.storage.posix import PosixStorage

        return PosixStorage(text)
    from holdfast.checkpoint.storage.remote import connect

    return connect(text)


def read_whole(storage: Readable, path: str, most_bytes: int) -> bytes:
    """Read a small file."""
    with storage.open(path) as file:
        if file.size > most_bytes:
            raise StorageError(
                f"{storage.where(path)}: {file.size} bytes are too many for such a file"
            )
        data = bytearray(file.size)
        file.read_into(0, [memoryview(data)])
        return bytes(data)


# ---- names ---------------------------------------------------------------------------------------

MANIFEST: Final = "holdfast.json"
METADATA: Final = ".metadata"
REFUSED: Final = "refused"
DELETED: Final = "deleted"

LAST_STEP: Final = 10**18 - 1
_STEP: Final = re.compile(r"step_([0-9]{9}|[1-9][0-9]{9,17})")
_RANK_FILE: Final = re.compile(r"__([0-9]+)_([0-9]+)\.distcp")
_JOB: Final = 10**6
_PARTIAL: Final = re.compile(
    rf"\.({_RANK_FILE.pattern}|{re.escape(METADATA)}|{re.escape(MANIFEST)})\.[0-9a-f]{{16}}\.partial"
)


def step_directory(step: int) -> str:
    return f"step_{step:09d}"


def step_of(directory: str) -> int | None:
    """Return the step of a step's directory; None for any other name."""
    match = _STEP.fullmatch(directory)
    return int(match[1]) if match else None


def rank_file_name(rank: int, round: int, job: int = 0) -> str:
    """Return the name of a rank file. Several jobs, each counting rounds from 1, may save in one
    directory: each has a number of its own, so that none overwrites another's file."""
    return f"__{rank}_{round + _JOB * job}.distcp"


def is_file_of(name: str, rank: int, round: int) -> bool:
    """Return whether that is the name of the rank's file of that round, in any job."""
    match = _RANK_FILE.fullmatch(name)
    if match is None or int(match[1]) != rank:
        return False
    return int(match[2]) >= round and (int(match[2]) - round) % _JOB == 0


def is_rank_file(name: str) -> bool:
    return _RANK_FILE.fullmatch(name) is not None


def partial_name(name: str) -> str:
    """Return a unique name for a file that is not whole yet."""
    return f".{name}.{secrets.token_hex(8)}.partial"


def is_partial(name: str) -> bool:
    return _PARTIAL.fullmatch(name) is not None


def aside_name(name: str, why: str, taken: set[str]) -> str:
    """Return the name of a file that is set aside, different from all that are taken."""
    first = f"{name}.{why}"
    others = (f"{first}.{number}" for number in range(1, len(taken) + 2))
    return next(choice for choice in (first, *others) if choice not in taken)


def is_aside(name: str, why: str) -> bool:
    """Return whether it is a manifest that was set aside for that reason."""
    return re.fullmatch(rf"{re.escape(MANIFEST)}\.{why}(\.[0-9]+)?", name) is not None
