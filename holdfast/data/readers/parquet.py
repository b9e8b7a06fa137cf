"""Reads Parquet, a row group at a time.

Parquet has no smaller unit: to decode one record, all of its row group is decoded. So the last few row
groups are kept, and a data set should be read in an order that stays within one for a while: order
"shards" of `holdfast.data`, with shards about as large as row groups, rather than "records".
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Any

from holdfast.data.readers.files import DataFile, OpenFile, Paths, is_remote, open_file
from holdfast.data.readers.index import Block, FileBlocks
from holdfast.data.readers.progress import IndexProgress
from holdfast.data.readers.reader import IndexedReader
from holdfast.data.readers.tables import import_pyarrow, rows_of, schema_words
from holdfast.errors import DataError, UsageError


class ParquetFile:
    """A Parquet file, open in one process."""

    def __init__(self, file: DataFile) -> None:
        pyarrow = import_pyarrow("ParquetReader")
        import pyarrow.parquet as parquet

        self.opened: OpenFile = open_file(file)
        source = self.opened.stream() if is_remote(file.path) else file.path
        try:
            # Checksums of pages are verified if the file has them; without them, a flipped bit may
            # decode to another value.
            self.parquet = parquet.ParquetFile(source, page_checksum_verification=True)
        except (pyarrow.ArrowException, OSError) as error:
            self.opened.close()
            raise DataError(
                f"{file.path} ({file.size} bytes) is not a complete Parquet file: {error}. Write it"
                f" again, or leave it out"
            ) from error

    def close(self) -> None:
        self.parquet.close()
        self.opened.close()


class ParquetReader(IndexedReader[ParquetFile, Any]):
    """Records of Parquet files: dicts of column names and Python values.

    `columns` names those to read; others cost nothing. `row_groups` is the number of row groups that
    each process keeps decoded in memory.
    """

    SUFFIXES = (".parquet", ".pq")

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        row_groups: int = 4,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(columns, str) or (columns is not None and not columns):
            raise UsageError(f"columns must be a list of names, not {columns!r}")
        if row_groups < 1:
            raise UsageError(f"row_groups must be at least 1, not {row_groups}")
        self._columns = None if columns is None else list(columns)
        super().__init__(paths, index=index, blocks=row_groups)

    def _options(self) -> str:
        return repr(self._columns)

    def _open(self, file: DataFile) -> ParquetFile:
        return ParquetFile(file)

    def _blocks(self, file: DataFile, progress: IndexProgress) -> FileBlocks:
        handle = ParquetFile(file)
        try:
            metadata = handle.parquet.metadata
            schema = self._schema(file, handle.parquet.schema_arrow)
            counts = [
                metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)
            ]
        finally:
            handle.close()
        blocks = FileBlocks(array("Q"), array("Q"), 0, len(counts), schema)
        for group, count in enumerate(counts):
            if count:
                blocks.places.append(group)
                blocks.firsts.append(blocks.records)
                blocks.records += count
        return blocks

    def _schema(self, file: DataFile, schema: Any) -> str:
        if self._columns is None:
            return schema_words(schema)
        missing = [name for name in self._columns if name not in schema.names]
        if missing:
            raise DataError(
                f"{file.path} has no column {', '.join(missing)}; it has {', '.join(schema.names)}"
            )
        return schema_words([schema.field(name) for name in self._columns])

    def _load(self, handle: ParquetFile, block: Block) -> Any:
        import pyarrow

        handle.opened.check()
        try:
            table = handle.parquet.read_row_group(
                block.place, columns=self._columns, use_threads=False
            )
            return table.combine_chunks()
        except (pyarrow.ArrowException, OSError) as error:
            handle.opened.check()
            raise self._corrupt(block, error) from error

    def _decode(self, loaded: Any, block: Block, rows: Sequence[int]) -> list[Any]:
        try:
            return rows_of(loaded, rows)
        except UnicodeDecodeError as error:
            raise self._corrupt(block, error) from error

    def _place(self, block: Block) -> str:
        return f"row group {block.place}"
