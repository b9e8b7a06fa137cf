"""Lets writes of checkpoint files fail as on a full disk, for `holdfast chaos`."""

from __future__ import annotations

import errno
import os
import threading

from holdfast.checkpoint.storage.disk import storage_error


class Shortage:
    """The number of files whose writes will fail."""

    def __init__(self) -> None:
        self._left = 0
        self._lock = threading.Lock()

    def begin(self, files: int) -> None:
        with self._lock:
            self._left = files

    def strike(self, where: str) -> None:
        """Raise the error of a full disk, if this file is one of them."""
        with self._lock:
            full = self._left > 0
            self._left -= full
        if full:
            raise storage_error(where, "written", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
