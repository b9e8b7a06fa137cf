"""Says in which file, and where in it, a record is.

Files are divided into *blocks* of consecutive records: a row group, a record batch, some kilobytes of
lines, one sample. The index keeps two numbers a block, so it is small against the data. Single records
are found within their block when that is read.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_right
from typing import NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from holdfast.data.readers.files import DataFile
from holdfast.errors import DataError

FORMAT = 1
"""Version of stored indices."""


class FileBlocks(Struct):
    """Blocks of one file. None of them is empty."""

    places: array[int]
    """Where each block is: a byte offset, or the number of a row group or record batch."""
    firsts: array[int]
    """Number of each block's first record, counted from 0 in the file."""
    records: int
    end: int
    """Where the last block ends, if places are offsets."""
    schema: str = ""
    """What all files of a data set must have in common, in words."""


class Block(NamedTuple):
    """One block, found by a record in it."""

    number: int
    """Counted over all files."""
    file: int
    place: int
    stop: int
    """Place of the next block of the file, or the file's end."""
    first: int
    """Number of its first record, counted over all files."""
    last: int
    """Number of its last record."""


class RecordIndex:
    """Blocks of all files, in order."""

    def __init__(self, files: list[DataFile], blocks: list[FileBlocks]) -> None:
        self.files = files
        self.counts = array("Q", (each.records for each in blocks))
        self.schema = next((each.schema for each in blocks if each.schema), "")
        self._ends = array("Q", (each.end for each in blocks))
        self._places = array("Q")
        self._firsts = array("Q")
        self._file_starts = array("Q")
        """Number of each file's first block."""
        self.records = 0
        for each in blocks:
            self._file_starts.append(len(self._places))
            self._places.extend(each.places)
            base = self.records
            self._firsts.extend(each.firsts if not base else (base + f for f in each.firsts))
            self.records += each.records
        self._firsts.append(self.records)
        self._file_starts.append(len(self._places))

    def find(self, record: int) -> Block:
        firsts, places, file_starts = self._firsts, self._places, self._file_starts
        following = bisect_right(firsts, record)
        number = following - 1
        file = bisect_right(file_starts, number) - 1
        # The last entries, of no block and no file, say where all ends.
        stop = self._ends[file] if following == file_starts[file + 1] else places[following]
        return Block(number, file, places[number], stop, firsts[number], firsts[following] - 1)

    def first_of_file(self, file: int) -> int:
        """Number of a file's first record, counted over all files."""
        return sum(self.counts[:file])

    def memory_bytes(self) -> int:
        arrays = (self._places, self._firsts, self._file_starts, self._ends, self.counts)
        return sum(each.itemsize * len(each) for each in arrays)

    def fingerprint(self) -> str:
        """Describe the data set: totals, and a digest of each file's name, size and count."""
        root = len(_common_folder([file.path for file in self.files]))
        digest = xxhash.xxh3_64()
        for file, count in zip(self.files, self.counts, strict=True):
            name = file.path[root:]
            digest.update(f"{name}\0{file.size}\0{count}\0".encode())
        size = sum(file.size for file in self.files)
        return (
            f"{self.records} records, {len(self.files)} files, {size} bytes, {digest.hexdigest()}"
        )


def _common_folder(paths: list[str]) -> str:
    """Find the folder that holds all files; a data set that was moved stays the same."""
    folder = paths[0].rpartition("/")[0]
    while not all(path.startswith(f"{folder}/") for path in paths):
        folder = folder.rpartition("/")[0]
    return folder


# ---- stored indices -----------------------------------------------------------------------------


class StoredBlocks(Struct, frozen=True):
    places: bytes
    firsts: bytes
    records: int
    end: int
    schema: str


class StoredIndex(Struct, frozen=True):
    """An index in a file of the user's choice. It holds for files that have not changed since."""

    format: int
    kind: str
    """Reader and options that the index depends on."""
    files: list[DataFile]
    blocks: list[StoredBlocks]


def load_index(path: str, kind: str, files: list[DataFile]) -> list[FileBlocks] | None:
    """Read an index that was stored; None if there is none, or if it is of other or changed files."""
    try:
        with open(path, "rb") as stream:
            stored = msgspec.msgpack.decode(stream.read(), type=StoredIndex)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise DataError(f"the index {path} cannot be read: {error}") from error
    if (stored.format, stored.kind, stored.files) != (FORMAT, kind, files):
        return None
    if len(stored.blocks) != len(files):
        return None
    return [_restored(each) for each in stored.blocks]


def _restored(stored: StoredBlocks) -> FileBlocks:
    blocks = FileBlocks(array("Q"), array("Q"), stored.records, stored.end, stored.schema)
    blocks.places.frombytes(stored.places)
    blocks.firsts.frombytes(stored.firsts)
    return blocks


def store_index(path: str, kind: str, files: list[DataFile], blocks: list[FileBlocks]) -> None:
    """Write an index, all of it or nothing: other ranks may read or write it at the same time."""
    stored = [
        StoredBlocks(b.places.tobytes(), b.firsts.tobytes(), b.records, b.end, b.schema)
        for b in blocks
    ]
    packed = msgspec.msgpack.encode(StoredIndex(FORMAT, kind, files, stored))
    try:
        fd, draft = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=".index-")
        try:
            with open(fd, "wb") as stream:
                stream.write(packed)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise DataError(f"the index {path} cannot be written: {error}") from error
