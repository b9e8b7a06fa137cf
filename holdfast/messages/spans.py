"""Sets of positions, by line: what was used of a data set, and what was not.

    used = SpanSet()
    used.add(Span(0, 0, 100))
    packed = used.pack()

Spans that touch are joined, so a set costs as much as it has gaps, whatever its size. The union of sets
does not depend on their order, and adding twice changes nothing: what all ranks of a round used is the
union of what each of them did. Lines that are used to their ends collapse into one number, so a set
does not grow with the epochs behind it either.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Final

import msgspec
from msgspec import Struct, field

from holdfast.messages.data import Line, Position, Span

_MAX_UNPACKED_BYTES: Final = 64 << 20
_MAX_POSITION: Final = 1 << 53
_WIDTHS: Final = ("B", "H", "I", "Q")
"""Array types for numbers, from the narrowest."""


class SpanSet(Struct):
    """A set of positions. Two sets of the same positions are equal."""

    lines: dict[Line, list[Position]] = field(default_factory=dict)
    """Starts and stops of the spans of each line, by turns and ascending; no line is empty."""
    below: Line = 0
    """The lines before this one are in the set to their ends, and not among `lines`."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> SpanSet:
        made = cls()
        for span in spans:
            made.add(span)
        return made

    # ---- reading ----

    def __iter__(self) -> Iterator[Span]:
        """Iterate over the spans of `lines`, in order."""
        for line in sorted(self.lines):
            edges = self.lines[line]
            for at in range(0, len(edges), 2):
                yield Span(line, edges[at], edges[at + 1])

    def __bool__(self) -> bool:
        return bool(self.lines) or self.below > 0

    def count(self, line: Line | None = None) -> int:
        """Count the positions of a line, or of all `lines`."""
        if line is None:
            return sum(map(self.count, self.lines))
        edges = self.lines.get(line, [])
        return sum(edges[1::2]) - sum(edges[::2])

    def within(self, span: Span) -> list[Span]:
        """Return those parts of a span that are in the set, in order."""
        if span.line < self.below:
            return [span] if span.start < span.stop else []
        edges = self.lines.get(span.line, [])
        at = bisect_right(edges, span.start)
        found = []
        for index in range(at - at % 2, len(edges), 2):
            start, stop = max(edges[index], span.start), min(edges[index + 1], span.stop)
            if edges[index] >= span.stop:
                break
            if start < stop:
                found.append(Span(span.line, start, stop))
        return found

    def without(self, span: Span) -> list[Span]:
        """Return those parts of a span that are not in the set, in order."""
        edges = [span.start]
        for part in self.within(span):
            edges += (part.start, part.stop)
        edges.append(span.stop)
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [Span(span.line, start, stop) for start, stop in pairs if start < stop]

    def has(self, span: Span) -> bool:
        """Return whether all of a span is in the set."""
        return not self.without(span)

    def copy(self) -> SpanSet:
        return SpanSet({line: list(edges) for line, edges in self.lines.items()}, self.below)

    # ---- writing ----

    def add(self, span: Span) -> None:
        if span.start >= span.stop or span.line < self.below:
            return
        edges = self.lines.setdefault(span.line, [])
        first, last = bisect_left(edges, span.start), bisect_right(edges, span.stop)
        edges[first:last] = [span.start][first % 2 :] + [span.stop][last % 2 :]

    def remove(self, span: Span) -> None:
        """Remove a span of `lines`; a line that has collapsed stays whole."""
        edges = self.lines.get(span.line)
        if edges is None or span.start >= span.stop:
            return
        first, last = bisect_left(edges, span.start), bisect_right(edges, span.stop)
        edges[first:last] = [span.start] * (first % 2) + [span.stop] * (last % 2)
        if not edges:
            del self.lines[span.line]

    def update(self, other: SpanSet) -> None:
        """Add all positions of another set."""
        self.collapse_below(other.below)
        for line, edges in other.lines.items():
            if line < self.below:
                continue
            mine = self.lines.get(line)
            self.lines[line] = list(edges) if mine is None else _union(mine, edges)

    def drop_line(self, line: Line) -> None:
        self.lines.pop(line, None)

    def collapse(self, size: int) -> None:
        """Turn the first lines, as far as they are whole, into a number; each has that size."""
        while self.lines.get(self.below) == [0, size]:
            del self.lines[self.below]
            self.below += 1

    def collapse_below(self, line: Line) -> None:
        """Add all lines before this one, to their ends."""
        if line > self.below:
            self.below = line
            for old in [one for one in self.lines if one < line]:
                del self.lines[old]

    # ---- as bytes ----

    def pack(self) -> bytes:
        """Encode the set; equal sets give equal bytes."""
        lines = {line: _packed(self.lines[line]) for line in sorted(self.lines)}
        return msgspec.msgpack.encode((self.below, lines))

    @classmethod
    def unpack(cls, data: bytes) -> SpanSet:
        """Decode a set; ValueError if these bytes are none. No bytes are the empty set."""
        if not data:
            return cls()
        left = _MAX_UNPACKED_BYTES
        lines: dict[Line, list[Position]] = {}
        below, all_packed = _decoder.decode(data)
        for line, (width, packed) in all_packed.items():
            if width not in _WIDTHS or line < below:
                raise ValueError(f"not a packed set of positions: line {line} of {width!r}")
            unpacker = zlib.decompressobj()
            try:
                raw = unpacker.decompress(packed, left)
                gaps = array(width)
                gaps.frombytes(raw)
            except (zlib.error, ValueError) as error:
                raise ValueError(f"not a packed set of positions: {error}") from None
            left -= len(raw)
            edges = list(accumulate(gaps))
            rising = all(before < after for before, after in pairwise(edges))
            rising = rising and bool(edges) and edges[-1] <= _MAX_POSITION
            if not unpacker.eof or len(edges) % 2 or not rising or left <= 0:
                raise ValueError("not a packed set of positions: the spans of a line do not ascend")
            lines[line] = edges
        return cls(lines, below)


_Packed = tuple[Line, dict[Line, tuple[str, bytes]]]
_decoder: msgspec.msgpack.Decoder[_Packed] = msgspec.msgpack.Decoder(_Packed)


def _packed(edges: list[Position]) -> tuple[str, bytes]:
    """Encode ascending numbers by their differences, in as few bytes each as the largest one needs."""
    gaps = [edges[0], *(after - before for before, after in pairwise(edges))]
    most = max(gaps)
    width = next(w for w in _WIDTHS if most < 1 << 8 * array(w).itemsize)
    return width, zlib.compress(array(width, gaps).tobytes(), 1)


def _union(mine: list[Position], other: list[Position]) -> list[Position]:
    """Join two lists of starts and stops in one pass."""
    spans = sorted(
        [*zip(mine[::2], mine[1::2], strict=True), *zip(other[::2], other[1::2], strict=True)]
    )
    found: list[Position] = []
    for start, stop in spans:
        if found and start <= found[-1]:
            found[-1] = max(found[-1], stop)
        else:
            found += (start, stop)
    return found
