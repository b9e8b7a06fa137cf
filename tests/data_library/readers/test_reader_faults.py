"""Files that are broken or change under a reader: each error names the file, and where in it."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
from data_samples import (
    FORMATS,
    Sample,
    make,
    records_of,
    write_arrow,
    write_csv,
    write_jsonl,
    write_tar,
)

from holdfast.data.readers import (
    TAR_DECODERS,
    ArrowReader,
    CsvReader,
    JsonlReader,
    ParquetReader,
    TarReader,
)
from holdfast.errors import DataError, UsageError

MIDDLE = 300
"""A record in the third file, which has 700 records that follow one of the second."""


def fresh(reader: Any) -> Any:
    """The reader as a loader process gets it: without open files."""
    return pickle.loads(pickle.dumps(reader))


def test_a_vanished_file_is_named(sample: Sample) -> None:
    reader = sample.format.open(sample.folder)
    sample.files[2].unlink()
    with pytest.raises(DataError, match=rf"{sample.files[2]} is not there: restore it"):
        fresh(reader)[MIDDLE]
    assert fresh(reader)[0] == sample.records[0]


def test_a_file_that_was_not_there_to_begin_with_is_named(sample: Sample) -> None:
    with pytest.raises(DataError, match=r"missing\..* is not there"):
        sample.format.open([*sample.files, sample.folder / f"missing{sample.format.suffix}"])
    with pytest.raises(DataError, match="no file matches"):
        sample.format.open(str(sample.folder / "other-*"))


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_shrunk_file_is_named_with_both_sizes(sample: Sample, is_open: bool) -> None:
    reader = sample.format.open(sample.folder)
    if is_open:
        reader[MIDDLE]
    else:
        reader = fresh(reader)
    size = sample.files[2].stat().st_size
    os.truncate(sample.files[2], size // 2)
    with pytest.raises(DataError, match=rf"{sample.files[2]} shrank .*{size} to {size // 2} bytes"):
        reader[MIDDLE + 150]


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_a_grown_file_is_named_with_both_sizes(sample: Sample, is_open: bool) -> None:
    reader = sample.format.open(sample.folder)
    if is_open:
        reader[MIDDLE]
    else:
        reader = fresh(reader)
    size = sample.files[2].stat().st_size
    with sample.files[2].open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(DataError, match=rf"{sample.files[2]} grew .*{size} to {size + 4} bytes"):
        reader[MIDDLE + 150]


def test_a_file_that_was_rewritten_with_the_same_size_is_named(sample: Sample) -> None:
    reader = fresh(sample.format.open(sample.folder))
    status = sample.files[2].stat()
    os.utime(sample.files[2], ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    with pytest.raises(DataError, match=rf"{sample.files[2]} changed .*same size"):
        reader[MIDDLE]


def test_a_file_that_is_named_twice_is_refused(sample: Sample) -> None:
    with pytest.raises(DataError, match=r"part-002.* is named twice"):
        sample.format.open([sample.folder, sample.files[2]])


def test_files_without_any_record_are_refused(sample: Sample) -> None:
    with pytest.raises(DataError, match=rf"no records in {sample.files[0]}"):
        sample.format.open(sample.files[0])


@pytest.mark.parametrize("name", ["parquet", "arrow", "tar"])
@pytest.mark.parametrize("content", [b"", bytes(range(256)) * 20], ids=["empty", "garbage"])
def test_files_of_another_format_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / f"bad{FORMATS[name].suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path}.*(again|leave it out)"):
        FORMATS[name].open(path)


def test_compressed_text_and_tar_files_are_refused_by_name(tmp_path: Path) -> None:
    for name, reader in (("a.jsonl", JsonlReader), ("a.csv", CsvReader), ("a.tar", TarReader)):
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress(b'{"a": 1}\n' * 9))
        with pytest.raises(DataError, match=rf"{name}\.gz is compressed \(gzip\).*decompress it"):
            reader(path)


# ---- corrupt in the middle ----------------------------------------------------------------------


def flip(path: Path, start: int, count: int = 64) -> None:
    """Change bytes as a bad disk does: size and time of change stay."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[start : start + count] = bytes(255 - byte for byte in data[start : start + count])
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_line_of_garbage_in_jsonl_is_named_by_record_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b'{"n": %d}' % n for n in range(2000)]
    lines[1234] = b'{"n": 12\xff34'
    path.write_bytes(b"\n".join(lines))
    start = sum(len(line) + 1 for line in lines[:1234])
    where = rf"{path}, record 1234 at bytes {start} to {start + len(lines[1234])}: not JSON"
    reader = JsonlReader(path)
    with pytest.raises(DataError, match=where):
        reader[1234]
    with pytest.raises(DataError, match=where):
        reader.__getitems__([1233, 1234, 1235])
    assert reader.__getitems__([1233, 1235]) == [{"n": 1233}, {"n": 1235}]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (b"1,2,3", "3 fields, not 2"),
        (b"x,2", r"a: invalid literal for int\(\)"),
        (b"1,\xff", "can't decode byte 0xff"),
    ],
)
def test_a_broken_record_in_csv_is_named_by_record_and_bytes(
    tmp_path: Path, record: bytes, why: str
) -> None:
    path = tmp_path / "a.csv"
    good = [b'%d,"x\ny"' % n for n in range(1000)]
    before = b"a,b\n" + b"".join(line + b"\n" for line in good[:500])
    path.write_bytes(before + record + b"\n" + b"\n".join(good[500:]))
    reader = CsvReader(path, types={"a": int})
    assert len(reader) == 1001
    bounds = f"bytes {len(before)} to {len(before) + len(record)}"
    with pytest.raises(DataError, match=rf"{path}, record 500 at {bounds}: .*{why}"):
        reader[500]
    assert reader[501] == {"a": 500, "b": "x\ny"}


