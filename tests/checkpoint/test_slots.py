"""A rank has two images: a save never waits for one that is read, and one of them is always whole."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from states import CHECKPOINTER, Rank, check_same, load, seal

from holdfast.checkpoint.memory.copying import LARGE_BYTES, Copier
from holdfast.checkpoint.memory.image import Image
from holdfast.checkpoint.memory.images import Images, image_path
from holdfast.checkpoint.memory.slots import BothRead, Copy
from holdfast.checkpoint.state.capture import Position
from holdfast.errors import CheckpointError, StorageError


def state_of(step: int, size: int = 50) -> dict[str, Any]:
    return {"a": torch.full((size,), float(step)), "step": step}


def steps(directory: Path) -> list[int | None]:
    """What the two slots hold."""
    found: list[int | None] = []
    for slot in (0, 1):
        path = image_path(directory, CHECKPOINTER, 0, slot)
        record = Image.open(path).record() if path.exists() else None
        found.append(record.step if record is not None else None)
    return found


def start(
    rank: Rank, state: Any, step: int, guarded: set[int], told: list[int] | None = None
) -> Copy:
    """A save that goes on beside training."""
    finished = [] if told is None else told
    position = Position(step, 1, 0, 1)
    captured = rank.capture(state, step)
    return rank.slots.start(
        captured, position, guarded, True, lambda path, state: finished.append(state)
    )


# ---- two images ----


def test_saves_take_turns(shm: Path) -> None:
    rank = Rank(shm)
    for step in range(1, 6):
        path = rank.save(state_of(step), step)
        check_same(load({"a": None, "step": None}, path, step=step), state_of(step))
    assert sorted(filter(None, steps(shm))) == [4, 5]


def test_what_is_read_is_not_touched_and_no_save_waits_for_it(shm: Path) -> None:
    rank, images = Rank(shm), Images(shm)
    rank.save(state_of(1), 1)
    pinned = rank.save(state_of(2), 2)
    image = images.image(pinned)
    with images.pinned(image, image.state) as held:
        assert held
        for step in range(3, 10):
            path = rank.save(state_of(step), step)
            assert path != pinned
            assert sorted(filter(None, steps(shm))) == [2, step]
            check_same(load({"a": None, "step": None}, pinned, step=2), state_of(2))
    rank.save(state_of(10), 10)
    assert sorted(filter(None, steps(shm))) == [9, 10]


def test_when_both_are_read_there_is_no_save_and_neither_is_touched(shm: Path) -> None:
    rank, images = Rank(shm), Images(shm)
    paths = [rank.save(state_of(step), step) for step in (1, 2)]
    first, second = map(images.image, paths)
    with images.pinned(first, first.state), images.pinned(second, second.state):
        with pytest.raises(BothRead, match="both images are still being read"):
            rank.save(state_of(3), 3)
        assert sorted(filter(None, steps(shm))) == [1, 2]
    rank.save(state_of(4), 4)


def test_a_new_process_goes_on_with_the_images_of_the_old_one(shm: Path) -> None:
    rank = Rank(shm)
    for step in (1, 2, 3):
        rank.save(state_of(step), step)
    inodes = {path.stat().st_ino for path in shm.iterdir()}
    again = Rank(shm)
    again.save(state_of(4), 4)
    assert sorted(filter(None, steps(shm))) == [3, 4], "the newest was written over"
    assert {path.stat().st_ino for path in shm.iterdir()} == inodes


def test_a_new_process_takes_the_torn_one_first(shm: Path) -> None:
    rank = Rank(shm)
    rank.save(state_of(1), 1)
    torn = Image.open(rank.save(state_of(2), 2))
    assert torn.begin()
    Rank(shm).save(state_of(3), 3)
    assert sorted(filter(None, steps(shm))) == [1, 3]


def test_garbage_in_a_slot_is_replaced(shm: Path) -> None:
    for slot in (0, 1):
        image_path(shm, CHECKPOINTER, 0, slot).write_bytes(b"garbage")
    rank = Rank(shm)
    for step in (1, 2):
        rank.save(state_of(step), step)
    assert sorted(filter(None, steps(shm))) == [1, 2]


# ---- a state that grows ----


def test_a_state_that_grows_gets_more_memory_and_the_newest_stays(shm: Path) -> None:
    rank = Rank(shm)
    for step in range(1, 8):
        path = rank.save(state_of(step, size=100_000 * step), step)
        want = state_of(step, size=100_000 * step)
        check_same(load({"a": None, "step": None}, path, step=step), want)
        assert sorted(filter(None, steps(shm))) == list(range(max(1, step - 1), step + 1))


def test_values_may_grow_beyond_the_spare_room(shm: Path) -> None:
    rank = Rank(shm)
    for step in range(1, 6):
        state = {"a": torch.ones(3), "text": "x" * 100_000 * step}
        check_same(load({"a": None, "text": None}, rank.save(state, step), step=step), state)


def test_whoever_reads_the_smaller_one_may_finish(shm: Path) -> None:
    rank, images = Rank(shm), Images(shm)
    rank.save(state_of(1), 1)
    old = images.image(rank.save(state_of(2), 2))
    body = bytes(old.body)
    with images.pinned(old, old.state):
        for step in (3, 4, 5):
            rank.save(state_of(step, size=10_000 * step), step)
        assert bytes(old.body) == body
        assert sorted(filter(None, steps(shm))) == [4, 5]


def test_a_state_of_the_old_image_is_none_of_the_new_one(shm: Path) -> None:
    """So a seal that was ordered for the one is not put on the other."""
    rank = Rank(shm)
    path = rank.save(state_of(1), 1)
    state = Image.open(path).state
    for step in (2, 3):
        rank.save(state_of(step, size=100_000), step)
    assert Image.open(path).record() is not None
    assert Image.open(path).seal(state) is None


def test_no_memory_is_an_error_and_the_next_save_works(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(shm)
    rank.save(state_of(1), 1)
    rank.save(state_of(2), 2)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="No space left"):
            rank.save(state_of(3, size=100_000), 3)
    assert 2 in steps(shm)
    path = rank.save(state_of(4, size=100_000), 4)
    check_same(load({"a": None, "step": None}, path, step=4), state_of(4, size=100_000))


def test_what_does_not_fit_into_shared_memory_is_kept_on_disk_with_one_warning(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MB of it, unless it is told otherwise."""
    (shm / "spill").symlink_to(tmp_path)
    allocate = os.posix_fallocate

    def little(fd: int, offset: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(shm)) and size > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", little)
    rank = Rank(shm)
    for step in range(1, 5):
        path = rank.save(state_of(step, size=50_000 * step), step)
        want = state_of(step, size=50_000 * step)
        check_same(load({"a": None, "step": None}, path, step=step), want)
    assert len(rank.warnings) == 1
    assert "has no room for a snapshot" in rank.warnings[0]
    assert len(list(tmp_path.iterdir())) == 2
    image = Images(shm).image(path)
    with Images(shm).pinned(image, image.state) as held:
        assert held
    again = Rank(shm)
    again.save(state_of(9), 9)
    assert sorted(filter(None, steps(shm))) == [4, 9]


