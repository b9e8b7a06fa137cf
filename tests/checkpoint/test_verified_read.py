"""What is read is what was written, or it is refused."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import flip, small_blocks

from holdfast.checkpoint.restore import verified_read as reading
from holdfast.checkpoint.restore.verified_read import Alternatives, FileSource, Piece, Want, read
from holdfast.checkpoint.state.layout import ByteSpan, block_digests
from holdfast.errors import Unusable, WireError

SIZE = 10_000
DATA = random.Random(1).randbytes(SIZE)


@pytest.fixture(autouse=True)
def _blocks_of_one_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr(reading, "_AT_ONCE_BYTES", 300)


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    (tmp_path / "file").write_bytes(b"head" + DATA)
    digests = block_digests(memoryview(DATA))
    return FileSource.of_image(tmp_path / "file", 4, SIZE, digests)


class Targets:
    """Memory for what is wanted."""

    def __init__(self) -> None:
        self.wants: list[Want] = []
        self.pieces: list[Piece] = []
        self._filled: list[tuple[ByteSpan, Any, list[int]]] = []

    def want(self, at: int, size: int) -> None:
        memory, arrived = bytearray(size), []
        want = Want(ByteSpan(at, size), lambda: memoryview(memory), lambda: arrived.append(1))
        self.wants.append(want)
        self._filled.append((want.span, memory, arrived))

    def piece(self, at: int, size: int) -> None:
        memory = ctypes.create_string_buffer(size) if size else b""
        address = ctypes.addressof(memory) if size else 0  # type: ignore[arg-type]
        self.pieces.append((at, size, address))
        self._filled.append((ByteSpan(at, size), memory, [1]))

    def check(self, data: bytes = DATA) -> None:
        for span, memory, arrived in self._filled:
            assert bytes(memory)[: span.size] == data[span.at : span.end]
            assert arrived == [1]


SPANS = st.lists(
    st.tuples(st.integers(0, SIZE), st.integers(0, 3000), st.booleans()), max_size=12
).map(lambda spans: [(at, min(size, SIZE - at), small) for at, size, small in spans])


@given(spans=SPANS, threads=st.booleans())
def test_any_parts_can_be_read_even_where_they_overlap(
    tmp_path_factory: pytest.TempPathFactory, spans: Any, threads: bool
) -> None:
    path = tmp_path_factory.mktemp("read") / "file"
    path.write_bytes(DATA)
    source = FileSource.of_image(path, 0, SIZE, block_digests(memoryview(DATA)))
    targets = Targets()
    for at, size, small in spans:
        (targets.piece if small else targets.want)(at, size)
    with ThreadPoolExecutor(2) as pool:
        read(source, targets.wants, pool if threads else None, targets.pieces)
    targets.check()
    source.close()


@given(at=st.integers(0, SIZE - 1), wanted=st.integers(0, SIZE - 1))
def test_a_flipped_byte_is_noticed_where_it_is_in_a_block_that_is_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, wanted: int
) -> None:
    path = tmp_path_factory.mktemp("read") / "file"
    path.write_bytes(DATA)
    flip(path, at)
    source = FileSource.of_image(path, 0, SIZE, block_digests(memoryview(DATA)))
    targets = Targets()
    targets.want(wanted, 1)
    if at // 1024 == wanted // 1024:
        with pytest.raises(
            Unusable, match=rf"block {at // 1024} of 10 is not what its digest says"
        ):
            read(source, targets.wants)
    else:
        read(source, targets.wants)
        targets.check()
    source.close()


def test_nothing_small_lands_before_it_is_verified(source: FileSource, tmp_path: Path) -> None:
    flip(tmp_path / "file", 4 + 1000)
    memory = ctypes.create_string_buffer(b"untouched")
    with pytest.raises(Unusable):
        read(source, [], pieces=[(10, 5, ctypes.addressof(memory))])
    assert memory.value == b"untouched"


def test_nobody_is_told_of_what_is_damaged(source: FileSource, tmp_path: Path) -> None:
    flip(tmp_path / "file", 4 + 1500)
    arrived: list[int] = []
    wants = [
        Want(
            ByteSpan(at, 800), lambda: memoryview(bytearray(800)), lambda at=at: arrived.append(at)
        )  # type: ignore[misc]
        for at in (0, 1000, 3000)
    ]
    with pytest.raises(Unusable):
        read(source, wants)
    assert arrived == [0]


@pytest.mark.parametrize("left", [0, 5, 1000, 5000, SIZE + 3])
def test_a_source_that_ends_too_early_is_refused(
    source: FileSource, tmp_path: Path, left: int
) -> None:
    os.truncate(tmp_path / "file", left)
    targets = Targets()
    targets.want(0, SIZE)
    with pytest.raises(Unusable, match="ends too early"):
        read(source, targets.wants)


@pytest.mark.parametrize("digests", [b"", bytes(16), bytes(160)])
def test_digests_that_are_not_of_it_refuse_it(source: FileSource, digests: bytes) -> None:
    source.digests = digests
    targets = Targets()
    targets.want(0, SIZE)
    with pytest.raises(Unusable, match="not what its digest says"):
        read(source, targets.wants)


def test_a_stretch_beyond_the_end_is_refused(source: FileSource) -> None:
    targets = Targets()
    targets.want(SIZE - 5, 2000)
    with pytest.raises(Unusable):
        read(source, targets.wants)


def test_memory_is_made_only_when_its_bytes_arrive(source: FileSource) -> None:
    living: list[int] = []
    most = []

    def make() -> memoryview:
        living.append(1)
        most.append(len(living))
        return memoryview(bytearray(500))

    wants = [Want(ByteSpan(n * 1024, 500), make, lambda: living.remove(1)) for n in range(9)]
    read(source, wants)
    assert max(most) == 1


def test_thousands_of_wants_fit_into_calls_that_take_a_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1 << 20)
    monkeypatch.setattr(reading, "_AT_ONCE_BYTES", 1 << 20)
    data = random.Random(2).randbytes(40_000)
    (tmp_path / "file").write_bytes(data)
    source = FileSource.of_image(tmp_path / "file", 0, len(data), block_digests(memoryview(data)))
    targets = Targets()
    for at in range(0, len(data), 10):
        targets.want(at, 7)
    read(source, targets.wants)
    targets.check(data)


def test_a_kernel_that_gives_less_than_asked_is_asked_again(
    source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def stingy(fd: int, views: Sequence[memoryview], at: int) -> int:
        return preadv(fd, [views[0][:3]], at)

    monkeypatch.setattr(os, "preadv", stingy)
    targets = Targets()
    targets.want(500, 2000)
    targets.piece(3000, 100)
    read(source, targets.wants, pieces=targets.pieces)
    targets.check()


def test_only_blocks_with_something_wanted_are_read(
    source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, read_at = os.preadv, []

    def noted(fd: int, views: Sequence[memoryview], at: int) -> int:
        read_at.append((at - 4) // 1024)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", noted)
    targets = Targets()
    targets.piece(2100, 10)
    targets.want(5000, 500)
    read(source, targets.wants, pieces=targets.pieces)
    assert set(read_at) == {2, 4, 5}
    targets.check()


class Deaf:
    """A source that stopped answering."""

    def __init__(self, digests: bytes) -> None:
        self.name, self.size, self.digests = "deaf", SIZE, digests
        self.asked = 0

    def read_into(self, at: int, views: Sequence[memoryview]) -> None:
        self.asked += 1
        raise WireError("gone")


def test_each_block_is_read_where_it_is_whole(tmp_path: Path, source: FileSource) -> None:
    """Both places are damaged, and one does not answer."""
    (tmp_path / "other").write_bytes(b"head" + DATA)
    other = FileSource.of_image(tmp_path / "other", 4, SIZE, source.digests)
    flip(tmp_path / "file", 4 + 2000)
    flip(tmp_path / "other", 4 + 5000)
    deaf = Deaf(source.digests)
    anywhere = Alternatives(deaf, [lambda: source, lambda: other])
    targets = Targets()
    targets.want(0, SIZE)
    read(anywhere, targets.wants)
    targets.check()
    assert deaf.asked == 1
    flip(tmp_path / "other", 4 + 2000)
    targets = Targets()
    targets.want(0, SIZE)
    with pytest.raises(Unusable, match="digest"):
        read(anywhere, targets.wants)


def test_a_place_with_other_bytes_is_none(source: FileSource, tmp_path: Path) -> None:
    data = bytes(SIZE)
    (tmp_path / "other").write_bytes(data)
    digests = block_digests(memoryview(data))
    other = FileSource.of_image(tmp_path / "other", 0, SIZE, digests)
    flip(tmp_path / "file", 4)
    targets = Targets()
    targets.want(0, SIZE)
    with pytest.raises(Unusable, match="block 0"):
        read(Alternatives(source, [lambda: other]), targets.wants)
