"""Tells the user on stderr how far a long pass over files is; says nothing of a short one."""

from __future__ import annotations

import sys
import time

QUIET_SECONDS = 3.0
EVERY_SECONDS = 5.0


class IndexProgress:
    """Progress of one pass over the files of a data set."""

    def __init__(self, total_bytes: int, files: int) -> None:
        self._total = total_bytes
        self._files = files
        self._began = time.monotonic()
        self._next = self._began + QUIET_SECONDS
        self._done = 0
        self._file = 0
        self._spoke = False

    def advance(self, count: int) -> None:
        """Count bytes of the current file."""
        self._done += count
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_SECONDS
            self._spoke = True
            share = self._done / max(self._total, 1)
            left = (now - self._began) * (1 - share) / max(share, 1e-9)
            self._say(
                f"{min(share, 1):.0%}, file {self._file + 1} of {self._files}, {left:.0f} s left"
            )

    def file_done(self, bytes_before: int) -> None:
        """Count a file as a whole, with what was not counted of it yet."""
        self._file += 1
        self.advance(max(0, bytes_before - self._done))

    def finished(self, records: int) -> None:
        if self._spoke:
            took = time.monotonic() - self._began
            self._say(f"{records} records in {self._files} files, {took:.1f} s")

    def _say(self, words: str) -> None:
        print(f"holdfast: indexing data: {words}", file=sys.stderr, flush=True)
