"""Reads CSV: records of text fields, some of them in quotes, which may hold delimiters and line ends.

Where a record ends depends on the quotes before it, so the index is built by reading quotes as Python's
`csv` module does: a quote opens a quoted field only at the field's beginning, and two of them within a
quoted field are one quote.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.data.readers.byte_reader import ByteReader
from holdfast.data.readers.files import (
    DataFile,
    OpenFile,
    Paths,
    read_all_of,
)
from holdfast.data.readers.index import Block, FileBlocks
from holdfast.data.readers.lines import (
    Starts,
    TextBlock,
    byte_range,
    index_records,
    lines_of,
    pieces,
    split_lines,
    text_start,
)
from holdfast.data.readers.progress import IndexProgress
from holdfast.errors import DataError, UsageError

BROKEN = (csv.Error, ValueError, TypeError, ArithmeticError)
"""What a record that is not text, or whose fields are not of their types, raises."""


class CsvReader(ByteReader[TextBlock]):
    """Records of CSV files in UTF-8: a dict of column names and fields, or a list of fields.

    `header`: True if each file begins with the names of its columns; a list of names if files have none
    and these are to be used; False for records that are lists. Fields are strings unless `types` has a
    function for their column, as in `{"label": int}`. Empty lines are no records.
    """

    SUFFIXES = (".csv", ".tsv")

    def __init__(
        self,
        paths: Paths,
        *,
        header: bool | Sequence[str] = True,
        delimiter: str = ",",
        quote: str | None = '"',
        types: Mapping[str, Callable[[str], Any]] | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        self._dialect = CsvDialect(delimiter, quote)
        self._has_header = header is True
        super().__init__(paths, index=index, blocks=0)
        self._names = self._column_names(header)
        self._types = self._types_by_column(types or {})

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the columns, if they have names."""
        return self._names

    def _column_names(self, header: bool | Sequence[str]) -> tuple[str, ...] | None:
        if header is True:
            return tuple(self._dialect.fields(self._index_of_records.schema))
        return tuple(header) if header else None

    def _types_by_column(
        self, types: Mapping[str, Callable[[str], Any]]
    ) -> list[tuple[int, Callable[[str], Any]]]:
        names = self._names or ()
        for name in types:
            if name not in names:
                raise UsageError(
                    f"types has no column to apply to: {name} is not in {', '.join(names)}"
                )
        return [(names.index(name), convert) for name, convert in types.items()]

    def _options(self) -> str:
        return f"{self._dialect.delimiter!r} {self._dialect.quote!r} {self._has_header}"

    def _find_blocks(self, opened: OpenFile, progress: IndexProgress) -> FileBlocks:
        start, header = self._after_header(opened)
        return index_records(opened, start, self._dialect.split, progress, header)

    def _after_header(self, opened: OpenFile) -> tuple[int, str]:
        """Find where records begin, and the header before them; empty if the file has none."""
        start = text_start(opened)
        if not self._has_header:
            return start, ""
        for offset, data, starts in pieces(opened, start, self._dialect.split):
            if len(starts):
                stop = int(starts[1]) if len(starts) > 1 else len(data)
                header = data[int(starts[0]) : stop].strip(b"\r\n")
                return offset + stop, self._header_text(opened.file, header)
        return opened.file.size, ""

    def _header_text(self, file: DataFile, header: bytes) -> str:
        try:
            text = header.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path}, header: not UTF-8 ({error}). Convert the file"
            ) from error
        names = self._dialect.fields(text)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{file.path}, header: {', '.join(twice)} twice. Rename a column")
        return text

    def _load(self, handle: OpenFile, block: Block) -> TextBlock:
        handle.check()
        data = read_all_of(handle, block.place, block.stop)
        return TextBlock(data, self._dialect.records(data))

    def _decode(self, loaded: TextBlock, block: Block, rows: Sequence[int]) -> list[Any]:
        records = self._decode_together(loaded, rows) if len(rows) > 1 else None
        if records is None:
            return [self._record(loaded, block, row) for row in rows]
        return records

    def _decode_together(self, loaded: TextBlock, rows: Sequence[int]) -> list[Any] | None:
        """Decode records the fast way; None if one of them is broken, or of an unusual form."""
        records, names = loaded.records, self._names
        try:
            fields = self._dialect.fields_of_all([records[row].decode() for row in rows])
            if fields is None or names is None:
                return fields
            if any(len(each) != len(names) for each in fields):
                return None
            for column, convert in self._types:
                for each in fields:
                    each[column] = convert(each[column])
        except BROKEN:
            return None
        return [dict(zip(names, each, strict=True)) for each in fields]

    def _record(self, loaded: TextBlock, block: Block, row: int) -> dict[str, Any] | list[Any]:
        try:
            fields: list[Any] = self._dialect.fields(loaded.records[row].decode())
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._broken(loaded, block, row, str(error)) from error
        names = self._names
        if names is None:
            return fields
        if len(fields) != len(names):
            raise self._broken(loaded, block, row, f"{len(fields)} fields, not {len(names)}")
        for column, convert in self._types:
            try:
                fields[column] = convert(fields[column])
            except BROKEN as error:
                raise self._broken(loaded, block, row, f"{names[column]}: {error}") from error
        return dict(zip(names, fields, strict=True))

    def _broken(self, loaded: TextBlock, block: Block, row: int, why: str) -> DataError:
        start, stop = byte_range(loaded, block, row)
        record = block.first + row - self._index_of_records.first_of_file(block.file)
        path = self._file_of(block).path
        return DataError(
            f"{path}, record {record} at bytes {start} to {stop}: {why}. Repair or remove the record"
        )


