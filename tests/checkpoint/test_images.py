"""A node's images are what its files say, and nothing that is in use is lost."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from holdfast.checkpoint.memory.image import Image, ImageRecord
from holdfast.checkpoint.memory.images import COPIES, Images, Outline, image_path
from holdfast.checkpoint.state.layout import ByteSpan, block_digests
from holdfast.errors import Unusable
from holdfast.messages.checkpoints import ImageId, SnapshotId
from holdfast.messages.units import Rank, RoundNumber, StepNumber

BODY = b"body" * 1000
CONTENTS = ByteSpan(0, 4)


def an_image(step: int, rank: int = 0, round: int = 1, checkpointer: str = "c") -> ImageId:
    snapshot = SnapshotId(checkpointer, StepNumber(step), RoundNumber(round))
    return ImageId(snapshot, Rank(rank), 8)


def outline(step: int, rank: int = 0, round: int = 1, body: bytes = BODY) -> Outline:
    digests = block_digests(memoryview(body))
    return Outline(an_image(step, rank, round), len(body), digests, CONTENTS)


def record(step: int, rank: int = 0, round: int = 1, checkpointer: str = "c") -> ImageRecord:
    return ImageRecord(checkpointer, step, round, rank, 8, len(BODY), CONTENTS)


def own(directory: Path, slot: int, step: int, rank: int = 0, round: int = 1) -> Image:
    """A rank's own image, whole and sealed."""
    path = image_path(directory, "c", rank, slot)
    image = Image.open(path) if path.exists() else Image.create(path, len(BODY) + 100)
    assert image.begin()
    image.body[: len(BODY)] = BODY
    image.seal(image.finish(record(step, rank, round)))
    return image


def receive(images: Images, step: int, rank: int = 0, round: int = 1, body: bytes = BODY) -> None:
    """A copy of another node's image, as it comes in."""
    place = images.place(outline(step, rank, round, body))
    place.view[: len(body)] = body
    images.release(images.complete(place))


def steps(images: Images) -> list[int]:
    return sorted(one.snapshot.step for one in images.ids())


def mapped(directory: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(directory))


# ---- what there is ----


def test_a_keeper_that_starts_again_finds_what_there_is(shm: Path) -> None:
    own(shm, 0, 10)
    own(shm, 1, 11)
    receive(Images(shm), 11, rank=3)
    found = [(one.snapshot.step, one.rank) for one in Images(shm).ids()]
    assert sorted(found) == [(10, 0), (11, 0), (11, 3)]


def test_what_is_not_sealed_or_no_image_is_not_listed(shm: Path) -> None:
    image = own(shm, 0, 10)
    assert image.begin()
    image.finish(record(11))
    (shm / "garbage.image").write_bytes(b"garbage")
    (shm / "short.image").write_bytes(bytes(5000))
    assert steps(Images(shm)) == []


def test_an_image_is_found_by_all_that_names_it(shm: Path) -> None:
    own(shm, 0, 10)
    images = Images(shm)
    assert images.ids() == [an_image(10)]
    assert images.sealed(an_image(10)) is not None
    others = {"step": 11}, {"rank": 1}, {"round": 2}, {"checkpointer": "d"}
    for other in others:
        assert images.sealed(an_image(**{"step": 10, **other})) is None  # type: ignore[arg-type]


def test_one_that_took_the_place_of_another_is_seen_at_once(shm: Path) -> None:
    """A worker whose state has grown makes a larger image of the same name."""
    images = Images(shm)
    own(shm, 0, 10)
    assert steps(images) == [10]
    image_path(shm, "c", 0, 0).unlink()
    own(shm, 0, 11)
    assert steps(images) == [11]
    gc.collect()
    assert mapped(shm) == 1, "the memory of the old one is still held"


def test_what_was_deleted_does_not_keep_its_memory(shm: Path) -> None:
    images = Images(shm)
    receive(images, 10, rank=3)
    assert steps(images) == [10]
    for path in shm.glob("*.image"):
        path.unlink()
    assert steps(images) == []
    gc.collect()
    assert mapped(shm) == 0


# ---- pins ----


def test_what_is_pinned_twice_stays_until_both_let_go(shm: Path) -> None:
    worker = own(shm, 0, 10)
    images = Images(shm)
    image = images.image(image_path(shm, "c", 0, 0))
    with images.pinned(image, image.state) as held:
        with images.pinned(image, image.state) as again:
            assert held
            assert again
        assert not worker.begin()
    assert worker.begin()


def test_a_pin_of_the_past_is_refused(shm: Path) -> None:
    worker = own(shm, 0, 10)
    images = Images(shm)
    image = images.image(image_path(shm, "c", 0, 0))
    with images.pinned(image, image.state - 2) as held:
        assert not held
        assert worker.begin()


def test_a_pin_holds_the_one_it_was_for_and_not_its_successor(shm: Path) -> None:
    """A worker that makes a larger image leaves the old one to whoever reads it."""
    images, path = Images(shm), image_path(shm, "c", 0, 0)
    own(shm, 0, 10)
    old = images.image(path)
    with images.pinned(old, old.state) as held:
        assert held
        path.unlink()
        worker = own(shm, 0, 11)
        new = images.image(path)
        assert new is not old
        with images.pinned(new, new.state) as also:
            assert also
            assert not worker.begin()
        assert worker.begin()
        assert bytes(old.body[: len(BODY)]) == BODY
        assert old.pinned


