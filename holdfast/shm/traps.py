"""Passes faults to inject between an agent and a worker, in shared memory behind the rank page.

There are two logs, one each way, with one writer and one reader: traps from the agent, and entries of
the worker about traps that spring, which it appends before a fault strikes. So the agent knows of a
fault even if the process is killed by it, and nothing waits on a socket. Until a fault is injected
the memory is never touched, and none is used.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

TRAP_LOG_BYTES: Final = 4 << 20
_HEAD_BYTES: Final = 8
_SIZE: Final = struct.Struct("I")


class TrapLog:
    """One side's view of an append-only log."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._written = view[:_HEAD_BYTES].cast("Q")
        """One word: bytes appended so far."""
        self._read = 0

    def append(self, entry: bytes) -> bool:
        """Append an entry; False if the log is full."""
        written = self._written[0]
        at = _HEAD_BYTES + written
        end = at + _SIZE.size + len(entry)
        if end > len(self._view):
            return False
        _SIZE.pack_into(self._view, at, len(entry))
        self._view[at + _SIZE.size : end] = entry
        _fence()
        self._written[0] = written + _SIZE.size + len(entry)
        return True

    def read(self) -> list[bytes]:
        """Return the entries that were appended since the last call."""
        entries, written = [], self._written[0]
        while self._read < written:
            _fence()
            at = _HEAD_BYTES + self._read + _SIZE.size
            (size,) = _SIZE.unpack_from(self._view, at - _SIZE.size)
            entries.append(bytes(self._view[at : at + size]))
            self._read += _SIZE.size + size
        return entries

    def reset(self) -> None:
        """Forget all entries; the other side has to `rewind` before it reads again."""
        self._written[0] = 0
        self._read = 0

    def rewind(self) -> None:
        """Read from the beginning again, after the other side has forgotten all entries."""
        self._read = 0

    def close(self) -> None:
        self._written.release()
        self._view.release()


_lock = threading.Lock()


def _fence() -> None:
    """Order memory accesses: acquiring and releasing a lock is a full memory fence."""
    with _lock:
        pass
