"""Adds up rank-seconds by cause in buckets of time, in bounded memory.

A grid has a fixed number of buckets. When time goes beyond the last one, each two neighbours are merged
and their width doubles, so the grid covers any time with at least half of its buckets. To add a span
costs the same for a second and for a week: only the two buckets at its ends are added to, and what lies
between is noted as one rank more from here and one less from there.
"""

from __future__ import annotations

from array import array

from holdfast.messages.units import Seconds

FIRST_WIDTH_S: Seconds = 0.25


class CauseGrid:
    """Rank-seconds by cause, over time."""

    __slots__ = ("_buckets", "_end", "_partial", "_whole", "begin", "width")

    def __init__(self, begin: float, buckets: int) -> None:
        self.begin = begin
        self.width = FIRST_WIDTH_S
        self._buckets = buckets
        self._end = begin
        """The newest time that anything was added for."""
        self._partial: dict[int, array[float]] = {}
        """Seconds in each bucket, by cause."""
        self._whole: dict[int, array[float]] = {}
        """Change of the number of ranks that spend a whole bucket on the cause."""

    def add(self, begin: float, end: float, cause: int, ranks: float = 1.0) -> None:
        begin = max(begin, self.begin)
        if end <= begin:
            return
        while end > self.begin + self._buckets * self.width:
            self._widen()
        self._end = max(self._end, end)
        if cause not in self._partial:
            self._partial[cause] = self._row()
            self._whole[cause] = self._row()
        partial, width = self._partial[cause], self.width
        first = min(int((begin - self.begin) / width), self._buckets - 1)
        last = min(int((end - self.begin) / width), self._buckets - 1)
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

    def seconds(self) -> dict[int, list[Seconds]]:
        """Return the rank-seconds of each bucket, by cause."""
        return {
            cause: _summed(partial, self._whole[cause], self.width)
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
        last = min(self._buckets, int((until - self.begin) / self.width) + 1)
        for cause, row in self.seconds().items():
            for bucket in range(first, last):
                if row[bucket] > 0:
                    begin = self.begin + bucket * self.width
                    width = min(self.width, self._end - begin)
                    spread(parts, cause, row[bucket], (begin - since) / step, width / step)
        return parts

    def _row(self) -> array[float]:
        return array("d", bytes(8 * self._buckets))

    def _widen(self) -> None:
        """Merge each two buckets into one of double the width."""
        for cause, row in self.seconds().items():
            halved = [row[i] + row[i + 1] for i in range(0, self._buckets - 1, 2)]
            self._partial[cause] = array("d", halved + [0.0] * (self._buckets - len(halved)))
            self._whole[cause] = self._row()
        self.width *= 2


def _summed(partial: array[float], whole: array[float], width: Seconds) -> list[Seconds]:
    found, ranks = [], 0.0
    for seconds, change in zip(partial, whole, strict=True):
        ranks += change
        found.append(seconds + ranks * width)
    return found


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
