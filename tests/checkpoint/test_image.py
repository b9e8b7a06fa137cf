"""An image is whole, sealed and unchanged, or it is refused."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import Rank, check_same, child, flip, load, seal

from holdfast.checkpoint.memory.image import Image, ImageRecord
from holdfast.checkpoint.state.layout import ByteSpan
from holdfast.errors import StorageError, Unusable

PAGE = 4096


def record(size: int, step: int = 1) -> ImageRecord:
    return ImageRecord("ckpt", step, 1, 0, 1, size, ByteSpan(0, 1))


def image_of(path: Path, body: bytes, step: int = 1) -> Image:
    """Whole and sealed."""
    image = Image.create(path, len(body) + 100)
    assert image.begin()
    image.body[: len(body)] = body
    image.seal(image.finish(record(len(body), step)))
    return image


# ---- the words in the head ----


def test_a_new_image_holds_nothing(shm: Path) -> None:
    image = Image.create(shm / "a", 1000)
    assert (image.record(), image.digests(), image.pinned) == (None, None, False)
    assert image.seal(image.state) is None


def test_it_is_seen_only_once_it_is_whole(shm: Path) -> None:
    image, other = Image.create(shm / "a", 1000), Image.open(shm / "a")
    assert image.begin()
    image.body[:3] = b"abc"
    assert other.record() is None
    state = image.finish(record(3))
    assert other.record() == record(3)
    assert other.digests() is None  # Not before it is sealed.
    assert other.seal(state) is not None
    assert image.digests() == other.digests() is not None


def test_a_save_that_is_never_finished_is_never_seen(shm: Path) -> None:
    image = image_of(shm / "a", b"old")
    assert image.begin()
    image.close()
    left = Image.open(shm / "a")
    assert (left.record(), left.digests()) == (None, None)
    # And the next one over it is.
    assert left.begin()
    left.seal(left.finish(record(3, step=2)))
    assert left.record() == record(3, step=2)


def test_a_seal_is_of_one_state_alone(shm: Path) -> None:
    image = image_of(shm / "a", b"old")
    assert image.begin()
    state = image.finish(record(3, step=2))
    assert image.digests() is None
    assert image.seal(state - 2) is None
    assert image.digests() is None


def test_a_seal_of_what_was_overwritten_meanwhile_does_not_count(shm: Path) -> None:
    image = image_of(shm / "a", b"old")
    state = image.state
    assert image.begin()
    assert image.keep_seal(state, bytes(16)) is None
    image.finish(record(3, step=2))
    assert image.digests() is None


def test_what_is_pinned_is_not_written_to(shm: Path) -> None:
    worker, keeper = image_of(shm / "a", b"old"), Image.open(shm / "a")
    assert keeper.pin(keeper.state)
    assert worker.pinned
    assert not worker.begin()
    assert keeper.record() == record(3)  # It steps back without a trace.
    keeper.unpin()
    assert worker.begin()


def test_a_worker_that_steps_back_is_not_noticed_by_whoever_reads(shm: Path) -> None:
    """Even if it is killed at that moment."""
    keeper = image_of(shm / "a", b"old")
    state = keeper.state
    assert keeper.pin(state)
    keeper._words[3] = state | 1
    assert keeper.record() == record(3)
    assert keeper.seal(state) == keeper.digests() is not None
    keeper.unpin()
    assert keeper.record() is None


def test_what_is_being_written_cannot_be_pinned(shm: Path) -> None:
    worker, keeper = image_of(shm / "a", b"old"), Image.open(shm / "a")
    state = worker.state
    assert worker.begin()
    assert not keeper.pin(state)
    worker.finish(record(3, step=2))
    assert not keeper.pin(state)
    assert not worker.pinned


def test_states_are_counted_on_in_the_image_that_takes_its_place(shm: Path) -> None:
    image = image_of(shm / "a", b"old")
    before = image.state
    other = Image.create(shm / "a", 10_000, after=image.state)
    assert (other.record(), other.digests()) == (None, None)
    assert other.begin()
    assert other.finish(record(1)) > before


# ---- no image ----


@pytest.mark.parametrize("data", [b"", b"x", bytes(PAGE), bytes(3 * PAGE), b"HFIMAGE1" * PAGE])
def test_any_other_file_is_refused(shm: Path, data: bytes) -> None:
    (shm / "a").write_bytes(data)
    with pytest.raises(Unusable, match=r"not an? (Holdfast )?image"):
        Image.open(shm / "a")


def test_what_is_not_there_is_refused(shm: Path) -> None:
    with pytest.raises(Unusable, match="No such file"):
        Image.open(shm / "a")


def test_a_short_file_is_refused(shm: Path) -> None:
    image_of(shm / "a", b"body" * 1000)
    os.truncate(shm / "a", PAGE + 100)
    with pytest.raises(Unusable, match="cut off"):
        Image.open(shm / "a")


# ---- memory ----


def test_when_there_is_no_memory_the_old_image_stays(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = image_of(shm / "a", b"old")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"No space left on device; see `df -h"):
        Image.create(shm / "a", 1000)
    assert os.listdir(shm) == ["a"]
    assert Image.open(shm / "a").digests() == old.digests()


@pytest.fixture
def tiny(shm: Path) -> Iterator[Path]:
    """A memory file system of 1 MiB."""
    tiny = shm / "tiny"
    tiny.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tiny)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield tiny
    finally:
        subprocess.run(["umount", "-l", str(tiny)], check=True)


def test_its_memory_is_there_from_the_start(tiny: Path) -> None:
    """So that no save dies of a bus error in the middle."""
    image_of(tiny / "a", bytes(400_000))
    with pytest.raises(StorageError, match="No space left"):
        Image.create(tiny / "b", 1_000_000)
    assert os.listdir(tiny) == ["a"]


def mapped(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_memory_is_given_back_when_nobody_has_the_image_any_more(shm: Path) -> None:
    image = image_of(shm / "a", b"body")
    other = Image.open(shm / "a")
    undone: list[int] = []
    for one in (image, other):
        one.before_unmap.append(lambda: undone.append(mapped(shm / "a")))
    assert mapped(shm / "a") == 2
    image.close()
    assert mapped(shm / "a") == 1
    del other, one
    gc.collect()
    assert mapped(shm / "a") == 0
    assert undone == [2, 1], "what CUDA has of it is taken back before"


def test_touching_all_pages_changes_nothing(shm: Path) -> None:
    image = image_of(shm / "a", b"body" * 5000)
    image.prefault()
    assert bytes(image.body[:20_000]) == b"body" * 5000


# ---- flipped bytes ----


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int, int]:
    """An image, what it holds, where its body is and how long that is."""
    directory = tmp_path_factory.mktemp("image")
    state = {"a": {f"t{n}": torch.randn(n, 7) for n in range(9)}, "b": torch.randn(50_000), "c": 3}
    path = Rank(directory).save(state)
    image = Image.open(path)
    found = image.record()
    assert found is not None
    return path, state, image.body_at, found.size


WORDS = {"magic": 0, "body_at": 8, "capacity": 16, "state": 24, "sealed": 32, "pinned": 40}


@given(data=st.data())
def test_a_flipped_bit_anywhere_is_refused(
    sealed: tuple[Path, dict[str, Any], int, int], data: st.DataObject
) -> None:
    path, _, body_at, size = sealed
    length = struct.unpack("<I", path.read_bytes()[64:68])[0]
    at = data.draw(
        st.sampled_from([*range(0, 8), *range(24, 40)])
        | st.integers(64, 64 + 4 + length + 16 - 1)  # the record
        | st.integers(3072, 3072 + 15)  # the seal's own digest
        | st.integers(PAGE, PAGE + 15)  # the seal
        | st.integers(body_at, body_at + size - 1)
    )
    mask = 1 << data.draw(st.integers(0, 7))
    flip(path, at, mask)
    try:
        with pytest.raises(Unusable):
            load({"a": None, "b": None, "c": None}, path)
    finally:
        flip(path, at, mask)


@given(at=st.integers(0, 2 * PAGE - 1), mask=st.integers(1, 255))
def test_a_changed_byte_of_the_head_does_no_harm(
    sealed: tuple[Path, dict[str, Any], int, int], at: int, mask: int
) -> None:
    path, state, _, _ = sealed
    flip(path, at, mask)
    try:
        got = load({"a": None, "b": None, "c": None}, path)
    except Unusable:
        pass
    else:
        check_same(got, state)
    finally:
        flip(path, at, mask)


def test_an_image_of_another_step_or_rank_is_refused(
    sealed: tuple[Path, dict[str, Any], int, int],
) -> None:
    with pytest.raises(Unusable, match="of rank 0, step 1"):
        load({"c": None}, sealed[0], step=2)
    with pytest.raises(Unusable, match="of rank 0, step 1"):
        load({"c": None}, sealed[0], sealed[0])


# ---- two processes ----


def test_nothing_is_written_while_it_is_pinned(shm: Path) -> None:
    """Both sides go for it as often as they can, and never have it at the same time."""
    size = 20_000
    image = Image.create(shm / "a", size)

    def save_for_ever() -> None:
        mine = Image.open(shm / "a")
        for number in range(1 << 40):
            if mine.begin():
                mine.body[:size] = bytes([number % 256]) * size
                mine.finish(record(size, step=number))

    pins, until = 0, time.monotonic() + 1.0
    with child(save_for_ever):
        while time.monotonic() < until or pins < 100:
            state = image.state
            if state % 2 or not state or not image.pin(state):
                continue
            pins += 1
            found = image.record()
            assert found is not None
            for _ in range(2):
                assert bytes(image.body[:size]) == bytes([found.step % 256]) * size
            assert image.settled == state
            image.unpin()
    assert image.state > 200


def changing_state(step: int) -> dict[str, Any]:
    """Every tensor says which step it is of, in every element; every way of copying is used."""
    value = float(step)
    return {
        "large": {f"l{n}": torch.full((400_000,), value) for n in range(3)},
        "small": {f"s{n}": torch.full((250,), value) for n in range(40)},
        "strided": torch.full((300, 200), value).t(),
        "step": step,
    }


def check_of_one_step(state: dict[str, Any], step: int) -> None:
    assert state["step"] == step
    for tensor in (*state["large"].values(), *state["small"].values(), state["strided"]):
        assert (tensor == step).all()


def test_killed_at_any_moment_leaves_the_old_step_or_the_new_one(shm: Path) -> None:
    """A process that copies is killed 200 times; each time what is left is whole and verifies."""
    chance = random.Random(1)
    layout = Rank(shm).capture(changing_state(0)).layout
    target = changing_state(0)
    torn, newest = 0, 0
    for _ in range(200):
        ours, theirs = os.pipe()

        def copy_for_ever(theirs: int = theirs, first: int = newest + 1) -> None:
            rank = Rank(shm)
            rank.layout = layout
            for step in range(first, 1 << 40):
                captured = rank.capture(changing_state(step), step)
                os.write(theirs, step.to_bytes(8, "little"))
                rank.copy(captured, step)

        with child(copy_for_ever) as pid:
            begun = os.read(ours, 8)
            if newest == 0:
                begun = os.read(ours, 8)  # One shall be there before the first is lost.
            time.sleep(chance.random() * chance.choice([0.002, 0.02]))
            os.kill(pid, signal.SIGKILL)
        os.close(theirs)
        begun = os.read(ours, 1 << 20)[-8:] or begun
        os.close(ours)
        last = int.from_bytes(begun, "little")
        found = {}
        for path in shm.glob("*.image"):
            image = Image.open(path)
            what = image.record()
            torn += image.state % 2
            if what is not None:
                seal(path, image.state)
                found[what.step] = path
            image.close()
        newest = max(found)
        assert newest in (last - 1, last)
        check_of_one_step(load(target, found[newest], step=newest), newest)
    assert torn > 20, "it was hardly ever killed in the middle of a copy"
