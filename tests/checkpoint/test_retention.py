"""What is kept, what goes, and that nothing else does."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec
import pytest
from bodies import make_body, save, write
from faulty import FaultyDisk, broken, dies, in_child
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.storage.backends import MANIFEST
from holdfast.checkpoint.storage.commit import verify
from holdfast.checkpoint.storage.manifest import StepFound, find_step, refuse, steps
from holdfast.checkpoint.storage.posix import PosixStorage
from holdfast.checkpoint.storage.retention import (
    KeepAll,
    KeepEvery,
    KeepLatest,
    Policy,
    plan,
    prune,
)
from holdfast.errors import StorageError, UsageError

STEP = "step_000000100"


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


def complete(*numbers: int) -> list[StepFound]:
    return [StepFound(step, "complete") for step in sorted(numbers, reverse=True)]


# ---- policies ----


def test_the_latest_and_every_so_many() -> None:
    found = complete(*range(100, 2600, 100))
    assert plan(KeepLatest(3), found) == list(range(100, 2300, 100))
    kept = {2500, 2400, 2300, 1000, 2000}
    assert set(plan(KeepLatest(3) | KeepEvery(1000), found)) == set(range(100, 2600, 100)) - kept
    assert plan(KeepAll(), found) == []
    assert plan(KeepAll() | KeepLatest(1), found) == []


def test_a_user_may_decide() -> None:
    assert plan(lambda steps: {s for s in steps if s % 7 == 0}, complete(7, 8, 14, 15)) == [8]
    assert plan(lambda steps: [steps[0]], complete(1, 2, 3)) == [2]


def test_the_newest_and_the_one_that_is_known_to_be_good_stay() -> None:
    found = complete(1, 2, 3, 4)
    assert plan(lambda steps: (), found) == [1, 2, 3]
    assert plan(lambda steps: (), found, verified=2) == [1, 3]
    assert plan(KeepEvery(3), found, verified=2) == [1]


def test_without_a_complete_step_nothing_goes() -> None:
    found = [StepFound(3, "partial"), StepFound(2, "refused"), StepFound(1, "partial")]
    assert plan(KeepLatest(1), found) == []


def test_what_never_was_finished_goes_once_a_newer_step_is_complete() -> None:
    found = [StepFound(5, "partial"), *complete(2, 4), StepFound(3, "partial")]
    assert plan(KeepLatest(2), found) == [3]
    assert plan(KeepLatest(2), found, busy={3}) == []


def test_what_was_refused_stays_as_long_as_anything_that_is_older() -> None:
    found = [*complete(2, 4, 6), StepFound(5, "refused"), StepFound(1, "refused")]
    assert plan(KeepLatest(2), found) == [1, 2]
    assert plan(KeepLatest(1), found) == [1, 2, 4, 5]


@given(
    st.sets(st.integers(0, 50)),
    st.one_of(st.builds(KeepLatest, st.integers(1, 9)), st.builds(KeepEvery, st.integers(1, 9))),
)
def test_a_plan_is_stable_and_keeps_the_newest(numbers: set[int], keep: Policy) -> None:
    deleted = set(plan(keep, complete(*numbers)))
    assert deleted <= numbers
    left = numbers - deleted
    assert not numbers or max(numbers) in left
    assert plan(keep, complete(*left)) == []


@pytest.mark.parametrize("policy", [KeepAll(), KeepLatest(3) | KeepEvery(10) | KeepAll()])
def test_a_policy_can_be_sent(policy: Policy) -> None:
    sent = msgspec.msgpack.encode(policy)
    assert msgspec.msgpack.decode(sent, type=Policy) == policy


@pytest.mark.parametrize("make", [lambda: KeepLatest(0), lambda: KeepEvery(0)])
def test_a_policy_that_keeps_nothing_is_refused(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


# ---- deleting ----


def test_deleted_steps_are_gone_and_the_others_verify(
    storage: PosixStorage, tmp_path: Path
) -> None:
    for step in (100, 200, 300, 400):
        save(storage, step)
    done = prune(storage, plan(KeepLatest(2), steps(storage)))
    assert (done.steps, done.shared) == ((100, 200), ())
    assert sorted(os.listdir(tmp_path)) == ["step_000000300", "step_000000400"]
    assert verify(storage, 300) == verify(storage, 400) == []


def test_twenty_saves_with_restarts_leave_exactly_three(
    storage: PosixStorage, tmp_path: Path
) -> None:
    for number in range(20):
        write(storage, make_body(10 * number + 5, number, 0, 2))  # Its save was cut short.
        save(storage, 10 * number + 10, round=number + 1)
        prune(storage, plan(KeepLatest(3), steps(storage)))
    assert [one.step for one in steps(storage)] == [200, 190, 180]
    assert len(os.listdir(tmp_path)) == 3


def test_the_newest_is_never_deleted_whoever_asks(storage: PosixStorage) -> None:
    for step in (100, 200, 300):
        save(storage, step)
    assert prune(storage, [100, 200, 300], verified=100).steps == (200,)
    assert [one.step for one in steps(storage)] == [300, 100]


def test_if_the_newest_is_damaged_the_one_before_it_stays(
    storage: PosixStorage, tmp_path: Path
) -> None:
    for step in (100, 200, 300):
        save(storage, step)
    (tmp_path / "step_000000300" / MANIFEST).write_bytes(b"")
    assert plan(KeepLatest(1), steps(storage)) == [100]
    assert prune(storage, [100, 200]).steps == (100,)


def test_what_users_put_there_stays(storage: PosixStorage, tmp_path: Path) -> None:
    for step in (100, 200):
        save(storage, step)
    outside = tmp_path.parent / "outside.distcp"
    outside.write_bytes(b"elsewhere")
    place = tmp_path / STEP
    (place / "notes.txt").write_text("mine")
    (place / "sub").mkdir()
    (place / "sub" / "__0_1.distcp").write_bytes(b"mine")
    (place / "__5_5.distcp").write_bytes(b"mine: it does not end as a file of Holdfast's does")
    (place / "__6_6.distcp").symlink_to(outside)
    (tmp_path / "best.pt").write_bytes(b"mine")
    done = prune(storage, [100])
    assert (done.steps, done.shared) == ((100,), (str(place),))
    assert sorted(os.listdir(place)) == ["__5_5.distcp", "__6_6.distcp", "notes.txt", "sub"]
    assert outside.read_bytes() == b"elsewhere"
    assert (tmp_path / "best.pt").exists()


def test_a_file_that_was_moved_elsewhere_and_linked_is_not_followed(
    storage: PosixStorage, tmp_path: Path
) -> None:
    for step in (100, 200):
        save(storage, step)
    moved = tmp_path / "large disk"
    (tmp_path / STEP / "__0_1.distcp").rename(moved)
    (tmp_path / STEP / "__0_1.distcp").symlink_to(moved)
    assert verify(storage, 100) == []
    prune(storage, [100])
    assert moved.exists()


def test_a_step_that_is_a_link_is_left_alone(storage: PosixStorage, tmp_path: Path) -> None:
    archive = PosixStorage(tmp_path / "archive")
    save(archive, 100)
    root = PosixStorage(tmp_path / "root")
    save(root, 200)
    (tmp_path / "root" / STEP).symlink_to(tmp_path / "archive" / STEP)
    assert [one.step for one in steps(root)] == [200]
    assert prune(root, [100]).steps == ()
    assert verify(archive, 100) == []


def test_the_parent_directory_is_never_touched(tmp_path: Path) -> None:
    """An explicit path once cost users everything beside it."""
    (tmp_path / "thesis.tex").write_text("years of work")
    storage = PosixStorage(tmp_path / "ckpt")
    for step in (1, 2, 3):
        save(storage, step)
        prune(storage, plan(KeepLatest(1), steps(storage)))
    prune(storage, [3])
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "thesis.tex"]
    assert os.listdir(tmp_path / "ckpt") == ["step_000000003"]


def test_leftovers_go_with_their_step(storage: PosixStorage, tmp_path: Path) -> None:
    save(storage, 100)
    refuse(storage, 100)
    write(storage, make_body(100, 2, 0, 2))
    (tmp_path / STEP / ".__1_2.distcp.0123456789abcdef.partial").write_bytes(b"half")
    save(storage, 200)
    prune(storage, [100])
    assert os.listdir(tmp_path) == ["step_000000200"]


# ---- deaths on the way ----


def number_of_points(tmp_path: Path) -> list[str]:
    storage = PosixStorage(tmp_path / "count")
    for step in (100, 200):
        save(storage, step)
    disk = FaultyDisk()
    prune(PosixStorage(tmp_path / "count", disk), [100])
    return disk.points


def test_a_killed_deletion_is_never_seen_as_whole_and_the_next_one_ends_it(
    tmp_path: Path,
) -> None:
    points = number_of_points(tmp_path)
    assert points[0] == f"rename to {MANIFEST}.deleted"
    assert points[1] == "sync directory"
    for at in range(1, len(points) + 1):
        root = tmp_path / str(at)
        storage = PosixStorage(root)
        for step in (100, 200):
            save(storage, step)
        doomed = PosixStorage(root, FaultyDisk(at, dies))
        assert in_child(partial(prune, doomed, [100])) == -9
        found = find_step(storage, 100)
        assert (found.state == "complete") == (at == 1)
        if found.state == "complete":
            assert verify(storage, 100) == []
        # Nobody asks for it: what has begun is brought to its end, or is a leftover.
        prune(storage, plan(KeepLatest(2 if at > 1 else 1), steps(storage)))
        assert os.listdir(root) == ["step_000000200"], points[at - 1]
        assert verify(storage, 200) == []


def test_a_failing_deletion_is_an_error_and_the_next_one_ends_it(tmp_path: Path) -> None:
    for at in range(1, len(number_of_points(tmp_path)) + 1):
        root = tmp_path / str(at)
        storage = PosixStorage(root)
        for step in (100, 200):
            save(storage, step)
        with pytest.raises(StorageError, match="Input/output error"):
            prune(PosixStorage(root, FaultyDisk(at, broken)), [100])
        prune(storage, plan(KeepLatest(1), steps(storage)))
        assert os.listdir(root) == ["step_000000200"]


def test_a_step_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    for step in (100, 200, 300):
        save(storage, step)

    class Stuck(FaultyDisk):
        def rename(self, old: str, new: str, directory: int) -> None:
            if STEP in os.readlink(f"/proc/self/fd/{directory}"):
                broken()
            super().rename(old, new, directory)

    with pytest.raises(StorageError, match=STEP):
        prune(PosixStorage(tmp_path, Stuck()), [100, 200])
    assert [one.step for one in steps(storage)] == [300, 100]


def test_a_step_that_is_saved_anew_while_its_deletion_is_ended_stays_whole(
    storage: PosixStorage, tmp_path: Path
) -> None:
    save(storage, 100, round=1)
    storage.set_aside(f"{STEP}/{MANIFEST}", "deleted")
    save(storage, 200, round=1)
    # A job that was started anew, which counts its rounds from one again, has got as far as this.
    record = write(storage, make_body(100, 1, 0, 2, shared=2))
    done = prune(storage, [])
    assert done.steps == (100,)
    assert os.listdir(tmp_path / STEP) == [record.name]


def test_a_damaged_mark_of_deletion_does_not_keep_the_step_for_ever(
    storage: PosixStorage, tmp_path: Path
) -> None:
    for step in (100, 200):
        save(storage, step)
    storage.set_aside(f"{STEP}/{MANIFEST}", "deleted")
    (tmp_path / STEP / f"{MANIFEST}.deleted").write_bytes(b"")
    prune(storage, [])
    prune(storage, plan(KeepLatest(1), steps(storage)))
    assert os.listdir(tmp_path) == ["step_000000200"]


def test_saving_a_half_deleted_step_again_makes_it_whole(
    storage: PosixStorage, tmp_path: Path
) -> None:
    save(storage, 100, round=1)
    storage.set_aside(f"{STEP}/{MANIFEST}", "deleted")
    assert find_step(storage, 100).half_deleted
    save(storage, 100, round=2)
    assert find_step(storage, 100).state == "complete"
    assert verify(storage, 100) == []
    assert sorted(os.listdir(tmp_path / STEP)) == [
        *(".metadata", "__0_2.distcp", "__1_2.distcp", MANIFEST)
    ]
