"""Keeps what one rank did, as runs of one cause, in bounded memory.

A lane is a row of spans that touch: each ends where the next one begins. While there are few of them
every span is exact. When a lane has as many as it may, its older half is consolidated: runs of short
spans become one *mixed* span that says how much of it went to which cause, and long spans stay as they
are. So the newest part of a lane is always exact, and the resolution of the rest falls with its age. No
second is lost or moved to another cause by that, only its place within a mixed span is.

A span takes 13 bytes, a mixed one about eighty.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct, field

from holdfast.messages.records import Cause
from holdfast.messages.reports import CAUSES
from holdfast.messages.units import Seconds
from holdfast.view.history.series import Floats, Numbers

CAUSE_NAMES: tuple[Cause, ...] = tuple(CAUSES)
CAUSE_NUMBERS: dict[Cause, int] = {cause: number for number, cause in enumerate(CAUSE_NAMES)}
AWAY = 254
"""Number of a span in which there was no such rank."""
MIXED = 255
LAST_STEP = (1 << 32) - 1
"""Highest step that a lane can tell; a rank that goes further stays at it."""

_PART = struct.Struct("<Bf")


class LaneSpan(NamedTuple):
    """A piece of a lane."""

    begin: float
    end: float
    parts: dict[int, Seconds]
    """Seconds by the number of their cause, which add up to the span; a mixed span has several."""
    step: int = 0
    """Step that the rank had finished when the span began, before it was cut; 0 if there was none."""


class Lane(Struct):
    """What one rank did, in the order of time."""

    begin: float
    _ends: Floats = field(default_factory=lambda: array("d"))
    _causes: bytearray = field(default_factory=bytearray)
    _steps: Numbers = field(default_factory=lambda: array("I"))
    _mixes: list[bytes] = field(default_factory=list)
    """Parts of the mixed spans, in their order."""

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def end(self) -> float:
        return self._ends[-1] if self._ends else self.begin

    def last(self) -> tuple[float, float, int] | None:
        """Return begin, end and cause of the newest span."""
        if not self._ends:
            return None
        begin = self._ends[-2] if len(self._ends) > 1 else self.begin
        return begin, self._ends[-1], self._causes[-1]

    def add(self, begin: float, end: float, cause: int, step: int = 0) -> bool:
        """Add a span after the last one; True if it does not just lengthen that."""
        if begin > self.end + 1e-6 and cause != AWAY:
            self.add(self.end, begin, AWAY)
        if self._causes and self._causes[-1] == cause:
            self._ends[-1] = end
            return False
        self._ends.append(end)
        self._causes.append(cause)
        self._steps.append(min(step, LAST_STEP))
        return True

    def between(self, since: float, until: float) -> Iterator[LaneSpan]:
        """Yield the spans that lie in a time, the first and the last of them cut to it."""
        first = bisect_right(self._ends, since)
        mixed = self._causes.count(MIXED, 0, first)
        begin = self._ends[first - 1] if first else self.begin
        for i in range(first, len(self._ends)):
            if begin >= until:
                return
            end, cause = self._ends[i], self._causes[i]
            if cause == MIXED:
                parts = _unpacked(self._mixes[mixed])
                mixed += 1
            else:
                parts = {cause: end - begin}
            yield cut(LaneSpan(begin, end, parts, self._steps[i]), since, until)
            begin = end

    def consolidate(self) -> None:
        """Halve the number of the older half's spans."""
        old = len(self._ends) // 2
        until = self._ends[old - 1]
        width = (until - self.begin) / max(1, old // 4)
        merged = list(coarse(self.between(self.begin, until), width))
        gone = self._causes.count(MIXED, 0, old)
        self._ends[:old] = array("d", [span.end for span in merged])
        self._causes[:old] = bytes(_number(span) for span in merged)
        self._steps[:old] = array("I", [span.step for span in merged])
        self._mixes[:gone] = [_packed(span.parts) for span in merged if len(span.parts) > 1]


def cut(span: LaneSpan, since: float, until: float) -> LaneSpan:
    """Cut a span to a time; of a mixed one, each cause loses the same share."""
    begin, end = max(span.begin, since), min(span.end, until)
    if begin == span.begin and end == span.end:
        return span
    length = span.end - span.begin
    share = (end - begin) / length if length > 0 else 0.0
    return LaneSpan(begin, end, {cause: s * share for cause, s in span.parts.items()}, span.step)


def coarse(spans: Iterable[LaneSpan], width: Seconds) -> Iterator[LaneSpan]:
    """Merge spans shorter than a width with their neighbours; there are at most two for each width.

    What is short is gathered until there is a width of it. A long span that comes then gives what is
    missing and goes on as a span of its own.
    """
    gathered: LaneSpan | None = None
    for span in spans:
        if gathered is None:
            if span.end - span.begin >= width:
                yield span
            else:
                gathered = span
            continue
        full_at = gathered.begin + width
        if span.end < full_at:
            gathered = joined(gathered, span)
            continue
        yield joined(gathered, cut(span, span.begin, full_at))
        gathered = None
        if span.end > full_at:
            rest = cut(span, full_at, span.end)
            if rest.end - rest.begin >= width:
                yield rest
            else:
                gathered = rest
    if gathered is not None:
        yield gathered


def joined(one: LaneSpan, other: LaneSpan) -> LaneSpan:
    """Join two spans of which the second follows the first."""
    parts = dict(one.parts)
    for cause, seconds in other.parts.items():
        parts[cause] = parts.get(cause, 0.0) + seconds
    return LaneSpan(one.begin, other.end, parts, one.step)


def _number(span: LaneSpan) -> int:
    return MIXED if len(span.parts) > 1 else next(iter(span.parts))


def _packed(parts: dict[int, Seconds]) -> bytes:
    return b"".join(_PART.pack(cause, seconds) for cause, seconds in parts.items())


def _unpacked(packed: bytes) -> dict[int, Seconds]:
    return dict(_PART.iter_unpack(packed))
