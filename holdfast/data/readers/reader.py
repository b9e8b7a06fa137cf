"""What readers of files have in common: records by number, over many files.

A reader is a map-style data set: `len(reader)`, `reader[index]`, and `reader.__getitems__(indices)`,
which torch's loaders call with a whole batch. It holds an index and no open file: each thread of each
process opens files when it first reads, so a reader may be forked or pickled into loader processes at
any time. The files and blocks that were used last are kept, a fixed number of each.
"""

from __future__ import annotations

import operator
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, SupportsIndex, TypeVar

from holdfast.data.readers.files import DataFile, Paths, find_files
from holdfast.data.readers.index import (
    Block,
    FileBlocks,
    RecordIndex,
    load_index,
    store_index,
)
from holdfast.data.readers.progress import IndexProgress
from holdfast.errors import DataError

OPEN_FILES = 32
"""Files that one thread keeps open."""

K = TypeVar("K")
V = TypeVar("V")
Handle = TypeVar("Handle", bound="Closable")
Loaded = TypeVar("Loaded")


class RecentlyUsed(Generic[K, V]):
    """The values that were used last, at most so many."""

    def __init__(self, limit: int, close: Callable[[V], None] | None = None) -> None:
        self._limit = limit
        self._close = close
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def add(self, key: K, value: V) -> None:
        self._values[key] = value
        if len(self._values) > self._limit:
            _, oldest = self._values.popitem(last=False)
            if self._close is not None:
                self._close(oldest)


class Closable(Protocol):
    def close(self) -> None: ...


def _close(handle: Closable) -> None:
    handle.close()


class ThreadFiles(threading.local, Generic[Handle, Loaded]):
    """Open files and loaded blocks of one thread of one process."""

    def __init__(self, blocks: int) -> None:
        # Nothing in here may lead back to the reader: each thread would keep it for ever.
        self.pid = os.getpid()
        self.handles: RecentlyUsed[int, Handle] = RecentlyUsed(OPEN_FILES, _close)
        self.blocks: RecentlyUsed[int, Loaded] = RecentlyUsed(blocks)
        self.last: tuple[Block, Handle, Loaded] | None = None


