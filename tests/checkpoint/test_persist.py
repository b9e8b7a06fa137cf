"""A rank's file holds what it should of a body, and tells when it does not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from bodies import Body, make_body, save, small_blocks, write
from faulty import FaultyDisk, no_space
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.state.layout import (
    BLOCK_BYTES,
    ByteSpan,
    Contents,
    Extent,
    TensorItem,
    Trailer,
    block_digests,
    offset_in_file,
)
from holdfast.checkpoint.storage import rank_file as persist
from holdfast.checkpoint.storage.backends import MANIFEST
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.checkpoint.storage.rank_file import (
    extents_of,
    open_file,
    slices,
    write_file,
)
from holdfast.errors import StepTaken, StorageError, Unusable

WHERE = ("step_000000500", "__0_1.distcp")
PATH = "/".join(WHERE)


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


def read_trailer(storage: PosixStorage, path: str) -> Trailer:
    with open_file(storage, path) as file:
        return file.trailer


def contents(sizes: list[int], own: int = 128, tail: int = 64) -> Contents:
    """Contents with shared items of these sizes."""
    items = []
    at = own
    for index, size in enumerate(sizes):
        span = ByteSpan(at, size)
        items.append(TensorItem(f"t{index}", "shared", "uint8", (size,), (0,), (size,), span, span))
        at += size
    shared = ByteSpan(own, at - own)
    return Contents(
        1, 1, 0, 1, ByteSpan(0, own), shared, ByteSpan(at, tail), ByteSpan(at, 0), tuple(items), ()
    )


# ---- who writes what ----


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 9), st.integers(0, 500))
def test_slices_are_whole_items_and_together_all_of_the_shared_part(
    sizes: list[int], world_size: int, own: int
) -> None:
    told = contents(sizes, own)
    found = slices(told, world_size)
    assert len(found) == world_size
    assert [s.at for s in found] == [told.shared.at, *(s.end for s in found)][:-1]
    assert found[-1].end == told.shared.end
    starts = {item.framed.at for item in told.items} | {told.shared.at, told.shared.end}
    assert {span.at for span in found} <= starts
    # No rank writes more than its share and one item.
    share = told.shared.size / world_size
    assert all(span.size <= share + max(sizes, default=0) for span in found)


@given(st.lists(st.integers(1, 1000), max_size=10), st.integers(1, 5))
def test_ranks_whose_own_parts_differ_slice_the_same_way(sizes: list[int], world: int) -> None:
    def relative(own: int) -> list[tuple[int, int]]:
        return [(span.at - own, span.size) for span in slices(contents(sizes, own), world)]

    assert relative(64) == relative(640)


@given(st.lists(st.integers(1, 1000), max_size=10), st.integers(1, 5), st.integers(0, 3))
def test_extents_fill_a_file_without_gaps(sizes: list[int], world: int, own: int) -> None:
    told = contents(sizes, own)
    written: set[int] = set()
    for rank in range(world):
        extents = extents_of(told, rank, world, "slice")
        at = 0
        for extent in extents:
            assert extent.file_at == at
            at += extent.size
            written.update(range(extent.body_at, extent.body_at + extent.size))
        assert not own or offset_in_file(ByteSpan(0, own), extents) == 0
        assert offset_in_file(told.tail, extents) == at - told.tail.size
    assert written == set(range(told.tail.end))


def test_one_rank_writes_its_body_as_it_is() -> None:
    told = contents([100, 200])
    assert extents_of(told, 0, 1, "slice") == (Extent(0, 0, told.tail.end),)
    assert extents_of(told, 2, 4, "all") == (Extent(0, 0, told.tail.end),)


# ---- writing and reading ----


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shared", ["slice", "all"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_file_holds_its_extents_and_a_digest_of_each_block(
    storage: PosixStorage, rank: int, shared: str
) -> None:
    body = make_body(500, 1, rank, 3, shared=9)
    record = write(storage, body, shared)
    extents = body.extents(shared)
    expected = b"".join(body.data[e.body_at : e.body_at + e.size] for e in extents)
    with open_file(storage, f"step_000000500/{record.name}") as file:
        assert file.file_size == record.size
        assert file.trailer_digest == record.trailer
        trailer = file.trailer
        assert (trailer.step, trailer.round, trailer.rank, trailer.world_size) == (500, 1, rank, 3)
        assert trailer.size == len(expected)
        assert trailer.extents == extents
        assert trailer.digests == block_digests(memoryview(expected))
        assert file.contents(record.contents) == body.contents
        data = bytearray(trailer.size)
        file.read_into(0, [memoryview(data)])
        assert data == expected
        buffer = memoryview(bytearray(1 << 10))
        count = len(trailer.digests) // 16
        assert count > 2
        assert b"".join(bytes(file.read_block(n, buffer)) for n in range(count)) == expected


def odd_body(sizes: list[int]) -> tuple[bytearray, tuple[Extent, ...]]:
    """Stretches of a body with gaps between them."""
    extents = []
    at = file_at = 0
    for size in sizes:
        at += 5
        extents.append(Extent(at, file_at, size))
        at, file_at = at + size, file_at + size
    return bytearray(random.Random(at).randbytes(at + 5)), tuple(extents)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
@settings(max_examples=40)
def test_blocks_are_of_the_file_however_the_body_is_cut(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    storage = PosixStorage(tmp_path_factory.mktemp("files"))
    data, extents = odd_body(sizes)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        span = ByteSpan(extents[0].body_at, 1)
        told: list[int] = []
        whose = (500, 1, 0, 1)
        body = memoryview(data)
        write_file(storage, *WHERE, body, extents, span, *whose, told.append)
        expected = b"".join(data[e.body_at : e.body_at + e.size] for e in extents)
        trailer = read_trailer(storage, PATH)
        assert trailer.digests == block_digests(memoryview(expected))
        assert sum(told) == len(expected)


def test_a_body_larger_than_a_block(storage: PosixStorage) -> None:
    data = bytearray(random.Random(0).randbytes(1 << 20)) * 20
    extents = (Extent(100, 0, 9 << 20), Extent(10 << 20, 9 << 20, 9 << 20))
    span = ByteSpan(200, 10)
    told: list[int] = []
    write_file(storage, *WHERE, memoryview(data), extents, span, 500, 1, 0, 1, told.append)
    assert told == [9 << 20, 7 << 20, 2 << 20]
    expected = data[100 : 100 + (9 << 20)] + data[10 << 20 : 19 << 20]
    assert read_trailer(storage, PATH).digests == block_digests(memoryview(expected))
    assert len(expected) > BLOCK_BYTES


def test_a_file_that_is_written_again_replaces_the_first(storage: PosixStorage) -> None:
    write(storage, make_body(500, 1, 0, 2))
    other = make_body(500, 1, 0, 2, shared=2)
    record = write(storage, other)
    with open_file(storage, PATH) as file:
        assert file.contents(record.contents) == other.contents
    assert [entry.name for entry in storage.entries("step_000000500")] == ["__0_1.distcp"]


def test_a_committed_step_is_never_written_over(storage: PosixStorage, tmp_path: Path) -> None:
    save(storage, 500, round=3)
    before = {p.name: p.read_bytes() for p in (tmp_path / "step_000000500").iterdir()}
    for round in (3, 4):
        with pytest.raises(StepTaken, match="committed in round 3"):
            write(storage, make_body(500, round, 0, 2, shared=1))
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "step_000000500").iterdir()}


def test_one_that_lost_the_race_is_told_so_and_not_of_a_broken_disk(
    storage: PosixStorage, tmp_path: Path
) -> None:
    class Slow(FaultyDisk):
        def rename(self, old: str, new: str, directory: int) -> None:
            save(storage, 500, round=3)  # It tidies up what others have begun.
            super().rename(old, new, directory)

    with pytest.raises(StepTaken):
        write(PosixStorage(tmp_path, Slow()), make_body(500, 2, 0, 2))
    names = {entry.name for entry in storage.entries("step_000000500")}
    assert names == {"__0_3.distcp", "__1_3.distcp", ".metadata", MANIFEST}


def test_a_failed_write_is_an_error_and_the_next_one_works(
    storage: PosixStorage, tmp_path: Path
) -> None:
    body = make_body(500, 1, 0, 2)
    points = FaultyDisk()
    write(PosixStorage(tmp_path / "count", points), body)
    for at in range(1, len(points.points) + 1):
        with pytest.raises(StorageError, match="No space left"):
            write(PosixStorage(tmp_path / str(at), FaultyDisk(at, no_space)), body)
        write(PosixStorage(tmp_path / str(at)), body)
        assert [p.name for p in (tmp_path / str(at) / "step_000000500").iterdir()] == [
            "__0_1.distcp"
        ]


def test_a_digest_that_cannot_be_computed_fails_the_write(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(parts: list[memoryview]) -> bytes:
        raise MemoryError

    monkeypatch.setattr(persist, "_digest_of_block", fails)
    with pytest.raises(MemoryError):
        write(storage, make_body(500, 1, 0, 2))
    assert storage.entries("step_000000500") == []


# ---- damage ----


@pytest.fixture(scope="module")
def whole() -> tuple[Body, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        body = make_body(500, 1, 0, 2)
        write(PosixStorage(root), body)
        return body, (Path(root) / PATH).read_bytes()


@given(data=st.data())
@settings(max_examples=200)
def test_no_flipped_bit_of_trailer_or_footer_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, whole: tuple[Body, bytes], data: st.DataObject
) -> None:
    body, good = whole
    start = sum(extent.size for extent in body.extents())
    at = data.draw(st.integers(start, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    storage = PosixStorage(tmp_path_factory.mktemp("files"))
    storage.make_directory("d")
    storage.write("d/file", [bytes(bad)])
    with pytest.raises(Unusable, match="d/file"):
        read_trailer(storage, "d/file")


@pytest.mark.parametrize("size", [0, 1, 39, 40, 41, 500])
def test_a_torn_file_is_refused(
    storage: PosixStorage, whole: tuple[Body, bytes], size: int
) -> None:
    storage.make_directory("d")
    storage.write("d/file", [whole[1][:size]])
    with pytest.raises(Unusable):
        read_trailer(storage, "d/file")


def test_a_footer_that_asks_for_too_much_memory_is_refused(
    storage: PosixStorage, whole: tuple[Body, bytes]
) -> None:
    bad = bytearray(whole[1])
    bad[-24:-16] = (1 << 60).to_bytes(8, "little")
    storage.make_directory("d")
    storage.write("d/file", [bytes(bad)])
    with pytest.raises(Unusable, match="is impossible"):
        read_trailer(storage, "d/file")


def test_a_file_of_a_later_version_is_refused_by_name(
    storage: PosixStorage, whole: tuple[Body, bytes]
) -> None:
    later = bytearray(whole[1])
    later[-32:-24] = (2).to_bytes(8, "little")
    storage.make_directory("d")
    storage.write("d/file", [bytes(later)])
    with pytest.raises(Unusable, match="version 2"):
        read_trailer(storage, "d/file")