# ---- memory that is made ready ----


def test_memory_is_made_ready_without_touching_the_newest(shm: Path) -> None:
    rank = Rank(shm)
    rank.save(state_of(1), 1)
    rank.save(state_of(2), 2)
    rank.slots.make_ready(rank.capture(state_of(3, size=500_000))).result()
    assert 2 in steps(shm)
    inodes = {path.stat().st_ino for path in shm.iterdir()}
    rank.save(state_of(3, size=500_000), 3)
    assert {path.stat().st_ino for path in shm.iterdir()} == inodes, "it was made once more"


def test_memory_made_ready_takes_nothing_from_under_a_save(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may be at work at once, and may want other sizes."""
    rank = Rank(shm)
    large = rank.capture(state_of(0, size=300_000))
    small = rank.capture(state_of(1))
    prepare, made = Copier.prepare, []

    def and_meanwhile(self: Any, image: Image) -> None:
        made.append(rank.slots.make_ready(large))
        made[-1].result()
        prepare(self, image)

    monkeypatch.setattr(Copier, "prepare", and_meanwhile)
    for step in range(1, 6):
        copy = rank.copy(small, step)
        seal(copy.path, copy.done.result())
        load({"a": None, "step": None}, copy.path, step=step)
    assert len(made) == 5


def test_a_save_that_needs_more_waits_for_memory_that_is_being_touched(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched, go_on = threading.Event(), threading.Event()
    prefault = Image.prefault

    def slow(self: Image, threads: Any = None) -> None:
        touched.set()
        assert go_on.wait(20)
        prefault(self, threads)

    rank = Rank(shm)
    monkeypatch.setattr(Image, "prefault", slow)
    ready = rank.slots.make_ready(rank.capture(state_of(0)))
    assert touched.wait(20)
    saves: list[Path] = []
    want = state_of(1, size=300_000)
    saving = threading.Thread(target=lambda: saves.append(rank.save(want, 1)))
    saving.start()
    go_on.set()
    ready.result()
    saving.join()
    check_same(load({"a": None, "step": None}, saves[0]), want)


# ---- beside training ----


class Held:
    """The thread that copies beside training, held up until it is let go."""

    def __init__(self, rank: Rank) -> None:
        self._gate = threading.Event()
        rank.slots._behind.submit(self._gate.wait, 20)

    def release(self) -> None:
        self._gate.set()


SIZES = {"small": 100, "large": LARGE_BYTES}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_is_not_guarded_is_copied_before_it_returns(shm: Path, size: int) -> None:
    rank = Rank(shm)
    held = Held(rank)
    state = {"buffer": torch.ones(size), "turned": torch.ones(2, size).t(), "p": torch.ones(size)}
    copy = start(rank, state, 1, guarded={2})
    state["buffer"].zero_()
    state["turned"].zero_()
    assert not copy.done.done()
    held.release()
    copy.keep_off()
    seal(copy.path, copy.done.result(20))
    got = load(dict.fromkeys(state), copy.path)
    assert all((tensor == 1).all() for tensor in got.values())


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_what_is_guarded_may_change_once_it_is_let_go_of(shm: Path, size: int) -> None:
    rank = Rank(shm)
    held = Held(rank)
    state = {"p": torch.ones(size), "turned": torch.ones(2, size).t()}
    copy = start(rank, state, 1, guarded={0, 1})
    assert not copy.on_host.is_set()
    releasing = threading.Thread(target=held.release)
    releasing.start()
    copy.keep_off()
    for tensor in state.values():
        tensor.zero_()
    releasing.join()
    seal(copy.path, copy.done.result(20))
    got = load(dict.fromkeys(state), copy.path)
    assert all((tensor == 1).all() for tensor in got.values())


def test_a_step_of_another_thread_waits_for_the_bytes_and_proves_nothing(shm: Path) -> None:
    """The thread that saved may be in the midst of an operation that torch has not counted yet."""
    rank = Rank(shm)
    copy = start(rank, {"p": torch.ones(9)}, 1, guarded={0})
    stepping = threading.Thread(target=copy.keep_off)
    stepping.start()
    stepping.join()
    with pytest.raises(CheckpointError, match="stepped in another thread"):
        copy.done.result(20)
    assert steps(shm).count(1) == 0


def test_what_is_copied_does_not_count_before_the_thread_that_saved_is_back(shm: Path) -> None:
    rank = Rank(shm)
    copy = start(rank, {"p": torch.ones(9)}, 1, guarded={0})
    rank.slots._behind.submit(lambda: None).result(20)
    assert copy.on_host.is_set()
    assert not copy.done.done()
    copy.settle(0.0)
    copy.done.result(20)
    assert 1 in steps(shm)


def test_a_thread_that_has_ended_has_no_operation_under_way(shm: Path) -> None:
    rank, copies = Rank(shm), list[Copy]()
    saving = threading.Thread(
        target=lambda: copies.append(start(rank, {"p": torch.ones(9)}, 1, guarded={0}))
    )
    saving.start()
    saving.join()
    copies[0].end()
    copies[0].done.result(20)
    assert 1 in steps(shm)


def test_a_change_that_did_not_wait_makes_the_save_fail(shm: Path) -> None:
    rank = Rank(shm)
    rank.save({"p": torch.ones(9)}, 1)
    held = Held(rank)
    state = {"p": torch.ones(9)}
    told: list[int] = []
    copy = start(rank, state, 2, guarded={0}, told=told)
    with torch.no_grad():
        state["p"].mul_(2)
    held.release()
    copy.keep_off()
    with pytest.raises(CheckpointError, match="changed while it was copied"):
        copy.done.result(20)
    assert told == []
    assert steps(shm).count(None) == 1, "a torn one counts"
    rank.save(state, 3)
    assert 3 in steps(shm)


def test_a_change_after_the_optimizer_was_let_in_is_no_failure(shm: Path) -> None:
    """It was let in because everything was copied; the rest of the save may take its time."""
    rank = Rank(shm)
    state = {"p": torch.ones(9)}
    told: list[int] = []
    gate = threading.Event()
    position = Position(1, 1, 0, 1)

    def slow_link(path: Path, state: int) -> None:
        told.append(state)
        assert gate.wait(20)

    copy = rank.slots.start(rank.capture(state), position, {0}, True, slow_link)
    copy.keep_off()
    state["p"].zero_()
    gate.set()
    seal(copy.path, copy.done.result(20))
    assert (load({"p": None}, copy.path)["p"] == 1).all()


def test_whatever_goes_wrong_beside_training_is_the_saves_failure(shm: Path) -> None:
    rank = Rank(shm)

    def broken(path: Path, state: int) -> None:
        raise RuntimeError("nobody there")

    position = Position(1, 1, 0, 1)
    for overlap in (True, False):
        captured = rank.capture({"p": torch.ones(3)})
        copy = rank.slots.start(captured, position, set(), overlap, broken)
        with pytest.raises(CheckpointError, match="RuntimeError: nobody there"):
            copy.done.result(20)
    rank.save({"p": torch.ones(3)}, 2)


def test_what_is_guarded_may_differ_from_save_to_save(shm: Path) -> None:
    rank = Rank(shm)
    state = {f"t{n}": torch.ones(10) for n in range(6)}
    for step, guarded in enumerate([set(), {0, 1}, {1, 5}, set(range(6)), set()], start=1):
        held = Held(rank)
        copy = start(rank, state, step, guarded)
        for index, tensor in enumerate(state.values()):
            if index not in guarded:
                tensor.fill_(step + 1)
        held.release()
        copy.keep_off()
        seal(copy.path, copy.done.result(20))
        got = load(dict.fromkeys(state), copy.path, step=step)
        for name, tensor in state.items():
            assert (got[name] == step).all()
            tensor.fill_(step + 1)


def test_an_interpreter_that_is_about_to_exit_still_saves(shm: Path) -> None:
    rank = Rank(shm)
    rank.slots._behind.shutdown()
    copy = start(rank, state_of(1), 1, guarded={0})
    copy.end()
    seal(copy.path, copy.done.result(0))
