"""CSV, JSONL and tar: whatever a writer can write is read back, at any index."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.data.readers import TAR_DECODERS, CsvReader, JsonlReader, TarReader

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FIELDS = st.text(st.sampled_from('a,;"\n\r\t é✓'), max_size=10) | TEXT
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have records lie across the pieces and cells in which files are indexed."""
    monkeypatch.setattr("holdfast.data.readers.lines.CHUNK_BYTES", 16)
    monkeypatch.setattr("holdfast.data.readers.lines.CELL_BYTES", 24)


@given(
    records=st.lists(st.lists(FIELDS, min_size=2, max_size=2), min_size=1, max_size=30),
    line_end=st.sampled_from(["\n", "\r\n"]),
    delimiter=st.sampled_from([",", ";", "\t"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    last_end=st.booleans(),
    mark=st.booleans(),
)
def test_any_csv_that_python_writes_is_read_back(
    folder: Path,
    records: list[list[str]],
    line_end: str,
    delimiter: str,
    quoting: Any,
    last_end: bool,
    mark: bool,
) -> None:
    # A bare "\r" is a line end for some readers; Python quotes it only if told to quote all.
    assume(quoting == csv.QUOTE_ALL or not any("\r" in field for each in records for field in each))
    stream = io.StringIO()
    writer = csv.writer(stream, delimiter=delimiter, lineterminator=line_end, quoting=quoting)
    writer.writerows([["one", "two"], *records])
    text = stream.getvalue() if last_end else stream.getvalue().removesuffix(line_end)
    path = folder / "any.csv"
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    expected = [dict(zip(("one", "two"), each, strict=True)) for each in records]
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_pieces(monkeypatch)
        reader = CsvReader(path, delimiter=delimiter)
    assert len(reader) == len(expected)
    for index in reversed(range(len(expected))):
        assert reader[index] == expected[index]
    assert reader.__getitems__(range(len(expected))) == expected


@given(
    lines=st.lists(st.text(st.sampled_from('a,"\n é'), max_size=12), min_size=1, max_size=8),
)
def test_any_text_is_divided_as_python_divides_it(folder: Path, lines: list[str]) -> None:
    """Also what no writer would write: quotes within fields, after quoted fields, and unclosed."""
    text = "\n".join(lines) + "\n"
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    unclosed = ends_within_quotes(text)
    path = folder / "odd.csv"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_pieces(monkeypatch)
        if not rows:
            return
        reader = CsvReader(path, header=False)
    assert len(reader) == len(rows)
    last = len(rows) - 1 if unclosed else len(rows)
    assert [reader[index] for index in range(last)] == rows[:last]


def ends_within_quotes(text: str) -> bool:
    try:
        list(csv.reader(io.StringIO(text + '"\n', newline=""), strict=False))
        closed = list(csv.reader(io.StringIO(text, newline="")))
        longer = list(csv.reader(io.StringIO(text + "x\n", newline="")))
    except csv.Error:
        return True
    return len([row for row in longer if row]) == len([row for row in closed if row])


def test_headers_may_be_given_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("1\tx\n\n2\ty\n")
    assert list(CsvReader(path, header=False, delimiter="\t")) == [["1", "x"], ["2", "y"]]
    reader = CsvReader(path, header=["n", "s"], delimiter="\t", types={"n": float})
    assert list(reader) == [{"n": 1.0, "s": "x"}, {"n": 2.0, "s": "y"}]
    assert reader.columns == ("n", "s")


def test_quotes_mean_nothing_where_quoting_is_off(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('a\tb\n5" disk\t"open\n')
    assert list(CsvReader(path, delimiter="\t", quote=None)) == [{"a": '5" disk', "b": '"open'}]


@given(
    records=st.lists(JSON, min_size=1, max_size=30),
    ascii_only=st.booleans(),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last_end=st.booleans(),
    mark=st.booleans(),
)
def test_any_json_that_python_writes_is_read_back(
    folder: Path,
    records: list[Any],
    ascii_only: bool,
    line_end: str,
    last_end: bool,
    mark: bool,
) -> None:
    lines = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    text = line_end.join(lines) + (line_end if last_end else "")
    path = folder / "any.jsonl"
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_pieces(monkeypatch)
        reader = JsonlReader(path)
    assert len(reader) == len(records)
    for index in reversed(range(len(records))):
        assert reader[index] == records[index]


def test_json_that_only_python_takes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('[Infinity, -Infinity]\n"\\ud800"\n')
    assert list(JsonlReader(path)) == [[float("inf"), float("-inf")], "\ud800"]


# ---- tar ----------------------------------------------------------------------------------------


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_grouped_by_the_name_up_to_the_first_dot(tmp_path: Path, form: int) -> None:
    long = "d" * 60 + "/" + "k" * 90
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        folder = tarfile.TarInfo("some")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        add(archive, "some/v1.0/a.JPG", b"\xff\xd8")
        add(archive, "some/v1.0/a.seg.npy", b"")
        add(archive, "some/v1.0/b.jpg", b"")
        add(archive, "README", b"no part of a sample")
        add(archive, "some/.hidden.jpg", b"nor is this")
        add(archive, f"{long}.txt", b"last")
    assert list(TarReader(tmp_path)) == [
        {"__key__": "some/v1.0/a", "jpg": b"\xff\xd8", "seg.npy": b""},
        {"__key__": "some/v1.0/b", "jpg": b""},
        {"__key__": long, "txt": b"last"},
    ]


def test_names_of_members_may_be_in_any_language(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(5):
            add(archive, f"Übung/日本{number}.txt", b"x")
    assert TarReader(tmp_path)[3]["__key__"] == "Übung/日本3"


def test_fields_are_decoded_by_their_extension(tmp_path: Path) -> None:
    import numpy

    stream = io.BytesIO()
    numpy.save(stream, numpy.arange(6).reshape(2, 3))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "0.json", b'{"a": [1]}')
        add(archive, "0.caption.txt", "grün".encode())
        add(archive, "0.cls", b"17")
        add(archive, "0.mask.npy", stream.getvalue())
        add(archive, "0.jpg", b"\xff")
    (sample,) = TarReader(tmp_path, decoders={**TAR_DECODERS, "jpg": len})
    assert sample.pop("mask.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    expected = {"__key__": "0", "json": {"a": [1]}, "caption.txt": "grün", "cls": 17, "jpg": 1}
    assert sample == expected
