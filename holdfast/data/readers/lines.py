"""Divides files of text records into blocks, in one pass.

A block is all records that begin in the same 2 KiB of a file. So a record costs about a byte of index
if it is short, and 16 bytes if it is long; to read one, at most 2 KiB before it are read as well.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from holdfast.data.readers.files import OpenFile
from holdfast.data.readers.index import Block, FileBlocks
from holdfast.data.readers.progress import IndexProgress
from holdfast.errors import DataError

CELL_BYTES = 2048
CHUNK_BYTES = 8 << 20
MAX_RECORD_BYTES = 256 << 20
"""Limit of one record. A quote that is not closed makes a record of the rest of the file."""

Starts = Any
"""A numpy array of the offsets at which records start."""

Splitter = Callable[[bytes, bool], tuple[Starts, int]]
"""Finds the records in bytes, and says how many bytes all complete ones take together. The flag tells
that the bytes are the last of the file, so that a last record needs no line end."""


class TextBlock(NamedTuple):
    """A block as it is in the file, and its records."""

    data: bytes
    records: list[bytes]


class BlockBuilder:
    """Blocks of a file whose records are found piece by piece."""

    def __init__(self) -> None:
        self.places = array("Q")
        self.firsts = array("Q")
        self.records = 0
        self._last_cell = -1

    def add(self, starts: Starts) -> None:
        """Add records, given the offsets at which they start, in order."""
        if not len(starts):
            return
        cells = starts // CELL_BYTES
        previous = np.concatenate(([self._last_cell], cells[:-1]))
        begins = np.flatnonzero(cells != previous)
        self.places.frombytes(starts[begins].astype(np.uint64).tobytes())
        self.firsts.frombytes((begins + self.records).astype(np.uint64).tobytes())
        self.records += len(starts)
        self._last_cell = int(cells[-1])

    def finished(self, end: int, schema: str = "") -> FileBlocks:
        return FileBlocks(self.places, self.firsts, self.records, end, schema)


def text_start(opened: OpenFile) -> int:
    """Find where text begins: after the byte order mark, if there is one."""
    return 3 if opened.read(0, min(3, opened.file.size)) == codecs.BOM_UTF8 else 0


def pieces(opened: OpenFile, start: int, split: Splitter) -> Iterator[tuple[int, bytes, Starts]]:
    """Read a file from an offset on, in pieces that end where a record ends."""
    size = CHUNK_BYTES
    end = opened.file.size
    while start < end:
        stop = min(start + size, end)
        data = opened.read(start, stop)
        if len(data) < stop - start:
            opened.check()
            raise DataError(
                f"{opened.file.path} ended at byte {start + len(data)} of {end} while read"
            )
        starts, complete = split(data, stop == end)
        if complete:
            yield start, data[:complete], starts
            start += complete
            size = CHUNK_BYTES
        elif stop - start >= MAX_RECORD_BYTES:
            raise DataError(
                f"{opened.file.path}: the record at byte {start} is longer than"
                f" {MAX_RECORD_BYTES >> 20} MiB. Is a quote not closed, or is this not a text file?"
            )
        else:
            size *= 2


def index_records(
    opened: OpenFile, start: int, split: Splitter, progress: IndexProgress, schema: str = ""
) -> FileBlocks:
    builder = BlockBuilder()
    for offset, data, starts in pieces(opened, start, split):
        builder.add(starts + offset)
        progress.advance(len(data))
    opened.check()
    return builder.finished(opened.file.size, schema)


def split_lines(data: bytes, is_end: bool) -> tuple[Starts, int]:
    """Find lines; empty ones are no records."""
    view = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(view == ord("\n"))
    complete = int(ends[-1]) + 1 if len(ends) else 0
    if is_end and complete < len(data):
        ends = np.append(ends, len(data))
        complete = len(data)
    if not len(ends):
        return ends, 0
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts
    first_bytes = view[np.minimum(starts, len(data) - 1)]
    blank = (lengths == 0) | ((lengths == 1) & (first_bytes == ord("\r")))
    return starts[~blank], complete


def lines_of(data: bytes) -> list[bytes]:
    """Split a block into lines, without their ends and without empty ones."""
    lines = data.split(b"\n")
    if lines[-1] in (b"", b"\r"):
        lines.pop()
    if b"" in lines or b"\r" in lines:
        return [line for line in lines if line and line != b"\r"]
    return lines


def byte_range(loaded: TextBlock, block: Block, row: int) -> tuple[int, int]:
    """Find where in the file a record is."""
    at = 0
    for record in loaded.records[:row]:
        at = loaded.data.index(record, at) + len(record)
    start = loaded.data.index(loaded.records[row], at)
    return block.place + start, block.place + start + len(loaded.records[row])
