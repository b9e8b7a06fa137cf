"""Reads JSONL: one JSON value a line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.data.readers.byte_reader import ByteReader
from holdfast.data.readers.files import (
    OpenFile,
    Paths,
    read_all_of,
)
from holdfast.data.readers.index import Block, FileBlocks
from holdfast.data.readers.lines import (
    TextBlock,
    byte_range,
    index_records,
    lines_of,
    split_lines,
    text_start,
)
from holdfast.data.readers.progress import IndexProgress
from holdfast.errors import DataError

_decode_fast = msgspec.json.Decoder().decode


class JsonlReader(ByteReader[TextBlock]):
    """Records of JSONL files: whatever JSON value a line has. Empty lines are no records."""

    SUFFIXES = (".jsonl", ".ndjson", ".json")

    def __init__(self, paths: Paths, *, index: str | os.PathLike[str] | None = None) -> None:
        super().__init__(paths, index=index, blocks=0)

    def _find_blocks(self, opened: OpenFile, progress: IndexProgress) -> FileBlocks:
        return index_records(opened, text_start(opened), split_lines, progress)

    def _load(self, handle: OpenFile, block: Block) -> TextBlock:
        handle.check()
        data = read_all_of(handle, block.place, block.stop)
        return TextBlock(data, lines_of(data))

    def _decode(self, loaded: TextBlock, block: Block, rows: Sequence[int]) -> list[Any]:
        lines = loaded.records
        try:
            return [_decode_fast(lines[row]) for row in rows]
        except (msgspec.DecodeError, RecursionError):
            # Python's parser takes what msgspec does not: NaN, Infinity, unpaired surrogates.
            return [self._decode_leniently(loaded, block, row) for row in rows]

    def _decode_leniently(self, loaded: TextBlock, block: Block, row: int) -> Any:
        try:
            return json.loads(loaded.records[row].decode())
        except (ValueError, RecursionError) as error:
            start, stop = byte_range(loaded, block, row)
            record = block.first + row - self._index_of_records.first_of_file(block.file)
            raise DataError(
                f"{self._file_of(block).path}, record {record} at bytes {start} to {stop}: not JSON"
                f" ({error}). Repair or remove the line"
            ) from error
