"""Passes faults to inject from an agent to a worker, in shared memory behind its rank page.

The agent writes the traps that are set as one block of bytes into one of two buffers, in turn, and
then a version number that names the buffer. The worker sees the version change. For each trap that
springs it appends an entry to a ring before the fault strikes, so the agent knows of it even if the
process is killed by it. Nothing waits on a socket.

Until a fault is injected the area is never touched, and takes no memory.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple

TRAPS_BYTES: Final = 1 << 16
_VERSION, _SPRUNG = 0, 1
"""Words: number of blocks written by the agent, number of entries written by the worker."""
_ENTRY: Final = struct.Struct("QQdQ")
_RING_AT: Final = 64
_RING_ENTRIES: Final = 120
_BUFFERS_AT: Final = 4096
_BUFFER_BYTES: Final = (TRAPS_BYTES - _BUFFERS_AT) // 2
MAX_TRAPS_BYTES: Final = _BUFFER_BYTES - 8


class Sprung(NamedTuple):
    """A trap that has sprung."""

    injection: int
    occurrence: int
    at: float
    """Monotonic clock of the machine."""
    step: int


class TrapArea:
    """The agent's or the worker's view of the area."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._words = view[:_RING_AT].cast("Q")
        self._taken = 0

    def close(self) -> None:
        self._words.release()
        self._view.release()

    def write(self, traps: bytes) -> None:
        """Replace all traps; called by the agent."""
        version = self._words[_VERSION] + 1
        at = _BUFFERS_AT + version % 2 * _BUFFER_BYTES
        struct.pack_into("Q", self._view, at, len(traps))
        self._view[at + 8 : at + 8 + len(traps)] = traps
        _fence()
        self._words[_VERSION] = version

    @property
    def version(self) -> int:
        return self._words[_VERSION]

    def read(self) -> bytes:
        """Return what the agent wrote last; called by the worker."""
        while True:
            version = self.version
            _fence()
            at = _BUFFERS_AT + version % 2 * _BUFFER_BYTES
            (size,) = struct.unpack_from("Q", self._view, at)
            traps = bytes(self._view[at + 8 : at + 8 + size])
            _fence()
            if version == self.version:  # The other buffer is written next.
                return traps

    def spring(self, sprung: Sprung) -> None:
        """Tell the agent that a trap springs; called by the worker."""
        count = self._words[_SPRUNG]
        at = _RING_AT + count % _RING_ENTRIES * _ENTRY.size
        _ENTRY.pack_into(self._view, at, *sprung)
        _fence()
        self._words[_SPRUNG] = count + 1

    def take_sprung(self) -> list[Sprung]:
        """Return the traps that have sprung since the last call; called by the agent."""
        count = self._words[_SPRUNG]
        _fence()
        first = max(self._taken, count - _RING_ENTRIES)
        self._taken = count
        places = [_RING_AT + index % _RING_ENTRIES * _ENTRY.size for index in range(first, count)]
        return [Sprung(*_ENTRY.unpack_from(self._view, at)) for at in places]


_lock = threading.Lock()


def _fence() -> None:
    """Order memory accesses: acquiring and releasing a lock is a full memory fence."""
    with _lock:
        pass
