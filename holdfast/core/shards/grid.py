"""Where the shards of a data set begin and end.

An epoch is divided into sub-epochs, each of these into shards from its own beginning, so the last shard
of a sub-epoch may be short. A partition of a stream is divided from its first offset, without end.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.messages.data import DataSpec, Position, Span

ENDLESS: Position = 1 << 53
"""End of a partition."""


def sub_epoch(spec: DataSpec, position: Position) -> tuple[Position, Position]:
    """Return the bounds of the sub-epoch that a position lies in; of a stream, of its partition."""
    if spec.size is None:
        return 0, ENDLESS
    parts, size = spec.sub_epochs, spec.size
    number = ((position + 1) * parts - 1) // size
    return number * size // parts, (number + 1) * size // parts


def advance(spec: DataSpec, start: Position, stop: Position, shards: int) -> tuple[Position, int]:
    """Go on from `start` by that many shards, but not beyond `stop` nor the sub-epoch; where that
    ends, and how many shards it is. From within a shard it goes only to that one's end."""
    begin, end = sub_epoch(spec, start)
    inside = (start - begin) % spec.shard
    if inside:
        return min(start - inside + spec.shard, end, stop), 1
    reached = min(start + shards * spec.shard, end, stop)
    return reached, -(-(reached - start) // spec.shard)


def pieces(spec: DataSpec, span: Span) -> Iterator[Span]:
    """Divide a span so that each piece begins with a shard, or is a part of one."""
    at = span.start
    while at < span.stop:
        reached, _ = advance(spec, at, span.stop, ENDLESS)
        yield Span(span.line, at, reached)
        at = reached


def cells(spec: DataSpec, span: Span) -> Iterator[tuple[Position, Span]]:
    """Divide a span into its shards: where each of them begins, and the part that is in the span."""
    at = span.start
    while at < span.stop:
        begin, _ = sub_epoch(spec, at)
        reached, _ = advance(spec, at, span.stop, 1)
        yield at - (at - begin) % spec.shard, Span(span.line, at, reached)
        at = reached
