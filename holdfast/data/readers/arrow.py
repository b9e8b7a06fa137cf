"""Reads Arrow IPC files and streams, a record batch at a time.

Files on this machine are mapped into memory: of a batch that is not compressed, only the pages of the
records that are read are touched. Two things would crash the process, and are looked at before each
use: a mapped file that shrank (SIGBUS), and offsets of corrupt text, which lead anywhere in memory.
Arrow has no checksums, so a corrupt number stays unnoticed.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.data.readers.files import DataFile, OpenFile, Paths, is_remote, open_file
from holdfast.data.readers.index import Block, FileBlocks
from holdfast.data.readers.progress import IndexProgress
from holdfast.data.readers.reader import IndexedReader
from holdfast.data.readers.tables import import_pyarrow, rows_of, runs, schema_words
from holdfast.errors import DataError, UsageError

FILE_MAGIC = b"ARROW1"
RUNS_VALIDATED = 8
"""Most runs of rows of a batch that are validated one by one; for more, all of the batch is."""


class ArrowFile:
    """An IPC file or stream, open in one process."""

    def __init__(self, file: DataFile) -> None:
        self.pyarrow = import_pyarrow("ArrowReader")
        self.file = file
        self.opened: OpenFile = open_file(file)
        try:
            if not file.size:
                raise DataError(
                    f"{file.path} is empty, not an Arrow file. Write it again or leave it out"
                )
            self.is_stream = self.opened.read(0, len(FILE_MAGIC)) != FILE_MAGIC
            self.source = self._source()
            self.reader = self._reader()
            self.is_deep = _is_deep(self.pyarrow.types, self.reader.schema)
        except BaseException:
            self.opened.close()
            raise

    def _source(self) -> Any:
        if is_remote(self.file.path):
            return self.pyarrow.PythonFile(self.opened.stream(), mode="r")
        return self.pyarrow.memory_map(self.file.path)

    def _reader(self, fields: list[int] | None = None) -> Any:
        ipc = self.pyarrow.ipc
        try:
            if self.is_stream:
                return ipc.open_stream(self.source)
            options = ipc.IpcReadOptions(use_threads=False, included_fields=fields)
            return ipc.open_file(self.source, options=options)
        except (self.pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self.file.path} ({self.file.size} bytes) is not a complete Arrow file: {error}."
                f" Write it again, or leave it out"
            ) from error

    @property
    def schema(self) -> Any:
        return self.reader.schema

    def counts(self) -> Iterator[tuple[int, int]]:
        """Go through the batches: where each is, and how many records it has."""
        if self.is_stream:
            yield from self._counts_of_stream()
            return
        # The other columns are neither read nor decompressed.
        narrow = (
            self._reader([_cheapest(self.pyarrow.types, self.schema)])
            if len(self.schema)
            else self.reader
        )
        for number in range(narrow.num_record_batches):
            yield number, narrow.get_batch(number).num_rows

    def _counts_of_stream(self) -> Iterator[tuple[int, int]]:
        self.source.seek(0)
        while True:
            place = self.source.tell()
            try:
                message = self.pyarrow.ipc.read_message(self.source)
            except EOFError:
                # A stream should end with a marker, but may end without one.
                return
            if message.type == "dictionary":
                raise DataError(
                    f"{self.file.path} is an Arrow stream with dictionary-encoded columns, of which no"
                    f" batch can be read without those before it: write it in the IPC file format"
                )
            if message.type == "record batch":
                yield place, self.pyarrow.ipc.read_record_batch(message, self.schema).num_rows

    def batch(self, place: int) -> Any:
        if not self.is_stream:
            return self.reader.get_batch(place)
        self.source.seek(place)
        return self.pyarrow.ipc.read_record_batch(
            self.pyarrow.ipc.read_message(self.source), self.schema
        )

    def close(self) -> None:
        # The map stays as long as a batch in memory uses it.
        self.source.close()
        self.opened.close()


class LoadedBatch:
    """A record batch, and whether all of it was validated. If not, rows are when they are decoded."""

    def __init__(self, batch: Any, is_deep: bool) -> None:
        self.batch = batch
        self.is_valid = False
        if is_deep:
            self.validate()

    def validate(self) -> None:
        self.batch.validate(full=True)
        self.is_valid = True

    def decode(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        if not self.is_valid:
            together = runs(rows)
            if len(together) > RUNS_VALIDATED:
                self.validate()
            else:
                for first, count in together:
                    self.batch.slice(first, count).validate(full=True)
        return rows_of(self.batch, rows)


class ArrowReader(IndexedReader[ArrowFile, LoadedBatch]):
    """Records of Arrow IPC files and streams: dicts of column names and Python values.

    `batches` is the number of record batches that each process keeps. Those of a compressed file are
    kept decompressed.
    """

    SUFFIXES = (".arrow", ".feather", ".ipc", ".arrows")

    def __init__(
        self,
        paths: Paths,
        *,
        batches: int = 16,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        if batches < 1:
            raise UsageError(f"batches must be at least 1, not {batches}")
        super().__init__(paths, index=index, blocks=batches)

    def _open(self, file: DataFile) -> ArrowFile:
        return ArrowFile(file)

    def _blocks(self, file: DataFile, progress: IndexProgress) -> FileBlocks:
        handle = ArrowFile(file)
        blocks = FileBlocks(array("Q"), array("Q"), 0, file.size, schema_words(handle.schema))
        number = 0
        try:
            for place, count in handle.counts():
                number += 1
                if count:
                    blocks.places.append(place)
                    blocks.firsts.append(blocks.records)
                    blocks.records += count
                    progress.advance(0)
        except (handle.pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{file.path}, record batch {number}, after {blocks.records} records: {error}. The file"
                f" is corrupt there: write it again, or leave it out"
            ) from error
        finally:
            handle.close()
        return blocks

    def _load(self, handle: ArrowFile, block: Block) -> LoadedBatch:
        handle.opened.check()
        try:
            return LoadedBatch(handle.batch(block.place), handle.is_deep)
        except (handle.pyarrow.ArrowException, OSError, EOFError) as error:
            handle.opened.check()
            raise self._corrupt(block, error) from error

    def _still_valid(self, handle: ArrowFile) -> None:
        handle.opened.check()

    def _decode(self, loaded: LoadedBatch, block: Block, rows: Sequence[int]) -> list[Any]:
        try:
            return loaded.decode(rows)
        except (ValueError, OSError, LookupError, NotImplementedError, MemoryError) as error:
            # pyarrow's errors are among them; so is text that is not UTF-8.
            raise self._corrupt(block, error) from error

    def _place(self, block: Block) -> str:
        return f"record batch at {block.place}"


def _is_deep(types: Any, schema: Any) -> bool:
    """Say whether validating some rows of a batch costs as much as validating all of it.

    So it is where lists hold what has offsets of its own: a list's values are validated all together.
    """
    return any(
        types.is_nested(field.type)
        and not all(
            types.is_primitive(field.type.field(child).type)
            for child in range(field.type.num_fields)
        )
        for field in schema
    )


def _cheapest(types: Any, schema: Any) -> int:
    """Choose the column that costs least to read, to learn a batch's number of records."""
    for number, field in enumerate(schema):
        if types.is_primitive(field.type):
            return number
    return 0