def test_pins_of_a_keeper_that_died_are_taken_back(shm: Path) -> None:
    worker = own(shm, 0, 10)
    dead = Image.open(image_path(shm, "c", 0, 0))
    assert dead.pin(dead.state)
    (shm / "garbage.image").write_bytes(b"garbage")
    assert not worker.begin()
    Images(shm).unpin_all()
    assert worker.begin()


# ---- copies of other nodes' images ----


def test_a_copy_is_found_only_once_it_is_complete(shm: Path) -> None:
    told: list[ImageId] = []
    images = Images(shm, told.append)
    place = images.place(outline(10))
    assert images.find(an_image(10)) is None
    place.view[: len(BODY)] = BODY
    assert (images.find(an_image(10)), told) == (None, [])
    images.release(images.complete(place))
    held = images.find(an_image(10))
    assert held is not None
    assert held.outline == outline(10)
    assert os.pread(held.fd, held.size, held.body_at) == BODY
    images.release(held)
    assert told == [an_image(10)]


def test_the_two_newest_copies_of_a_rank_stay(shm: Path) -> None:
    images = Images(shm)
    for step in (10, 11, 12, 13):
        receive(images, step, rank=3)
        receive(images, step, rank=33)
    assert steps(images) == [12, 12, 13, 13]
    assert len(list(shm.glob("*.image"))) == 2 * COPIES


def test_the_memory_of_the_oldest_is_used_again(shm: Path) -> None:
    images = Images(shm)
    for step in (10, 11):
        receive(images, step)
    inodes = {path.stat().st_ino for path in shm.glob("*.image")}
    receive(images, 12)
    assert {path.stat().st_ino for path in shm.glob("*.image")} == inodes


def test_a_larger_one_gets_memory_of_its_own(shm: Path) -> None:
    images = Images(shm)
    for step in (10, 11):
        receive(images, step)
    receive(images, 12, body=BODY * 3)
    assert steps(images) == [11, 12]
    gc.collect()
    assert mapped(shm) == 2


def test_a_copy_that_was_dropped_leaves_nothing(shm: Path) -> None:
    images = Images(shm)
    receive(images, 10)
    place = images.place(outline(11))
    images.drop(place)
    del place
    assert steps(images) == [10]
    assert len(list(shm.iterdir())) == 1
    gc.collect()
    assert mapped(shm) == 1


def test_two_copies_that_come_in_at_once_do_not_share_a_place(shm: Path) -> None:
    images = Images(shm)
    for step in (10, 11):
        receive(images, step)
    places = []
    gate = threading.Barrier(4)

    def place(step: int) -> None:
        gate.wait()
        places.append(images.place(outline(step)))

    threads = [threading.Thread(target=place, args=(step,)) for step in (12, 13, 14, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({os.fstat(one.fd).st_ino for one in places}) == 4
    for one in places:
        images.drop(one)


def test_what_is_being_filled_stays_mapped(shm: Path) -> None:
    """Listing what there is must not take away what is on its way in."""
    images = Images(shm)
    place = images.place(outline(10))
    assert steps(images) == []
    place.view[: len(BODY)] = BODY
    images.release(images.complete(place))
    assert steps(images) == [10]


# ---- what may go ----


@pytest.mark.parametrize(
    ("rank", "round", "step", "stays"),
    [
        (0, 1, 10, True),  # of a rank that is here
        (5, 1, 10, False),
        (5, 2, 10, True),  # of the round in force
        (5, 1, 20, True),  # as new as that
    ],
)
def test_what_earlier_rounds_left_goes_unless_it_may_be_wanted(
    shm: Path, rank: int, round: int, step: int, stays: bool
) -> None:
    images = Images(shm)
    images.own_ranks = frozenset({0})
    own(shm, 0, step, rank, round)
    images.drop_older("c", step=20, round=2)
    assert steps(images) == ([step] if stays else [])


def test_what_is_pinned_does_not_go(shm: Path) -> None:
    images = Images(shm)
    own(shm, 0, 10, rank=5)
    image = images.image(image_path(shm, "c", 5, 0))
    with images.pinned(image, image.state):
        images.drop_older("c", step=20, round=2)
        assert steps(images) == [10]
    images.drop_older("other", step=20, round=2)
    assert steps(images) == [10]
    images.drop_older("c", step=20, round=2)
    assert steps(images) == []


def test_a_copy_of_a_rank_that_is_here_now_goes_too(shm: Path) -> None:
    images = Images(shm)
    images.own_ranks = frozenset({5})
    receive(images, 10, rank=5)
    images.drop_older("c", step=20, round=2)
    assert steps(images) == []


def test_what_is_gone_is_refused(shm: Path) -> None:
    with pytest.raises((OSError, Unusable)):
        Images(shm).image(shm / "no.image")
