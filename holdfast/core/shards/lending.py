"""Decides which shards a node is lent, and what becomes of them.

Shards that lie side by side are lent as one span, so a lease costs little however small shards are.
What came back is lent first, lowest first, then what lies ahead; the next epoch begins when nothing of
the present one is left to lend. Grants shrink towards the end (guided self-scheduling): no node is lent
more than its share of half of what is left, but one shard at least, so that none sits on what others
could do.

A partition of a stream is read in order, by one node at a time: its next span goes to the node that has
it, or to any once nothing of it is out. No node gets more than its share of the partitions.

Only what is lent to a node can be used, given back or fail there. The rest of a report is counted and
changes nothing, so a late word never makes a shard used twice.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.core.shards import grid
from holdfast.core.shards.state import DataSet, Skipped
from holdfast.messages.data import Line, Position, Span
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import NodeId, RoundNumber

MOST_AT_ONCE = 1 << 20
"""Shards of one grant."""


class Failed(Struct):
    """What came of a shard's failure."""

    given_up: list[Span] = field(default_factory=list)
    """Parts that have failed too often."""
    times: int = 0


def start(data: DataSet, used: SpanSet) -> None:
    """Begin to lend what was not used."""
    data.used, data.returned = used, SpanSet()
    data.leases, data.ahead, data.turn = {}, {}, 0
    if data.spec.sharing == "lockstep":
        pass  # The ranks know among themselves whose turn it is.
    elif data.spec.size is None:
        for line in range(len(data.spec.partitions)):
            _mark(data, line, data.used.lines.get(line, [0])[-1])
    else:
        size, epochs = data.spec.size, data.spec.epochs
        used.collapse(size)
        newest = max(used.lines, default=used.below)
        for line in range(used.below, min(newest, epochs) if epochs else newest):
            _give_back(data, used.without(Span(line, 0, size)))
        _mark(data, newest, used.lines.get(newest, [0])[-1])
    data.returned_count = data.returned.count()
    data.is_open, data.told = True, False


def _mark(data: DataSet, line: Line, position: Position) -> None:
    data.ahead[line] = position
    _give_back(data, data.used.without(Span(line, 0, position)))


def _give_back(data: DataSet, spans: list[Span]) -> None:
    for span in spans:
        data.returned.add(span)


# ---- lending -------------------------------------------------------------------------------------


def lend(data: DataSet, node: NodeId, want: int, nodes: int) -> list[Span]:
    """Lend a node as many shards as it wants, or as there are for it."""
    want = min(want, MOST_AT_ONCE)
    if data.spec.size is None:
        spans = _from_partitions(data, node, want, nodes)
    else:
        spans = _in_order(data, min(want, _most(data, data.spec.size, nodes)))
    if spans:
        lease = data.leases.setdefault(node, SpanSet())
        for span in spans:
            lease.add(span)
    return spans


