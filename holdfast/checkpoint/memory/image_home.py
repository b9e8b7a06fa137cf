"""Owns the directory in shared memory that holds a node's images during a run.

It belongs to the launcher, which outlives workers, keepers and agents, and removes it when it ends. A
launcher that was killed cannot; so each holds a file lock on its directory while it lives, and the next
launcher on the machine removes the directories that are not locked.

Shared memory may be too small: a container has 64 MB unless it is told otherwise. So there is a second
directory, on disk, for images that do not fit; `SPILL` in the first one links to it. Saves to it are
slower, but they are saves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from holdfast.errors import UsageError

SHARED_MEMORY = Path("/dev/shm")
SPILL = "spill"
"""Name of the link to the directory on disk."""


def _prefix() -> str:
    return f"holdfast-{os.getuid()}-"


def _spill_prefix() -> str:
    return f"holdfast-spill-{os.getuid()}-"


class ImageHome:
    """Directories for images, locked while their owner lives."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        """Make them in `root`; None: in shared memory, where there is any."""
        root = root or _shared_memory()
        clear_abandoned(root)
        self.path, self._lock = _made(root, _prefix() + name[:40])
        self._spill, self._spill_lock = _made(_on_disk(), _spill_prefix() + name[:40])
        (self.path / SPILL).symlink_to(self._spill)

    def remove(self) -> None:
        for path, lock in ((self.path, self._lock), (self._spill, self._spill_lock)):
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _made(root: Path, stem: str) -> tuple[Path, int]:
    """Make a directory, and lock it."""
    while True:
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=f"{stem}-", dir=root))
        except OSError as error:
            raise UsageError(
                f"{root}: snapshots cannot be kept there: {error.strerror}; give a directory that"
                " can be written to with --image-dir"
            ) from None
        lock = _locked(path)
        if lock is not None:
            return path, lock
        # Another launcher that starts at this moment took it for abandoned, and removes it.


def _shared_memory() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else _on_disk()


def _on_disk() -> Path:
    return Path(tempfile.gettempdir())


def clear_abandoned(root: Path | None = None) -> None:
    """Remove the directories of launchers that were killed."""
    homes = (root or _shared_memory()).glob(f"{_prefix()}*")
    for path in [*homes, *_on_disk().glob(f"{_spill_prefix()}*")]:
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def remove_home(path: str) -> None:
    """Remove an owner's directories once it is dead; until then it holds locks on them."""
    with suppress(OSError):
        home = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(home, fcntl.LOCK_EX)
        shutil.rmtree(Path(path, SPILL).resolve(), ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)


def _locked(path: Path) -> int | None:
    """Lock a directory; return None if another process holds it, or it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, there = os.fstat(fd), os.stat(path, follow_symlinks=False)
        # The previous owner may have removed it between the two calls.
        if held.st_ino == there.st_ino and held.st_uid == os.getuid():
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
