"""Where a node's images are: there while their owner lives, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.memory import image_home as imagehome
from holdfast.checkpoint.memory.image_home import ImageHome
from holdfast.errors import UsageError

OWNER = """
import sys
from pathlib import Path
from holdfast.checkpoint.memory import image_home as imagehome
imagehome.SHARED_MEMORY = Path(sys.argv[1])
home = imagehome.ImageHome("job")
(home.path / "x.image").write_bytes(b"x")
print(home.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shared, disk = tmp_path / "shm", tmp_path / "disk"
    for path in (shared, disk):
        path.mkdir()
    monkeypatch.setattr(imagehome, "SHARED_MEMORY", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    return shared


@pytest.fixture
def owner(shared_memory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has a home of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(shared_memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def path_of(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def test_a_home_is_ours_alone_and_gone_when_it_is_removed() -> None:
    home = ImageHome("job")
    assert home.path.stat().st_mode & 0o777 == 0o700
    (home.path / "x.image").write_bytes(b"x")
    spill = (home.path / "spill").resolve()
    assert spill.stat().st_mode & 0o777 == 0o700
    home.remove()
    assert not home.path.exists()
    assert not spill.exists()


def test_images_may_be_put_elsewhere(tmp_path: Path) -> None:
    home = ImageHome("job", tmp_path / "large" / "disk")
    assert home.path.parent == tmp_path / "large" / "disk"
    home.remove()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"snapshots cannot be kept there.*--image-dir"):
        ImageHome("job", tmp_path / "file")


def test_homes_of_one_name_are_apart() -> None:
    one, other = ImageHome("job"), ImageHome("job")
    assert one.path != other.path
    one.remove()
    other.remove()


def test_what_a_living_owner_has_stays(owner: subprocess.Popen[str]) -> None:
    path = path_of(owner)
    ImageHome("other").remove()
    assert (path / "x.image").exists()


def test_what_a_killed_owner_left_is_removed_by_the_next_one(owner: subprocess.Popen[str]) -> None:
    path = path_of(owner)
    owner.kill()
    owner.wait()
    assert path.exists()
    ImageHome("other").remove()
    assert not path.exists()


def test_it_stays_while_a_process_lives_that_the_owner_had_forked(shared_memory: Path) -> None:
    """An agent writes its last snapshot after its launcher was killed."""
    home = ImageHome("job")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.close(home._spill_lock)
    os.close(home._lock)  # As if this process had died.
    try:
        imagehome.clear_abandoned()
        assert home.path.exists()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
    imagehome.clear_abandoned()
    assert not home.path.exists()


def test_what_is_not_a_home_of_ours_stays(shared_memory: Path) -> None:
    precious = shared_memory / "precious"
    precious.mkdir()
    (precious / "file").touch()
    link = shared_memory / f"holdfast-{os.getuid()}-link"
    link.symlink_to(precious)
    plain = shared_memory / f"holdfast-{os.getuid()}-file"
    plain.touch()
    imagehome.clear_abandoned()
    assert link.is_symlink()
    assert plain.exists()
    assert (precious / "file").exists()


def test_many_that_start_at_once_all_have_a_home_in_the_end() -> None:
    """One may take another's for abandoned in the moment between its making and its lock."""
    homes: list[ImageHome] = []
    errors: list[Exception] = []

    def start() -> None:
        try:
            for _ in range(20):
                homes.append(ImageHome("job"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(homes) == 160
    assert all(home.path.is_dir() for home in homes)
    for home in homes:
        home.remove()