def test_a_quote_that_is_never_closed_is_an_error_at_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n3,"4\n5,6\n')
    reader = CsvReader(path)
    assert reader[0] == {"a": "1", "b": "2"}
    with pytest.raises(DataError, match=r"record 1 at bytes 8 to 16: a quote is not closed"):
        reader[1]


def test_a_record_without_end_is_refused_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.data.readers.lines.CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr("holdfast.data.readers.lines.MAX_RECORD_BYTES", 1 << 16)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1,2\n" * 1000 + '3,"4\n' + "5,6\n" * 100_000)
    with pytest.raises(DataError, match="record at byte 4004 is longer than"):
        CsvReader(path)


def test_a_corrupt_page_of_parquet_is_named_by_row_group_and_records(tmp_path: Path) -> None:
    import pyarrow.parquet

    sample = make("parquet", tmp_path, [50, 700])
    path = sample.files[1]
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(3).column(1)
    reader = ParquetReader(tmp_path)
    start = column.dictionary_page_offset or column.data_page_offset
    flip(path, start + column.total_compressed_size // 2, 8)
    where = rf"{path}, row group 3, records 300 to 399 of the file: .*corrupt"
    with pytest.raises(DataError, match=where):
        reader[50 + 333]
    assert fresh(reader)[50 + 299] == sample.records[50 + 299]
    assert fresh(reader)[50 + 400] == sample.records[50 + 400]


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    sample = make("parquet", tmp_path, [50, 700])
    os.truncate(sample.files[1], sample.files[1].stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{sample.files[1]} .*not a complete Parquet file"):
        ParquetReader(tmp_path)


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_a_corrupt_batch_of_arrow_is_named_by_batch_and_records(
    tmp_path: Path, stream: bool
) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, records_of(700, 1), stream)
    reader = ArrowReader(path)
    # Text buffers and the offsets into them lie behind the batch's header.
    size = path.stat().st_size
    flip(path, size // 2 - 2000, 4000)
    where = rf"{path}, record batch at \d+, records \d+ to \d+ of the file: "
    with pytest.raises(DataError, match=where):
        list(reader)


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_no_corrupt_byte_of_arrow_crashes_the_process(tmp_path: Path, stream: bool) -> None:
    """Arrow has no checksums: what is wrong is an error or another value, and never a crash."""
    path = tmp_path / "a.arrow"
    write_arrow(path, records_of(300, 1), stream)
    reader = ArrowReader(path)
    good = path.read_bytes()
    status = path.stat()
    chance = random.Random(1)
    failures = 0
    for _ in range(40):
        path.write_bytes(good)
        flip(path, chance.randrange(len(good)), chance.choice([1, 4, 64, 1000]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with contextlib.suppress(DataError):
            list(fresh(reader))
            failures -= 1
        failures += 1
    assert failures > 5


@pytest.mark.parametrize("stream", [False, True], ids=["file", "stream"])
def test_a_truncated_arrow_file_is_named(tmp_path: Path, stream: bool) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, records_of(700, 1), stream)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{path}.*(not a complete Arrow file|record batch \d)"):
        ArrowReader(path)


def test_an_arrow_stream_with_dictionaries_is_refused_with_a_remedy(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.table({"a": pyarrow.array(["x", "y", "x"]).dictionary_encode()})
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"dictionary-encoded .*IPC file format"):
        ArrowReader(tmp_path)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    assert list(ArrowReader(tmp_path)) == [{"a": "x"}, {"a": "y"}, {"a": "x"}]


def test_a_compressed_arrow_file_is_read(tmp_path: Path) -> None:
    import pyarrow

    records = records_of(500, 1)
    table = pyarrow.Table.from_pylist(records)
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=64)
    assert list(ArrowReader(tmp_path)) == records


@pytest.mark.parametrize("within", ["data", "header", "between"])
def test_a_truncated_tar_is_named_with_the_byte(tmp_path: Path, within: str) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [{"bin": "x" * 2000}] * 50)
    member = 512 + 2048
    cut = 20 * member + {"data": 1000, "header": 100, "between": 0}[within]
    os.truncate(path, cut)
    with pytest.raises(DataError, match=rf"{path}.*\b({20 * member}|{cut})\b"):
        TarReader(path)


def test_a_corrupt_header_in_a_tar_is_named_with_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [{"bin": "x" * 2000, "txt": "y"}] * 50)
    reader = TarReader(path)
    sample = 512 + 2048 + 512 + 512
    at = 20 * sample + 512 + 2048
    flip(path, at)
    where = rf"{path}, bytes {20 * sample} to {21 * sample}, records 20 to 20 of the file: "
    with pytest.raises(DataError, match=where + "a member's header is broken"):
        reader[20]
    with pytest.raises(DataError, match=rf"bytes {at} to \d+ are neither a member nor the end"):
        TarReader(path)


