"""Adds up rank-seconds by cause in buckets of time, in bounded memory.

A grid has a fixed number of buckets. When time goes beyond the last one, each two neighbours are merged
and their width doubles, so the grid covers any time with at least half of its buckets. To add a span
costs the same for a second and for a week: only the two buckets at its ends are added to, and what lies
between is noted as one rank more from here and one less from there.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

from msgspec import Struct, field

from holdfast.messages.units import Seconds
from holdfast.view.history.series import Floats

FIRST_WIDTH_S: Seconds = 0.25


class CauseGrid(Struct):
    """Rank-seconds by cause, over time."""

    begin: float
    buckets: int
    width: Seconds = FIRST_WIDTH_S
    _end: float = 0.0
    """The newest time that anything was added for."""
    _partial: dict[int, Floats] = field(default_factory=dict)
    """Seconds in each bucket, by cause."""
    _whole: dict[int, Floats] = field(default_factory=dict)
    """Change of the number of ranks that spend a whole bucket on the cause."""

    def __post_init__(self) -> None:
        self._end = max(self._end, self.begin)

    @classmethod
    def columns(cls, since: float, until: float, count: int) -> CauseGrid:
        """Make a grid that divides a time into so many equal parts; nothing later may be added."""
        return cls(since, count, (until - since) / count)

    def parts(self) -> list[dict[int, Seconds]]:
        """Return the rank-seconds by cause of each bucket."""
        found: list[dict[int, Seconds]] = [{} for _ in range(self.buckets)]
        for cause, row in self.seconds().items():
            for part, seconds in zip(found, row, strict=True):
                if seconds > 1e-9:
                    part[cause] = seconds
        return found

    def add(self, begin: float, end: float, cause: int, ranks: float = 1.0) -> None:
        begin = max(begin, self.begin)
        if end <= begin:
            return
        while end > self.begin + self.buckets * self.width * (1 + 1e-12):
            self._widen()
        self._end = max(self._end, end)
        if cause not in self._partial:
            self._partial[cause] = self._row()
            self._whole[cause] = self._row()
        partial, width = self._partial[cause], self.width
        first = min(int((begin - self.begin) / width), self.buckets - 1)
        last = min(int((end - self.begin) / width), self.buckets - 1)
        if first == last:
            partial[first] += (end - begin) * ranks
            return
        partial[first] += (self.begin + (first + 1) * width - begin) * ranks
        partial[last] += (end - self.begin - last * width) * ranks
        if last > first + 1:
            whole = self._whole[cause]
            whole[first + 1] += ranks
            whole[last] -= ranks

    def merge(self, other: CauseGrid) -> None:
        """Add another grid of the same begin and size to this one."""
        while self.width < other.width:
            self._widen()
        while other.width < self.width:
            other._widen()
        self._end = max(self._end, other._end)
        for mine, others in ((self._partial, other._partial), (self._whole, other._whole)):
            for cause, row in others.items():
                into = mine.setdefault(cause, self._row())
                mine[cause] = array("d", map(float.__add__, into, row))

    def seconds(self, count: int | None = None) -> dict[int, list[Seconds]]:
        """Return the rank-seconds of each of the first buckets, by cause."""
        width = self.width
        return {
            cause: [
                seconds + ranks * width
                for seconds, ranks in zip(
                    partial[:count], accumulate(self._whole[cause][:count]), strict=True
                )
            ]
            for cause, partial in self._partial.items()
        }

    def between(self, since: float, until: float, count: int) -> list[dict[int, Seconds]]:
        """Return the rank-seconds of a time that is divided into so many equal parts.

        Within a bucket of this grid, seconds are taken to be spread evenly, as far as time has come."""
        parts: list[dict[int, Seconds]] = [{} for _ in range(count)]
        step = (until - since) / count
        if step <= 0:
            return parts
        first = max(0, int((since - self.begin) / self.width))
        last = min(self.buckets, int((until - self.begin) / self.width) + 1)
        scale, origin = self.width / step, (self.begin - since) / step
        stop = (self._end - since) / step
        for cause, row in self.seconds(last).items():
            for bucket in range(first, last):
                seconds = row[bucket]
                if seconds > 0:
                    begin = origin + bucket * scale
                    width = min(scale, stop - begin)
                    part = int(begin)
                    if begin >= 0 and begin + width <= part + 1 <= count:
                        parts[part][cause] = parts[part].get(cause, 0.0) + seconds
                    elif begin >= 0 and begin + width <= part + 2 <= count:
                        here = seconds * (part + 1 - begin) / width
                        parts[part][cause] = parts[part].get(cause, 0.0) + here
                        parts[part + 1][cause] = parts[part + 1].get(cause, 0.0) + seconds - here
                    else:
                        spread(parts, cause, seconds, begin, width)
        return parts

    def _row(self) -> Floats:
        return array("d", bytes(8 * self.buckets))

    def _widen(self) -> None:
        """Merge each two buckets into one of double the width."""
        for cause, row in self.seconds().items():
            halved = [row[i] + row[i + 1] for i in range(0, self.buckets - 1, 2)]
            self._partial[cause] = array("d", halved + [0.0] * (self.buckets - len(halved)))
            self._whole[cause] = self._row()
        self.width *= 2


def spread(
    parts: list[dict[int, Seconds]], cause: int, seconds: Seconds, begin: float, width: float
) -> None:
    """Spread the seconds of one bucket over the parts that it lies in; places count in parts."""
    end, at = begin + width, max(begin, 0.0)
    stop = min(end, float(len(parts)))
    while at < stop:
        part = int(at)
        until = min(part + 1.0, stop)
        parts[part][cause] = parts[part].get(cause, 0.0) + seconds * (until - at) / width
        at = until if until > at else part + 1.0
