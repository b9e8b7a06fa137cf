"""Keeps values over time, in bounded memory.

A series takes a value for each interval at most. When it is full, every second value goes and the
interval doubles: a series covers any time with at least half of the values that it may have, evenly.
The newest value is kept whatever the interval is.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct, field

V = TypeVar("V")

if TYPE_CHECKING:
    Floats = array[float]
    Numbers = array[int]
else:
    Floats = Numbers = array  # Which says of what only from Python 3.12 on.


class Series(Struct, Generic[V]):
    """Values over time."""

    most: int = 1024
    every_s: float = 1.0
    _kept: list[tuple[float, V]] = field(default_factory=list)
    _newest: tuple[float, V] | None = None

    def due(self, at: float) -> bool:
        """Whether a value of this time would be kept; for values that cost something to find."""
        return not self._kept or at >= self._kept[-1][0] + self.every_s

    def add(self, at: float, value: V) -> None:
        if not self.due(at):
            self._newest = (at, value)
            return
        self._newest = None
        self._kept.append((at, value))
        if len(self._kept) > self.most:
            del self._kept[1::2]
            self.every_s *= 2

    @property
    def newest(self) -> tuple[float, V] | None:
        return self._newest or (self._kept[-1] if self._kept else None)

    def points(self) -> list[tuple[float, V]]:
        """Return all values that are kept, with their times."""
        return [*self._kept, self._newest] if self._newest is not None else list(self._kept)