class CsvDialect:
    """How fields and records are divided."""

    def __init__(self, delimiter: str, quote: str | None) -> None:
        for name, mark in (("delimiter", delimiter), ("quote", quote or '"')):
            if len(mark) != 1 or not mark.isascii() or mark in "\r\n":
                raise UsageError(f"{name} must be one ASCII character, not {mark!r}")
        if delimiter == quote:
            raise UsageError(f"delimiter and quote are the same: {delimiter!r}")
        self.delimiter = delimiter
        self.quote = quote
        self._quote_byte = (quote or "").encode()
        self._record = None if quote is None else _record_pattern(delimiter, quote)

    def split(self, data: bytes, is_end: bool) -> tuple[Starts, int]:
        """Find the records in bytes that begin with one: see `lines.Splitter`."""
        if not self._quote_byte or self._quote_byte not in data:
            return split_lines(data, is_end)
        starts, at = self._quoted(data)
        if is_end and at < len(data):
            # The last record lacks its line end, or its closing quote: then the rest is all its own.
            starts += [at] if data[at:].strip(b"\r\n") else []
            at = len(data)
        return np.array(starts, np.int64), at

    def _quoted(self, data: bytes) -> tuple[list[int], int]:
        """Find complete records with quotes in them: where each starts, and where the last one ends."""
        assert self._record is not None
        match = self._record.match
        starts = []
        at = 0
        while found := match(data, at):
            end = found.end()
            if end - at > 2 or data[at:end].strip(b"\r\n"):
                starts.append(at)
            at = end
        return starts, at

    def records(self, data: bytes) -> list[bytes]:
        """Split a block into records, without their line ends and without empty ones."""
        if not self._quote_byte or self._quote_byte not in data:
            return lines_of(data)
        starts, at = self._quoted(data)
        if data[at:].strip(b"\r\n"):
            # The last record of a file that ends without a line end, or within quotes.
            starts.append(at)
            at = len(data)
        ends = [*starts[1:], at]
        return [data[start:end].rstrip(b"\r\n") for start, end in zip(starts, ends, strict=True)]

    def fields_of_all(self, texts: list[str]) -> list[list[Any]] | None:
        """Divide records into fields; None if they are not one record each."""
        if self.quote is None or not any(self.quote in text for text in texts):
            delimiter = self.delimiter
            return [(t[:-1] if t[-1:] == "\r" else t).split(delimiter) for t in texts]
        marks: dict[str, Any] = {"delimiter": self.delimiter, "quotechar": self.quote}
        parsed = list(csv.reader(texts, strict=True, **marks))
        return parsed if len(parsed) == len(texts) else None

    def fields(self, text: str) -> list[str]:
        if text.endswith("\r"):
            text = text[:-1]
        if self.quote is None or self.quote not in text:
            return text.split(self.delimiter)
        try:
            return self._parsed(text, strict=True)
        except csv.Error as error:
            if "end of data" in str(error):
                raise csv.Error("a quote is not closed") from error
            return self._parsed(text, strict=False)

    def _parsed(self, text: str, strict: bool) -> list[str]:
        rows = csv.reader([text], delimiter=self.delimiter, quotechar=self.quote, strict=strict)
        return next(rows)


def _record_pattern(delimiter: str, quote: str) -> re.Pattern[bytes]:
    """Compile a pattern of one record with its line end.

    A closing quote is one that no other quote follows, so that the pattern cannot match a record in two
    ways, and never takes long to fail.
    """
    d, q = re.escape(delimiter), re.escape(quote)
    quoted = rf"{q}[^{q}]*(?:{q}{q}[^{q}]*)*{q}(?!{q})[^{d}\n]*"
    field = rf"(?:{quoted}|[^{d}{q}\n][^{d}\n]*)?"
    return re.compile(rf"[^{q}\n]*\n|{field}(?:{d}{field})*\n".encode())
