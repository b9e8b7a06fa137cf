from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fakenode import FakeNode

from holdfast.health import storage
from holdfast.health.baseline import MountSeen
from holdfast.health.storage import Mount, check_storage, mount_of

MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:1 / / rw,relatime - ext4 /dev/root rw
31 27 0:44 / /data rw,relatime shared:5 - lustre 10.0.0.1@tcp:/data rw
32 27 0:45 / /data/with\040space ro,relatime - nfs4 server:/x ro
33 27 0:46 / /late rw - ext4 /dev/a rw
34 27 0:47 / /late rw - xfs /dev/b rw"""


def test_a_good_path_is_written_read_and_left_as_it_was(fake: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("1")
    found = check_storage(fake.node(), str(tmp_path / "mine"), None)
    assert found.verdict == "pass"
    assert found.facts["write_s"] > 0  # type: ignore[operator]
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["precious"]


def test_nothing_is_left_behind_even_when_writing_fails(
    fake: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(storage.os, "write", full)
        found = check_storage(fake.node(), str(tmp_path / "mine"), None)
    assert found.verdict == "fail"
    assert "No space left" in found.reason
    assert not list((tmp_path / "mine").iterdir())


def test_what_is_read_back_must_be_what_was_written(
    fake: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pread

    def flipped(fd: int, size: int, offset: int) -> bytes:
        return bytes(byte ^ 1 for byte in real(fd, size, offset))

    with monkeypatch.context() as patched:
        patched.setattr(storage.os, "pread", flipped)
        found = check_storage(fake.node(), str(tmp_path), None)
    assert found.verdict == "fail"


@pytest.mark.parametrize("name", ["gone", "file"])
def test_a_path_that_is_no_directory_fails(fake: FakeNode, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    assert check_storage(fake.node(), str(tmp_path / name), None).verdict == "fail"


def raising(number: int) -> Any:
    def refuse(path: str) -> bool:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize(
    ("number", "options", "verdict"),
    [
        (errno.EACCES, "rw", "warn"),
        (errno.EROFS, "ro", "warn"),
        (errno.EROFS, "rw", "fail"),
        (errno.EIO, "rw", "fail"),
        (errno.ESTALE, "rw", "fail"),
        (errno.EDQUOT, "rw", "fail"),
    ],
)
def test_what_is_meant_to_be_read_only_warns_and_what_broke_fails(
    fake: FakeNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    options: str,
    verdict: str,
) -> None:
    fake.write("proc/self/mountinfo", f"31 27 0:44 / {tmp_path} {options} - nfs4 server:/x rw")
    monkeypatch.setattr(storage, "_write_and_read", raising(number))
    assert check_storage(fake.node(), str(tmp_path), None).verdict == verdict


def test_a_mount_that_was_lost_fails_although_writing_goes_well(
    fake: FakeNode, tmp_path: Path
) -> None:
    whole = f"31 27 0:44 / {tmp_path} rw - lustre mgs:/x rw"
    fake.write("proc/self/mountinfo", f"27 1 8:1 / / rw - ext4 /dev/root rw\n{whole}")
    first = check_storage(fake.node(), str(tmp_path), None)
    assert (first.verdict, first.seen) == ("pass", MountSeen(str(tmp_path), "lustre"))
    fake.write("proc/self/mountinfo", "27 1 8:1 / / rw - ext4 /dev/root rw")
    second = check_storage(fake.node(), str(tmp_path), first.seen)
    assert second.verdict == "fail"
    assert "was on lustre" in second.reason
    assert second.seen is None  # It is missed until it is mounted again.


def test_what_is_mounted_on_demand_is_not_lost_while_it_is_not_mounted(
    fake: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = f"31 27 0:44 / {tmp_path} rw - autofs systemd-1 rw"
    mounted = f"{waiting}\n32 31 0:45 / {tmp_path} rw - nfs4 server:/x rw"

    def use(path: str) -> bool:
        fake.write("proc/self/mountinfo", mounted)
        return True

    monkeypatch.setattr(storage, "_write_and_read", use)
    fake.write("proc/self/mountinfo", waiting)
    first = check_storage(fake.node(), str(tmp_path), None)
    assert (first.verdict, first.facts["kind"]) == ("pass", "nfs4")
    fake.write("proc/self/mountinfo", waiting)
    second = check_storage(fake.node(), str(tmp_path), first.seen)
    assert (second.verdict, second.seen) == ("pass", first.seen)


def test_a_path_behind_a_link_is_where_the_link_leads(fake: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fake.write("proc/self/mountinfo", f"31 27 0:44 / {tmp_path}/real rw - lustre mgs:/x rw")
    assert check_storage(fake.node(), str(tmp_path / "link"), None).facts["kind"] == "lustre"


def test_a_home_that_is_not_made_yet_is_unknown_and_not_made(
    fake: FakeNode, tmp_path: Path
) -> None:
    home = str(tmp_path / "home")
    assert check_storage(fake.node(home=home), home, None).verdict == "unknown"
    assert not Path(home).exists()


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/data/set", Mount("/data", "lustre", False)),
        ("/data", Mount("/data", "lustre", False)),
        ("/database", Mount("/", "ext4", False)),
        ("/data/with space/x", Mount("/data/with space", "nfs4", True)),
        ("/late/x", Mount("/late", "xfs", False)),
    ],
)
def test_the_innermost_mount_is_found_without_touching_the_path(path: str, mount: Mount) -> None:
    assert mount_of(path, MOUNTS) == mount


def test_a_table_of_mounts_that_cannot_be_read_names_none() -> None:
    assert mount_of("/data", "garbage\n1 2 3 - x") is None