def _most(data: DataSet, size: int, nodes: int) -> int:
    """Return how many shards one grant may have."""
    ((line, position),) = data.ahead.items()
    follows = data.spec.epochs == 0 or line + 1 < data.spec.epochs
    left = data.returned_count + max(0, size - position) + (size if follows else 0)
    return max(1, left // (data.spec.shard * 2 * nodes))


def _in_order(data: DataSet, want: int) -> list[Span]:
    spans: list[Span] = []
    while want > 0:
        line = min(data.returned.lines, default=None)
        line = _present_epoch(data) if line is None else line
        if line is None:
            break
        span, shards = _take(data, line, want)
        spans.append(span)
        want -= shards
    return spans


def _present_epoch(data: DataSet) -> Line | None:
    """Return the epoch that is being lent; None if the last one is through."""
    assert data.spec.size is not None
    ((line, position),) = data.ahead.items()
    epochs = data.spec.epochs
    if position >= data.spec.size:
        line += 1
        if epochs == 0 or line < epochs:
            data.ahead = {line: 0}
    return line if epochs == 0 or line < epochs else None


def _take(data: DataSet, line: Line, want: int) -> tuple[Span, int]:
    """Take shards of a line: what came back first, then what lies ahead."""
    edges = data.returned.lines.get(line)
    if edges:
        start, stop = edges[0], edges[1]
        reached, shards = grid.advance(data.spec, start, stop, want)
        span = Span(line, start, reached)
        data.returned.remove(span)
        data.returned_count -= reached - start
        return span, shards
    start = data.ahead[line]
    stop = grid.ENDLESS if data.spec.size is None else data.spec.size
    reached, shards = grid.advance(data.spec, start, stop, want)
    data.ahead[line] = reached
    return Span(line, start, reached), shards


def _from_partitions(data: DataSet, node: NodeId, want: int, nodes: int) -> list[Span]:
    """Take shards of the partitions that a node has, and of free ones up to its share, by turns."""
    total = len(data.spec.partitions)
    mine = data.leases[node].lines.keys() if node in data.leases else set[Line]()
    taken = {line for lease in data.leases.values() for line in lease.lines}
    free = max(0, -(-total // nodes) - len(mine))
    lines = []
    for at in range(data.turn, data.turn + total):
        line = at % total
        if line in mine or (line not in taken and free > 0):
            free -= line not in mine
            lines.append(line)
    if not lines or want <= 0:
        return []
    each, more = divmod(want, len(lines))
    lines = lines if each else lines[:more]
    data.turn = (lines[-1] + 1) % total
    spans = []
    for number, line in enumerate(lines):
        left = each + (number < more)
        while left > 0:
            span, shards = _take(data, line, left)
            spans.append(span)
            left -= shards
    return spans


def is_finished(data: DataSet) -> bool:
    """Whether everything was used, in all epochs."""
    if data.spec.size is None or not data.is_open or data.returned.lines or data.leases:
        return False
    ((line, position),) = data.ahead.items()
    last = data.spec.epochs and line + 1 >= data.spec.epochs
    return bool(last) and (position >= data.spec.size or line >= data.spec.epochs)


# ---- what becomes of leases ------------------------------------------------------------------------


def use(data: DataSet, node: NodeId, span: Span) -> list[Span]:
    """Note that a node used a span; return the parts that were lent to it."""
    parts = _off_lease(data, node, span)
    for part in parts:
        _count_used(data, part)
    return parts


def _count_used(data: DataSet, part: Span) -> None:
    data.used.add(part)
    if part.line in data.failures:
        failed = data.failures[part.line]
        for start in [at for at in failed if part.start <= at < part.stop]:
            del failed[start]
        if not failed:
            del data.failures[part.line]
    if data.spec.size is not None and part.line == data.used.below:
        data.used.collapse(data.spec.size)


def give_back(data: DataSet, node: NodeId, span: Span) -> list[Span]:
    """Take back what a node will not use; return the parts that were lent to it."""
    parts = _off_lease(data, node, span)
    for part in parts:
        _take_back(data, part)
    return parts


def _take_back(data: DataSet, part: Span) -> None:
    data.returned.add(part)
    data.returned_count += part.stop - part.start


def _off_lease(data: DataSet, node: NodeId, span: Span) -> list[Span]:
    lease = data.leases.get(node)
    parts = [] if lease is None else lease.within(span)
    data.misfits += span.stop - span.start - sum(part.stop - part.start for part in parts)
    if lease is not None and parts:
        for part in parts:
            lease.remove(part)
        if not lease.lines:
            del data.leases[node]
    return parts


def fail(data: DataSet, node: NodeId, span: Span) -> Failed:
    """Take back a span that failed by its own fault, but for shards that have failed too often: they
    are off the lease, and in no other place."""
    found = Failed()
    for part in _off_lease(data, node, span):
        for begin, piece in grid.cells(data.spec, part):
            of_line = data.failures.setdefault(piece.line, {})
            of_line[begin] = of_line.get(begin, 0) + 1
            if of_line[begin] >= data.spec.failures:
                found.given_up.append(piece)
                found.times = of_line[begin]
            else:
                _take_back(data, piece)
    return found


def skip(data: DataSet, span: Span, error: str, round: RoundNumber) -> None:
    """Leave out a shard that was given up: it counts as used."""
    data.skipped.append(Skipped(span, error, round))
    _count_used(data, span)


def put_back(data: DataSet, span: Span) -> None:
    """Take back a shard that was given up and is not left out."""
    _take_back(data, span)


def leave(data: DataSet, node: NodeId) -> None:
    """Take back all that is lent to a node."""
    for span in data.leases.pop(node, SpanSet()):
        _take_back(data, span)
    data.wants.pop(node, None)
    data.nodes.pop(node, None)


def lent(data: DataSet, node: NodeId) -> tuple[Span, ...]:
    """Return all that is lent to a node, in pieces as it was lent."""
    lease = data.leases.get(node, SpanSet())
    return tuple(piece for span in lease for piece in grid.pieces(data.spec, span))


def validate(data: DataSet) -> None:
    """Assert that every position is in exactly one place."""
    assert data.returned_count == data.returned.count(), "returned positions are miscounted"
    assert all(lease.lines for lease in data.leases.values()), "a node has an empty lease"
    if not data.is_open or data.spec.sharing == "lockstep":
        assert not data.leases, "shards are lent of a data set that is not open"
        return
    places = [data.used, data.returned, *data.leases.values()]
    whole = SpanSet()
    for place in places:
        whole.update(place)
    listed = sum(place.count() for place in places)
    old = [line for place in places[1:] for line in place.lines if line < data.used.below]
    assert not old, f"positions of line {old}, which is used up, are lent or to be lent"
    assert whole.count() == listed, "a position is in two places"
    for line in _begun(data):
        end = data.ahead.get(line, data.spec.size)
        assert end is not None
        assert whole.has(Span(line, 0, end)), f"a position of line {line} is lost"
        edges = whole.lines.get(line)
        assert edges is None or edges[-1] <= end, f"a position of line {line} is also ahead"


def _begun(data: DataSet) -> range:
    """Return the lines of which something was lent, or might be."""
    if data.spec.size is None:
        return range(len(data.spec.partitions))
    (line,) = data.ahead
    epochs = data.spec.epochs
    return range(data.used.below, min(line + 1, epochs) if epochs else line + 1)
