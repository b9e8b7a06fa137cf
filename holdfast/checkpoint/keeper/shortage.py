"""A disk that is full because somebody asked for that: see `holdfast chaos`."""

from __future__ import annotations

import errno
import os
import threading

from holdfast.checkpoint.storage.posix import storage_error


class Shortage:
    """The next so many files cannot be written."""

    def __init__(self) -> None:
        self._left = 0
        self._lock = threading.Lock()

    def begin(self, files: int) -> None:
        with self._lock:
            self._left = files

    def strike(self, where: str) -> None:
        """Fail as the disk would, if it is full."""
        with self._lock:
            full = self._left > 0
            self._left -= full
        if full:
            raise storage_error(where, "written", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
