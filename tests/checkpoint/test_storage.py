"""A file is there whole and durable, or it is not there; and nothing of anybody else's is touched."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import FaultyDisk, Machine, RecordingDisk, broken, crashes, dies, in_child, no_space

from holdfast.checkpoint.storage.backends import (
    MANIFEST,
    METADATA,
    is_partial,
    open_storage,
    partial_name,
    read_whole,
    step_of,
)
from holdfast.checkpoint.storage.posix import Disk, PosixStorage, storage_error
from holdfast.errors import NotThere, StorageError


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    storage = PosixStorage(tmp_path / "root")
    storage.make_directory("step")
    return storage


def test_what_was_written_can_be_read_in_pieces(storage: PosixStorage) -> None:
    assert storage.write("step/a", [b"abc", memoryview(b"defg")]) == 7
    with storage.open("step/a") as file:
        assert file.size == 7
        views = [memoryview(bytearray(2)), memoryview(bytearray(0)), memoryview(bytearray(3))]
        file.read_into(1, views)
        assert [bytes(view) for view in views] == [b"bc", b"", b"def"]


def test_more_views_than_the_kernel_takes_at_once(storage: PosixStorage) -> None:
    data = os.urandom(5000)
    storage.write("step/a", [data])
    views = [memoryview(bytearray(2)) for _ in range(2500)]
    with storage.open("step/a") as file:
        file.read_into(0, views)
    assert b"".join(views) == data


def test_reading_past_the_end_is_an_error(storage: PosixStorage) -> None:
    storage.write("step/a", [b"abc"])
    with storage.open("step/a") as file, pytest.raises(StorageError, match="cut off at byte 3"):
        file.read_into(1, [memoryview(bytearray(2)), memoryview(bytearray(2))])


def test_the_kernel_may_give_less_than_asked_for(
    storage: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(1000)
    storage.write("step/a", [data])
    real = os.preadv
    few = 7
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: real(fd, [views[0][:few]], at) if few else 0
    )
    views = [memoryview(bytearray(size)) for size in (3, 500, 0, 497)]
    with storage.open("step/a") as file:
        file.read_into(0, views)
    assert b"".join(views) == data


def test_publishing_twice_changes_nothing(storage: PosixStorage) -> None:
    assert storage.publish("step/m", b"first")
    assert not storage.publish("step/m", b"second")
    assert read_whole(storage, "step/m", 100) == b"first"
    assert [entry.name for entry in storage.entries("step")] == ["m"]


class _NoLinks(Disk):
    def link(self, old: str, new: str, directory: int) -> None:
        raise OSError(errno.EPERM, "no links here")


def test_publishing_works_where_there_are_no_links(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path, _NoLinks())
    assert storage.publish("m", b"first")
    assert not storage.publish("m", b"second")
    assert read_whole(storage, "m", 100) == b"first"
    assert os.listdir(tmp_path) == ["m"]


def test_of_many_that_publish_at_once_one_is_first(tmp_path: Path) -> None:
    pids = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            won = PosixStorage(tmp_path).publish("m", b"%d" % number)
            os._exit(100 if won else 0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes) == [0] * 7 + [100]
    assert (tmp_path / "m").read_bytes() == b"%d" % codes.index(100)
    assert os.listdir(tmp_path) == ["m"]


class _Tidied(Disk):
    """Whoever published first removes what others have begun, in the worst moment."""

    def link(self, old: str, new: str, directory: int) -> None:
        os.unlink(old, dir_fd=directory)
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        super().link(old, new, directory)


def test_one_whose_beginning_was_tidied_away_came_second(tmp_path: Path) -> None:
    assert not PosixStorage(tmp_path, _Tidied()).publish("m", b"late")


# ---- failing ----


def points(work: str) -> list[str]:
    """All calls that an operation makes, so that a test can fail each."""
    return {
        "write": ["create", "write", "write", "sync", "rename", "sync directory"],
        "publish": ["create", "write", "sync", "link", "unlink", "sync directory"],
    }[work]


def do(work: str, storage: PosixStorage) -> None:
    if work == "write":
        storage.write("step/a", [b"new", b"bytes"])
    else:
        storage.publish("step/a", b"newbytes")


CASES = [(work, at) for work in ("write", "publish") for at in range(1, len(points(work)) + 1)]


@pytest.mark.parametrize("happens", [no_space, broken])
@pytest.mark.parametrize(("work", "at"), CASES)
def test_a_call_that_fails_leaves_nothing_half_done(
    storage: PosixStorage, tmp_path: Path, work: str, at: int, happens: object
) -> None:
    disk = FaultyDisk(at, happens)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="step/a: cannot be"):
        do(work, PosixStorage(tmp_path / "root", disk))
    assert disk.points[at - 1].startswith(points(work)[at - 1])
    found = {p.name: p.read_bytes() for p in (tmp_path / "root/step").iterdir()}
    assert found in ({}, {"a": b"newbytes"})
    if points(work)[at - 1] in ("create", "write", "sync"):
        assert found == {}
    storage.write("step/a", [b"again"])
    assert [entry.name for entry in storage.entries("step")] == ["a"]


@pytest.mark.parametrize(("work", "at"), CASES)
def test_killed_anywhere_a_file_is_whole_or_not_there(
    tmp_path: Path, storage: PosixStorage, work: str, at: int
) -> None:
    assert in_child(lambda: do(work, PosixStorage(tmp_path / "root", FaultyDisk(at, dies)))) == -9
    left = [entry.name for entry in storage.entries("step")]
    assert all(name == "a" or name.endswith(".partial") for name in left)
    if "a" in left:
        assert read_whole(storage, "step/a", 100) == b"newbytes"


@pytest.mark.parametrize("work", ["write", "publish"])
def test_whatever_a_machine_forgets_a_file_is_whole_or_not_there(
    storage: PosixStorage, tmp_path: Path, work: str
) -> None:
    root = tmp_path / "root"
    before, disk = Machine.of(root), RecordingDisk(root)
    do(work, PosixStorage(root, disk))
    states = [tree.get("step/a") for _, tree in crashes(before, disk.calls)]
    assert set(states) == {None, b"newbytes"}
    assert len(states) > 5
    # Done is done.
    assert {tree["step/a"] for tree in before.after_crash()} == {b"newbytes"}


def test_the_model_of_forgetting_sees_what_is_not_synced(
    storage: PosixStorage, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for forgotten in ("sync", "sync_directory"):
        before, disk = Machine.of(root), RecordingDisk(root, forgets=(forgotten,))
        PosixStorage(root, disk).write(f"step/{forgotten}", [b"bytes"])
        for call in disk.calls:
            before.apply(call)
        found = {tree.get(f"step/{forgotten}") for tree in before.after_crash()}
        assert found > {b"bytes"}


def test_an_error_while_bytes_are_made_leaves_nothing(storage: PosixStorage) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"some"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        storage.write("step/a", pieces())
    assert storage.entries("step") == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "dmesg"),
        (errno.EROFS, "read-only"),
        (errno.ESTALE, "mount"),
        (errno.EBUSY, "try again"),
    ],
)
def test_an_error_says_where_and_what_to_do(tmp_path: Path, number: int, advice: str) -> None:
    def happens() -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError, match=advice) as told:
        PosixStorage(tmp_path, FaultyDisk(1, happens)).write("a", [b""])
    assert str(tmp_path / "a") in str(told.value)
    assert os.strerror(number) in str(told.value)


@pytest.mark.parametrize(
    ("doing", "advice"),
    [
        ("read", "the right to read"),
        ("listed", "the right to read"),
        ("made", "the right to write"),
    ],
)
def test_who_may_not_read_is_told_to_ask_for_reading_and_not_for_writing(
    doing: str, advice: str
) -> None:
    error = storage_error("/ckpt/step", doing, PermissionError(errno.EACCES, "Permission denied"))
    assert advice in str(error)
    assert "save elsewhere" not in str(error) or doing == "made"


def test_a_store_that_does_not_answer_is_told_so_although_its_error_has_no_text() -> None:
    error = storage_error("s3://bucket/ckpt", "read", TimeoutError())
    assert str(error).startswith(
        "s3://bucket/ckpt: cannot be read: Connection timed out; the storage"
    )


def test_what_is_not_there_is_named(storage: PosixStorage) -> None:
    with pytest.raises(NotThere, match="step/none"), storage.open("step/none"):
        pass
    with pytest.raises(NotThere):
        storage.set_aside("step/none", "refused")
    with pytest.raises(NotThere):
        storage.write("none/a", [b""])
    assert storage.entries("none") == []


# ---- directories, names ----


def test_directories_are_made_with_all_above_them_and_are_durable(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "root"
    before, disk = Machine.of(tmp_path), RecordingDisk(tmp_path)
    PosixStorage(root, disk).make_directory("step")
    for call in disk.calls:
        before.apply(call)
    assert {"a/b/root/step": None}.items() <= next(before.after_crash()).items()


def test_a_directory_that_another_made_and_left_is_made_durable_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "step").mkdir(parents=True)
    disk = RecordingDisk(tmp_path)
    PosixStorage(root, disk).make_directory("step")
    assert {call.synced for call in disk.calls} == {".", "root"}


def test_a_file_where_a_directory_should_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(b"")
    storage = PosixStorage(tmp_path)
    storage.make_directory("step")
    with pytest.raises(StorageError, match="a file is where"):
        storage.write("step/a", [b""])


def test_only_an_empty_directory_is_removed(storage: PosixStorage, tmp_path: Path) -> None:
    storage.write("step/a", [b"1"])
    assert not storage.remove_directory("step")
    storage.remove("step", ["a", "never was"])
    assert storage.remove_directory("step")
    assert storage.remove_directory("step")
    storage.remove("step", ["a"])
    assert os.listdir(tmp_path / "root") == []


def test_what_is_set_aside_replaces_nothing(storage: PosixStorage) -> None:
    for number in range(3):
        storage.publish("step/m", b"%d" % number)
        storage.set_aside("step/m", "refused")
    found = {e.name: read_whole(storage, f"step/{e.name}", 9) for e in storage.entries("step")}
    assert found == {"m.refused": b"0", "m.refused.1": b"1", "m.refused.2": b"2"}


def test_links_are_not_followed_to_change_anything(storage: PosixStorage, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_bytes(b"theirs")
    (tmp_path / "root" / "linked").symlink_to(other)
    assert ("linked", "other") in storage.entries("")
    for change in (
        lambda: storage.write("linked/b", [b""]),
        lambda: storage.publish("linked/b", b""),
        lambda: storage.remove("linked", ["a"]),
        lambda: storage.set_aside("linked/a", "refused"),
    ):
        with pytest.raises(StorageError):
            change()
    assert not storage.remove_directory("linked")
    assert {p.name: p.read_bytes() for p in other.iterdir()} == {"a": b"theirs"}


def test_a_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    storage = PosixStorage(tmp_path / "link")
    storage.make_directory("step")
    storage.write("step/a", [b"1"])
    assert (tmp_path / "real/step/a").read_bytes() == b"1"


def test_too_large_for_a_small_file(storage: PosixStorage) -> None:
    storage.write("step/a", [b"12345"])
    with pytest.raises(StorageError, match="too many"):
        read_whole(storage, "step/a", 4)


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/x")
    assert isinstance(storage, PosixStorage)
    assert storage.where("a") == f"{tmp_path}/x/a"
    assert isinstance(open_storage(tmp_path), PosixStorage)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_000000500", 500),
        ("step_1234567890", 1234567890),
        ("step_0000000500", None),
        ("step_500", None),
        ("step_000000500.bak", None),
        ("xstep_000000500", None),
        ("step_00000050\n", None),
    ],
)
def test_names_are_taken_exactly(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_only_our_own_temporary_names_are_ours() -> None:
    assert all(is_partial(partial_name(name)) for name in ("__3_12.distcp", METADATA, MANIFEST))
    others = [".notes.0123456789abcdef.partial", "a.partial", ".__0_1.distcp.0123.partial"]
    assert not any(map(is_partial, others))
