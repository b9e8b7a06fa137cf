"""Remembers what every rank did and when, from the bookings of the ledger.

Each rank has a lane (`lanes`): exact while there is room, consolidated from its old end when there is
not. A view of many ranks at once would have to read all of their lanes, so two grids (`grid`) are kept
besides: one of all ranks together, and in a large job one for each group of ranks.

The grids are told of a span when it is over, or has lasted for a while; what they have not been told is
added to an answer. So is what the ledger has not booked yet: from a rank's cursor until now.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct, field

from holdfast.core.ledger.books import Account
from holdfast.messages.records import Cause
from holdfast.messages.reports import Booking
from holdfast.messages.units import Rank, Seconds
from holdfast.view.history.grid import CauseGrid
from holdfast.view.history.lanes import (
    AWAY,
    CAUSE_NAMES,
    CAUSE_NUMBERS,
    Lane,
    LaneSpan,
    coarse,
)
from holdfast.view.history.series import Floats

MOST_SPANS = 3_000_000
"""Spans of all lanes together."""
MOST_OF_LANE = 1 << 18
LEAST_OF_LANE = 64
BUCKETS = 2048
GROUPS = 64
"""Groups of ranks that a large job is divided into, at most."""
GROUP_BUCKETS = 256
LEAST_PARTS = 64
"""Parts that the time of an answer about groups is divided into, at least, if so many are asked for."""
ONE_BY_ONE = 128
"""Ranks up to which an answer is made from their lanes."""
HELD_S: Seconds = 300.0
"""A span that lasts is told to the grids this often."""
MOST_ANSWERED = 8_000
"""Spans of an answer, at most."""

Fold = Literal["rank", "node"]
Parts = Mapping[int, Seconds]


class ShownSpan(NamedTuple):
    """A piece of a lane as it is shown."""

    begin: float
    end: float
    shares: dict[Cause, float]
    """Shares of the causes, which add up to 1; one alone if the span is not mixed."""
    step: int = 0
    """Step that the rank had finished when this began; 0 if there was none, or for several ranks."""


class ShownLane(NamedTuple):
    name: str
    first_rank: int
    ranks: int
    spans: list[ShownSpan]


class RankBlock(NamedTuple):
    """Neighbouring ranks that are shown as one lane."""

    name: str
    first_rank: int
    ranks: int


class Timeline(Struct, dict=True):
    """What every rank did; the ledger's accounts, which are the job's, are kept beside its fields."""

    opened_at: float
    _total: CauseGrid
    _lanes: list[Lane] = field(default_factory=list)
    _told: Floats = field(default_factory=lambda: array("d"))
    """Up to when the grids know of each lane."""
    _groups: list[CauseGrid] = field(default_factory=list)
    _group_size: int = 0
    """Ranks of a group; 0 while there are no groups."""
    _most: int = MOST_OF_LANE
    """Spans of a lane."""

    @classmethod
    def begun(cls, opened_at: float, accounts: Mapping[Rank, Account]) -> Timeline:
        timeline = cls(opened_at, CauseGrid(opened_at, BUCKETS))
        timeline.attach(accounts)
        return timeline

    def attach(self, accounts: Mapping[Rank, Account]) -> None:
        """Read what is not booked yet from these accounts."""
        self._accounts = accounts

    @property
    def ranks(self) -> int:
        """Ranks that there ever were at the same time."""
        return max(len(self._lanes), len(self._accounts))

    # ---- collecting ----

    def take(self, bookings: Iterable[Booking]) -> None:
        for booking in bookings:
            rank = booking.rank
            if rank >= len(self._lanes):
                self._open_lanes(rank + 1)
            lane, cause = self._lanes[rank], CAUSE_NUMBERS[booking.cause]
            before = lane.last()
            if lane.add(booking.begin, booking.end, cause, booking.step):
                if before is not None:
                    self._tell(rank, before[1], before[2])
                self._told[rank] = booking.begin
                if len(lane) > self._most:
                    lane.consolidate()
            elif booking.end - self._told[rank] > HELD_S:
                self._tell(rank, booking.end, cause)

    def _open_lanes(self, ranks: int) -> None:
        for _ in range(ranks - len(self._lanes)):
            self._lanes.append(Lane(self.opened_at))
            self._told.append(self.opened_at)
        self._most = max(LEAST_OF_LANE, min(MOST_OF_LANE, MOST_SPANS // len(self._lanes)))
        if ranks <= ONE_BY_ONE:
            return
        if not self._group_size:
            self._begin_groups(ranks)
        while self._group_size * GROUPS < ranks:
            self._double_groups()
        while len(self._groups) * self._group_size < ranks:
            self._groups.append(CauseGrid(self.opened_at, GROUP_BUCKETS))

    def _begin_groups(self, ranks: int) -> None:
        """Divide the ranks into groups, and tell those what the lanes had been told before."""
        self._group_size = 1
        while self._group_size * GROUPS < ranks:
            self._group_size *= 2
        self._groups = [
            CauseGrid(self.opened_at, GROUP_BUCKETS) for _ in range(-(-ranks // self._group_size))
        ]
        for rank, lane in enumerate(self._lanes):
            grid = self._groups[rank // self._group_size]
            for span in lane.between(self.opened_at, self._told[rank]):
                for cause, seconds in span.parts.items():
                    share = seconds / (span.end - span.begin)
                    grid.add(span.begin, span.end, cause, share)

    def _double_groups(self) -> None:
        for even, odd in zip(self._groups[::2], self._groups[1::2], strict=False):
            even.merge(odd)
        self._groups = self._groups[::2]
        self._group_size *= 2

    def _tell(self, rank: int, until: float, cause: int) -> None:
        since = self._told[rank]
        if until > since and cause != AWAY:
            self._total.add(since, until, cause)
            if self._group_size:
                self._groups[rank // self._group_size].add(since, until, cause)
        self._told[rank] = until

    # ---- answering ----

    def seconds(
        self, since: float, until: float, count: int, now: float
    ) -> list[dict[Cause, Seconds]]:
        """Return the rank-seconds of a time by cause, divided into so many equal parts."""
        parts = self._total.between(since, until, count)
        self._add_untold(parts, since, until, range(self.ranks), now)
        return [_named(one) for one in parts]

    def lanes(
        self, since: float, until: float, width: int, blocks: list[RankBlock], now: float
    ) -> list[ShownLane]:
        """Return what blocks of ranks did, with at most so many spans each.

        Blocks with many ranks together are answered by the groups that these ranks are in."""
        ranks = sum(block.ranks for block in blocks)
        if not blocks or until <= since:
            return []
        if ranks > ONE_BY_ONE and self._group_size:
            return self._grouped(since, until, width, blocks, now)
        width = max(1, min(width, MOST_ANSWERED // len(blocks)))
        return [
            ShownLane(
                *block, [_shown(span) for span in self._block(block, since, until, width, now)]
            )
            for block in blocks
        ]

    def _block(
        self, block: RankBlock, since: float, until: float, width: int, now: float
    ) -> Iterator[LaneSpan]:
        if block.ranks == 1:
            spans = list(self._spans(block.first_rank, since, until, now))
            if len(spans) > width:
                spans = list(coarse(spans, 2 * (until - since) / width))
            return _without_gaps(spans)
        columns = CauseGrid.columns(since, until, width)
        for rank in range(block.first_rank, block.first_rank + block.ranks):
            for span in self._spans(rank, since, until, now):
                length = span.end - span.begin
                for cause, seconds in span.parts.items():
                    columns.add(span.begin, span.end, cause, seconds / length)
        return _rows(columns.parts(), since, (until - since) / width)

    def _spans(self, rank: int, since: float, until: float, now: float) -> Iterator[LaneSpan]:
        """Yield what one rank did, as far as it is known, until now."""
        at = since
        if rank < len(self._lanes):
            for span in self._lanes[rank].between(since, until):
                yield span
                at = span.end
        account = self._accounts.get(Rank(rank))
        if account is None:
            return
        begin, end = max(account.cursor, at), min(now, until)
        if end > begin:
            yield LaneSpan(begin, end, {CAUSE_NUMBERS[account.cause]: end - begin}, account.step)

    def _grouped(
        self, since: float, until: float, width: int, blocks: list[RankBlock], now: float
    ) -> list[ShownLane]:
        size = self._group_size
        first = min(block.first_rank for block in blocks)
        last = max(block.first_rank + block.ranks - 1 for block in blocks)
        found: list[ShownLane] = []
        groups = range(first // size, min(last // size + 1, len(self._groups)))
        known = int((until - since) / self._groups[0].width)  # Finer parts would say nothing more.
        width = min(width, max(known, LEAST_PARTS), MOST_ANSWERED // max(1, len(groups)))
        step = (until - since) / width
        for group in groups:
            begin, end = group * size, min((group + 1) * size, len(self._lanes))
            parts = self._groups[group].between(since, until, width)
            self._add_untold(parts, since, until, range(begin, end), now)
            spans = [_shown(span) for span in _rows(parts, since, step)]
            found.append(ShownLane(f"ranks {begin} to {end - 1}", begin, end - begin, spans))
        return found

    def _add_untold(
        self,
        parts: list[dict[int, Seconds]],
        since: float,
        until: float,
        ranks: Iterable[int],
        now: float,
    ) -> None:
        """Add what the grids have not been told of these ranks."""
        if until <= since:
            return
        columns = CauseGrid.columns(since, until, len(parts))
        lanes, told = self._lanes, self._told
        for rank in ranks:
            last = lanes[rank].last() if rank < len(lanes) else None
            if last is not None and last[1] > told[rank] and last[2] != AWAY:
                columns.add(told[rank], min(last[1], until), last[2])
            account = self._accounts.get(Rank(rank))
            if account is not None and account.cursor < now:
                columns.add(account.cursor, min(now, until), CAUSE_NUMBERS[account.cause])
        for part, more in zip(parts, columns.parts(), strict=True):
            for cause, seconds in more.items():
                part[cause] = part.get(cause, 0.0) + seconds


def _rows(parts: list[dict[int, Seconds]], since: float, step: Seconds) -> Iterator[LaneSpan]:
    """Turn equal parts of a time into spans; neighbours of one and the same cause become one."""
    open: LaneSpan | None = None
    for number, seconds in enumerate(parts):
        kept = {cause: s for cause, s in seconds.items() if s > 0 and cause != AWAY}
        begin, end = since + number * step, since + (number + 1) * step
        if open is not None and len(kept) == 1 and open.parts.keys() == kept.keys():
            open = LaneSpan(open.begin, end, kept)
            continue
        if open is not None:
            yield open
        open = LaneSpan(begin, end, kept) if kept else None
    if open is not None:
        yield open


def _without_gaps(spans: Iterable[LaneSpan]) -> Iterator[LaneSpan]:
    for span in spans:
        parts = {cause: s for cause, s in span.parts.items() if cause != AWAY and s > 0}
        if parts:
            yield LaneSpan(span.begin, span.end, parts, span.step)


def _shown(span: LaneSpan) -> ShownSpan:
    total = sum(span.parts.values())
    shares = {CAUSE_NAMES[cause]: s / total for cause, s in span.parts.items()}
    return ShownSpan(span.begin, span.end, shares, span.step)


def _named(parts: Parts) -> dict[Cause, Seconds]:
    return {CAUSE_NAMES[cause]: s for cause, s in parts.items() if cause != AWAY}
