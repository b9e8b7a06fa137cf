"""Where an agent lays traps for a worker: an area of shared memory beside its progress page.

A trap is a fault that somebody asked for, and the step in which it shall happen. The agent writes it
into a free place and counts one more that was laid; the worker sees the count change, and says by a
time in the same place when the trap was sprung. Nobody has to read a socket for that, and what was
sprung is known even of a process that was killed by it.

As long as nobody asks for a fault the area is never touched, and costs nothing.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

TRAPS_BYTES: Final = 4096

_COUNT = 0
_FIRST: Final = 8
_WORDS: Final = 8
_INJECTION, _OCCURRENCE, _KIND, _STEP, _VALUE, _SPOT, _SPRUNG_AT, _SPRUNG_STEP = range(_WORDS)
PLACES: Final = TRAPS_BYTES // 8 // _WORDS - 1


class Laid(NamedTuple):
    """A trap as it lies there."""

    place: int
    injection: int
    occurrence: int
    kind: int
    step: int
    value: float
    spot: int


class Sprung(NamedTuple):
    """A trap that was sprung."""

    injection: int
    occurrence: int
    kind: int
    at: float
    """On the machine's monotonic clock."""
    step: int
    spot: int
    value: float


class TrapArea:
    """One side's view of it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._ints = view.cast("Q")
        self._floats = view.cast("d")

    def close(self) -> None:
        self._ints.release()
        self._floats.release()
        self._view.release()

    # ---- the agent's side ----

    def lay(
        self,
        injection: int,
        occurrence: int,
        kind: int,
        step: int,
        value: float,
        spot: int,
        now_at: int,
    ) -> bool:
        """Lay a trap; False when there is no place. The worker has come to step `now_at`: what it
        came by without springing it makes place."""
        for at in range(_FIRST, _FIRST + PLACES * _WORDS, _WORDS):
            ints = self._ints
            if ints[at + _INJECTION] and not self._useless(at, now_at):
                continue
            ints[at + _INJECTION] = 0
            _fence()
            ints[at + _OCCURRENCE], ints[at + _KIND], ints[at + _STEP] = occurrence, kind, step
            self._floats[at + _VALUE] = value
            ints[at + _SPOT], ints[at + _SPRUNG_AT], ints[at + _SPRUNG_STEP] = spot, 0, 0
            _fence()
            ints[at + _INJECTION] = injection
            _fence()
            ints[_COUNT] += 1
            return True
        return False

    def _useless(self, at: int, now_at: int) -> bool:
        return not self._ints[at + _SPRUNG_AT] and 0 < self._ints[at + _STEP] < now_at

    def take_sprung(self) -> list[Sprung]:
        """Those that were sprung since the last time; their places are free again."""
        found = []
        ints, floats = self._ints, self._floats
        if not ints[_COUNT]:
            return []
        for at in range(_FIRST, _FIRST + PLACES * _WORDS, _WORDS):
            if ints[at + _INJECTION] and ints[at + _SPRUNG_AT]:
                found.append(
                    Sprung(
                        ints[at + _INJECTION],
                        ints[at + _OCCURRENCE],
                        ints[at + _KIND],
                        floats[at + _SPRUNG_AT],
                        ints[at + _SPRUNG_STEP],
                        ints[at + _SPOT],
                        floats[at + _VALUE],
                    )
                )
                ints[at + _INJECTION] = 0
        return sorted(found, key=lambda sprung: sprung.at)

    # ---- the worker's side ----

    @property
    def count(self) -> int:
        """How many were laid so far."""
        return int(self._ints[_COUNT])

    def laid(self) -> list[Laid]:
        """Those that are not sprung, by their step."""
        found = []
        for place in range(PLACES):
            at = _FIRST + place * _WORDS
            injection, occurrence, kind, step, _, spot, sprung, _ = self._ints[at : at + _WORDS]
            if injection and not sprung:
                value = self._floats[at + _VALUE]
                found.append(Laid(place, injection, occurrence, kind, step, value, spot))
        return sorted(found, key=lambda trap: (trap.step, trap.injection))

    def spring(self, trap: Laid, now: float, step: int) -> bool:
        """Say that a trap is sprung; False when it lies there no more."""
        at = _FIRST + trap.place * _WORDS
        ints = self._ints
        if ints[at + _INJECTION] != trap.injection or ints[at + _OCCURRENCE] != trap.occurrence:
            return False
        if ints[at + _SPRUNG_AT]:
            return False
        ints[at + _SPRUNG_STEP] = step
        _fence()
        self._floats[at + _SPRUNG_AT] = now
        return True


_fencing = threading.Lock()


def _fence() -> None:
    """Nothing written before this is seen after what is written later: a lock is a full fence."""
    with _fencing:
        pass
