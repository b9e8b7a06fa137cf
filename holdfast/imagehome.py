"""The directory in shared memory that holds a node's images for the length of a run.

It belongs to the launcher, which outlives workers, keepers and agents, and removes it when it ends. A
launcher that was killed cannot; so each holds a lock on its directory for as long as it lives, and
whoever starts next on the machine removes those that nobody holds.
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
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self.path = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{name[:40]}-", dir=root))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def clear_abandoned() -> None:
    """Remove what launchers left that were killed."""
    if not SHARED_MEMORY.is_dir():
        return
    for path in SHARED_MEMORY.glob(f"{_prefix()}*"):
        if path.is_dir() and path.stat().st_uid == os.getuid():
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Hold a directory; None when somebody else does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