def test_archives_that_were_joined_in_one_file_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", records_of(3, 1))
    joined = (tmp_path / "a.tar").read_bytes() * 2
    (tmp_path / "b.tar").write_bytes(joined)
    with pytest.raises(DataError, match=r"b\.tar: bytes .*several archives in one file"):
        TarReader(tmp_path)


def test_a_field_that_a_decoder_refuses_is_named_by_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [{"cls": "7"}, {"cls": "seven"}])
    reader = TarReader(tmp_path, decoders=TAR_DECODERS)
    assert reader[0]["cls"] == 7
    with pytest.raises(DataError, match=r"sample folder/000001, field cls: ValueError"):
        reader[1]


def test_a_pickle_in_a_numpy_file_is_refused(tmp_path: Path) -> None:
    import numpy

    stream = io.BytesIO()
    numpy.save(stream, numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("0.npy")
        member.size = len(stream.getvalue())
        archive.addfile(member, io.BytesIO(stream.getvalue()))
    with pytest.raises(DataError, match="allow_pickle"):
        TarReader(tmp_path, decoders=TAR_DECODERS)[0]


# ---- other schemas ------------------------------------------------------------------------------


def test_a_csv_file_with_another_header_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", records_of(3, 1))
    (tmp_path / "b.csv").write_text("id,words\n1,2\n")
    with pytest.raises(DataError, match=r"b\.csv has other columns than .*a\.csv: id,words, not"):
        CsvReader(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_with_another_schema_is_named(tmp_path: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    write: Any = {
        "parquet": pyarrow.parquet.write_table,
        "arrow": pyarrow.feather.write_feather,
    }[kind]
    reader: Any = {"parquet": ParquetReader, "arrow": ArrowReader}[kind]
    write(pyarrow.table({"a": [1], "b": ["x"]}), tmp_path / f"1.{kind}")
    write(pyarrow.table({"a": [1.5], "b": ["x"]}), tmp_path / f"2.{kind}")
    message = rf"2\.{kind} has other columns than .*1\.{kind}: a: double, b: string, not a: int64"
    with pytest.raises(DataError, match=message):
        reader(tmp_path)
    if kind == "parquet":
        assert list(ParquetReader(tmp_path, ["b"])) == [{"b": "x"}, {"b": "x"}]
        with pytest.raises(DataError, match=r"1\.parquet has no column c; it has a, b"):
            ParquetReader(tmp_path, ["c"])


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"delimiter": ",,"}, "delimiter must be one ASCII character"),
        ({"delimiter": '"'}, "delimiter and quote are the same"),
        ({"types": {"c": int}}, "c is not in id, text"),
    ],
)
def test_wrong_options_of_csv_are_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    write_csv(tmp_path / "a.csv", records_of(3, 1))
    with pytest.raises(UsageError, match=why):
        CsvReader(tmp_path, **options)


def test_wrong_options_of_parquet_and_arrow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="columns must be a list"):
        ParquetReader(tmp_path, "id")
    with pytest.raises(UsageError, match="row_groups must be at least 1"):
        ParquetReader(tmp_path, row_groups=0)
    with pytest.raises(UsageError, match="batches must be at least 1"):
        ArrowReader(tmp_path, batches=0)


def test_a_folder_without_files_of_the_format_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", records_of(3, 1))
    with pytest.raises(DataError, match=rf"no \.csv or \.tsv files in {tmp_path}"):
        CsvReader(tmp_path)
    with pytest.raises(DataError, match="an empty list of paths"):
        CsvReader([])