class IndexedReader(ABC, Generic[Handle, Loaded]):
    """Records of files by number; subclasses know one format each.

    A handle is an open file, with whatever a format needs to read it; a loaded block is a block in
    memory, from which single records are decoded.
    """

    SUFFIXES: tuple[str, ...]
    """Endings of names that are taken from a folder."""

    def __init__(self, paths: Paths, *, index: str | os.PathLike[str] | None, blocks: int) -> None:
        """Find the files and index them.

        `index` names a file that keeps the index for next time; `blocks` is the number of blocks that
        are kept, 0 if only the last one is.
        """
        self._blocks_cached = blocks
        files = find_files(paths, self.SUFFIXES)
        kind = f"{type(self).__name__} {self._options()}"
        stored = None if index is None else load_index(os.fspath(index), kind, files)
        found = self._index(files) if stored is None else stored
        self._check_schemas(files, found)
        self._index_of_records = RecordIndex(files, found)
        if not self._index_of_records.records:
            raise DataError(
                f"no records in {files[0].path}" + (" and the others" * (len(files) > 1))
            )
        if index is not None and stored is None:
            store_index(os.fspath(index), kind, files, found)
        self._opened = self._new_files()

    # ---- what a format says ----

    def _options(self) -> str:
        """Options on which the index depends."""
        return ""

    @abstractmethod
    def _open(self, file: DataFile) -> Handle:
        """Open a file; DataError if it is not as it was when indexed."""

    @abstractmethod
    def _blocks(self, file: DataFile, progress: IndexProgress) -> FileBlocks:
        """Find the blocks of a file."""

    @abstractmethod
    def _load(self, handle: Handle, block: Block) -> Loaded:
        """Read a block into memory."""

    def _still_valid(self, handle: Handle) -> None:
        """Raise if what is in memory of a block may be gone; called before each use of it."""

    @abstractmethod
    def _decode(self, loaded: Loaded, block: Block, rows: Sequence[int]) -> list[Any]:
        """Decode rows of a block, counted from its first record; a range if they follow each other."""

    # ---- a map-style data set ----

    def __len__(self) -> int:
        return self._index_of_records.records

    def __getitem__(self, index: SupportsIndex) -> Any:
        record = self._checked(index)
        block, _, loaded = self._block_of(record)
        return self._decode(loaded, block, [record - block.first])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Read several records. Each block is read once, whatever the order of the indices."""
        wanted = list(map(operator.index, indices))
        if not wanted:
            return []
        low, high = min(wanted), max(wanted)
        if low < 0 or high >= self._index_of_records.records:
            return self.__getitems__([self._checked(index) for index in wanted])
        block, _, loaded = self._block_of(wanted[0])
        first = block.first
        if low < first or high > block.last:
            return self._from_blocks(wanted)
        if wanted == list(range(low, low + len(wanted))):
            return self._decode(loaded, block, range(low - first, high - first + 1))
        return self._decode(loaded, block, [record - first for record in wanted])

    def _from_blocks(self, wanted: list[int]) -> list[Any]:
        order = sorted(range(len(wanted)), key=wanted.__getitem__)
        ascending = [wanted[place] for place in order]
        results: list[Any] = [None] * len(wanted)
        at = 0
        while at < len(order):
            block, _, loaded = self._block_of(ascending[at])
            upto = bisect_right(ascending, block.last, at)
            rows = [record - block.first for record in ascending[at:upto]]
            decoded = self._decode(loaded, block, rows)
            for place, record in zip(order[at:upto], decoded, strict=True):
                results[place] = record
            at = upto
        return results

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            yield self[index]

    def fingerprint(self) -> str:
        """Describe the data set so that a changed one is recognised: files, sizes, record counts."""
        return self._index_of_records.fingerprint()

    def where(self, index: SupportsIndex) -> str:
        """Name the file and the place in it of a record, for messages."""
        block = self._index_of_records.find(self._checked(index))
        path = self._index_of_records.files[block.file].path
        return f"{path}, {self._place(block)}, {self._range(block)}"

    # ---- within ----

    def _checked(self, index: SupportsIndex) -> int:
        record = operator.index(index)
        total = self._index_of_records.records
        if 0 <= record < total:
            return record
        if not -total <= record < 0:
            raise IndexError(f"record {record} of {total}")
        return record + total

    def _block_of(self, record: int) -> tuple[Block, Handle, Loaded]:
        opened = self._opened
        if opened.pid != os.getpid():
            opened = self._opened = self._new_files()
        last = opened.last
        if last is None or not last[0].first <= record <= last[0].last:
            block = self._index_of_records.find(record)
            handle = opened.handles.get(block.file)
            if handle is None:
                handle = self._open(self._index_of_records.files[block.file])
                opened.handles.add(block.file, handle)
            loaded = opened.blocks.get(block.number) if self._blocks_cached else None
            if loaded is None:
                loaded = self._load(handle, block)
                if self._blocks_cached:
                    opened.blocks.add(block.number, loaded)
            last = opened.last = (block, handle, loaded)
        self._still_valid(last[1])
        return last

    def _new_files(self) -> ThreadFiles[Handle, Loaded]:
        return ThreadFiles(self._blocks_cached)

    def _file_of(self, block: Block) -> DataFile:
        return self._index_of_records.files[block.file]

    def _place(self, block: Block) -> str:
        return f"bytes {block.place} to {block.stop}"

    def _range(self, block: Block) -> str:
        """Name a block's records, counted in their file."""
        base = self._index_of_records.first_of_file(block.file)
        return f"records {block.first - base} to {block.last - base} of the file"

    def _corrupt(self, block: Block, error: Exception | str) -> DataError:
        return DataError(
            f"{self._file_of(block).path}, {self._place(block)}, {self._range(block)}: {error}. The"
            f" file is corrupt there: write it again, or leave it out"
        )

    def _index(self, files: list[DataFile]) -> list[FileBlocks]:
        progress = IndexProgress(sum(file.size for file in files), len(files))
        found = []
        done = 0
        for file in files:
            found.append(self._blocks(file, progress))
            done += file.size
            progress.file_done(done)
        progress.finished(sum(blocks.records for blocks in found))
        return found

    def _check_schemas(self, files: list[DataFile], found: list[FileBlocks]) -> None:
        described = [(f, b) for f, b in zip(files, found, strict=True) if b.schema]
        for file, blocks in described:
            first, expected = described[0]
            if blocks.schema != expected.schema:
                raise DataError(
                    f"{file.path} has other columns than {first.path}: {blocks.schema}, not"
                    f" {expected.schema}. Leave it out, or convert it"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opened = self._new_files()
