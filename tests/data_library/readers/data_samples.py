"""Data sets of each format, with what a naive reading of them gives."""

from __future__ import annotations

import csv
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.data.readers import (
    ArrowReader,
    CsvReader,
    JsonlReader,
    ParquetReader,
    TarReader,
)

WORDS = ["plain", "ünïcödé ✓", "two\nlines", 'quo"ted', "a,b", "", "日本語\r\nnext", " spaces "]
SIZES = [0, 1, 700, 0, 1, 1, 3, 250, 0]
"""Records of the files of a data set: empty ones and ones with a single record among them."""

Records = list[dict[str, Any]]


def records_of(count: int, seed: int) -> Records:
    chance = random.Random(seed)
    return [
        {"id": str(chance.randrange(10**9)), "text": chance.choice(WORDS) * chance.randrange(4)}
        for _ in range(count)
    ]


def write_jsonl(path: Path, records: Records) -> None:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def write_csv(path: Path, records: Records) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["id", "text"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path: Path, records: Records) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(records, schema=schema())
    pyarrow.parquet.write_table(table, path, row_group_size=100, write_page_checksum=True)


def write_arrow(path: Path, records: Records, stream: bool = False) -> None:
    import pyarrow

    new = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    table = pyarrow.Table.from_pylist(records, schema=schema())
    with new(path, schema()) as writer:
        writer.write_table(table, max_chunksize=100)


def write_arrow_stream(path: Path, records: Records) -> None:
    write_arrow(path, records, stream=True)


def schema() -> Any:
    import pyarrow

    return pyarrow.schema([("id", pyarrow.string()), ("text", pyarrow.string())])


def write_tar(path: Path, records: Records) -> None:
    with tarfile.open(path, "w") as archive:
        for number, record in enumerate(records):
            for field, value in record.items():
                data = value.encode()
                member = tarfile.TarInfo(f"folder/{number:06}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


class Format(NamedTuple):
    suffix: str
    write: Callable[[Path, Records], None]
    open: Callable[..., Any]
    naive: Callable[[Records], Records]
    """Records as the reader gives them."""


def as_they_are(records: Records) -> Records:
    return records


def as_samples(records: Records) -> Records:
    return [
        {"__key__": f"folder/{number:06}", **{name: value.encode() for name, value in each.items()}}
        for number, each in enumerate(records)
    ]


FORMATS = {
    "jsonl": Format(".jsonl", write_jsonl, JsonlReader, as_they_are),
    "csv": Format(".csv", write_csv, CsvReader, as_they_are),
    "parquet": Format(".parquet", write_parquet, ParquetReader, as_they_are),
    "arrow": Format(".arrow", write_arrow, ArrowReader, as_they_are),
    "arrow-stream": Format(".arrow", write_arrow_stream, ArrowReader, as_they_are),
    "tar": Format(".tar", write_tar, TarReader, as_samples),
}


class Sample(NamedTuple):
    """A data set on disk."""

    format: Format
    folder: Path
    files: list[Path]
    records: Records


def make(name: str, folder: Path, sizes: list[int] = SIZES) -> Sample:
    each = FORMATS[name]
    files, expected = [], []
    for number, size in enumerate(sizes):
        path = folder / f"part-{number:03}{each.suffix}"
        records = records_of(size, number)
        each.write(path, records)
        files.append(path)
        expected += each.naive(records)
    return Sample(each, folder, files, expected)
