"""Owns the directory in shared memory that holds a node's images during a run.

It belongs to the launcher, which outlives workers, keepers and agents, and removes it when it ends. A
launcher that was killed cannot; so each holds a file lock on its directory while it lives, and the next
launcher on the machine removes the directories that are not locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def _prefix() -> str:
    return f"holdfast-{os.getuid()}-"


class ImageHome:
    """A directory for images, locked while its owner lives."""

    def __init__(self, name: str) -> None:
        clear_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{name[:40]}-", dir=_root()))
            lock = _locked(self.path)
            if lock is not None:
                self._lock = lock
                return
            # Another launcher that starts at this moment took it for abandoned, and removes it.

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _root() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def clear_abandoned() -> None:
    """Remove the directories of launchers that were killed."""
    for path in _root().glob(f"{_prefix()}*"):
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


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
