"""Where checkpoints are kept: the few operations they need, each safe to die in.

A file appears under its name only when all of it is durable. `publish` creates one that was not there
before, whole or not at all, and never replaces: of two that try, one is told that it came second. So
whoever sees a manifest may trust that what it names was written, whatever became of the writer.

On a disk that is a temporary name in the same directory, fsync, rename (or link, to publish), fsync of
the directory. In an object store it is a multipart upload, which is visible only once it is complete,
and a conditional put.

Paths are relative to the storage's root: `name` or `directory/name`. There is no operation that
removes a directory with anything in it, and none follows a link out of the root to change something.

What things are called on storage.

    <root>/
        step_000000500/
            __<rank>_<round>.distcp           a rank's part; two rounds never write the same file
            .metadata                         for readers that know only torch's own format
            holdfast.json                     the manifest: it comes last, and makes it a checkpoint
            holdfast.json.refused             a manifest set aside: what it lists does not verify
            holdfast.json.deleted             a manifest whose files are being deleted
            .<name>.<16 hex digits>.partial   a file that is being written, or never was finished

Whatever has another name is somebody else's, and is never touched.
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
    name: str
    kind: Literal["file", "directory", "other"]
    """A link is "other", wherever it leads."""


class Reader(Protocol):
    size: int

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, from that byte on; an error when there is less."""


class Readable(Protocol):
    def where(self, path: str) -> str:
        """The path as a person would write it."""

    def open(self, path: str) -> AbstractContextManager[Reader]: ...

    def entries(self, directory: str) -> list[StorageEntry]:
        """What is in a directory, by name; nothing when there is no such directory."""


class Storage(Readable, Protocol):
    def write(self, path: str, pieces: Iterable[Buffer]) -> int:
        """Write a file; its size. It replaces what had that name."""

    def publish(self, path: str, data: bytes) -> bool:
        """Create a file; False, and nothing has changed, when there is one of that name."""

    def remove(self, directory: str, files: Iterable[str]) -> None:
        """Remove files, for good when this returns; those that are gone already are no error."""

    def make_directory(self, directory: str) -> None: ...

    def remove_directory(self, directory: str) -> bool:
        """Remove a directory if it is empty; whether it is gone."""

    def set_aside(self, path: str, why: str) -> str:
        """Give a file the name `<path>.<why>`, or one with a number after it; its new path."""


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """A directory, or what a URL like `s3://bucket/prefix` names."""
    text = os.fspath(where)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        from holdfast.checkpoint.storage.posix import PosixStorage

        return PosixStorage(text)
    from holdfast.checkpoint.storage.remote import connect

    return connect(text)


def read_whole(storage: Readable, path: str, most_bytes: int) -> bytes:
    """A small file."""
    with storage.open(path) as file:
        if file.size > most_bytes:
            raise StorageError(f"{storage.where(path)}: {file.size} bytes are too many for it")
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
    """The step whose directory that is; None for any other name."""
    match = _STEP.fullmatch(directory)
    return int(match[1]) if match else None


def rank_file_name(rank: int, round: int, job: int = 0) -> str:
    """A rank's file. Jobs count their rounds alike, and may save at one place: each has a number of
    its own, so that none writes over another's file."""
    return f"__{rank}_{round + _JOB * job}.distcp"


def is_file_of(name: str, rank: int, round: int) -> bool:
    """Whether that is a name for the rank's file of that round, in whichever job."""
    match = _RANK_FILE.fullmatch(name)
    if match is None or int(match[1]) != rank:
        return False
    return int(match[2]) >= round and (int(match[2]) - round) % _JOB == 0


def is_rank_file(name: str) -> bool:
    return _RANK_FILE.fullmatch(name) is not None


def partial_name(name: str) -> str:
    """A name, used by nobody else, for a file until it is whole."""
    return f".{name}.{secrets.token_hex(8)}.partial"


def is_partial(name: str) -> bool:
    return _PARTIAL.fullmatch(name) is not None


def aside_name(name: str, why: str, taken: set[str]) -> str:
    """What a file is called once it is set aside; nothing that is there already is replaced."""
    first = f"{name}.{why}"
    others = (f"{first}.{number}" for number in range(1, len(taken) + 2))
    return next(choice for choice in (first, *others) if choice not in taken)


def is_aside(name: str, why: str) -> bool:
    """Whether it is a manifest that was set aside for that reason."""
    return re.fullmatch(rf"{re.escape(MANIFEST)}\.{why}(\.[0-9]+)?", name) is not None
