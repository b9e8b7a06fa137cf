"""Keeps shards of data sets for this node's ranks, ahead of their use.

The coordinator lends shards to the node, and ranks take them from here, so that no rank waits for the
coordinator. About as many are kept as the ranks took in the last second, and twice as many as before
whenever a rank had to wait: a node with fast ranks gets more, one with slow ranks less, and one that
dies holds up little.

What ranks used, failed at or gave back is collected and reported with the next wish for shards, or
about once a second; in large jobs less often, so that the coordinator hears the same number of reports.
A rank that is gone gives back what it had not finished.

Leases end with their round. When the stream broke, the coordinator says again what it has lent. That
may name spans that the node is through with, if word of them is still on its way: reports have numbers,
and each loan says up to which of them the coordinator knew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from holdfast.clock import JobClock
from holdfast.core.shards import grid
from holdfast.core.shards.history import Stretch
from holdfast.messages.actions import LendShards
from holdfast.messages.data import DataSpec, ShardFailure, Span, Used, UsedBy
from holdfast.messages.events import AnyEvent, ShardsReported
from holdfast.messages.local import Ask, DataUsed, ScriptReply
from holdfast.messages.records import Part
from holdfast.messages.requests import ShardsTaken, TakeShards
from holdfast.messages.spans import SpanSet
from holdfast.messages.units import NodeId, Rank, RoundNumber

MAX_WANT: Final = 1 << 20
"""Shards that are asked for at once."""
REPORT_EVERY_S: Final = 0.9
REPORTS_PER_S: Final = 50.0
"""Reports of what was used, over the whole job, beside those that ask for shards."""


@dataclass
class Demand:
    """How many shards to keep: about those that were taken in the last second."""

    per_s: float = 0.0
    at: float = 0.0
    least: int = 1
    """Doubled whenever a rank had to wait, and halved with each second that none had to."""

    def taken(self, count: int, now: float) -> None:
        self.per_s = self.per_s * math.exp(self.at - now) + count
        self.at = now

    def waited(self) -> None:
        self.least = min(2 * self.least, MAX_WANT)

    def relax(self) -> None:
        self.least = max(1, self.least // 2)

    def ahead(self, now: float) -> int:
        return max(self.least, math.ceil(self.per_s * math.exp(self.at - now)))


@dataclass
class HeldShards:
    """The shards of one data set that are lent to this node in the present round."""

    spec: DataSpec | None = None
    """Known once a rank of this node has opened the data set."""
    free: deque[Span] = field(default_factory=deque)
    """Lent and not taken, in the order in which they are to be used."""
    count: int = 0
    """Number of shards in `free`."""
    taken: dict[Rank, SpanSet] = field(default_factory=dict)
    number: int = 0
    """Number of the last report."""
    unheard: deque[tuple[int, SpanSet]] = field(default_factory=deque)
    """Spans that the node was through with, by the reports of which the coordinator may not know."""
    waiting: deque[tuple[Rank, Ask]] = field(default_factory=deque)
    asked: int = 0
    """Shards that were asked for and have not come."""
    finished: bool = False
    demand: Demand = field(default_factory=Demand)
    news_used: list[UsedBy] = field(default_factory=list)
    newest: dict[Rank, int] = field(default_factory=dict)
    """Index of each rank's last entry in `news_used`."""
    news_failed: list[ShardFailure] = field(default_factory=list)
    news_returned: list[Span] = field(default_factory=list)

    @property
    def has_news(self) -> bool:
        return bool(self.news_used or self.news_failed or self.news_returned)

    def add(self, spans: Iterable[Span], heard: int) -> None:
        """Add spans that were lent, as far as they are not here or were through here after that
        report."""
        while self.unheard and self.unheard[0][0] <= heard:
            self.unheard.popleft()
        known = SpanSet.of(self.free)
        for one in (*self.taken.values(), *(gone for _, gone in self.unheard), self.through()):
            known.update(one)
        assert self.spec is not None
        for part in (part for span in spans for part in known.without(span)):
            self.free.append(part)
            self.count += grid.count(self.spec, part)

    def take(self, rank: Rank, count: int) -> tuple[Span, ...]:
        """Hand the next shards to a rank."""
        found: list[Span] = []
        while self.free and len(found) < count:
            assert self.spec is not None
            span = self.free.popleft()
            stop, _ = grid.advance(self.spec, span.start, span.stop, 1)
            if stop < span.stop:
                self.free.appendleft(Span(span.line, stop, span.stop))
            found.append(Span(span.line, span.start, stop))
        self.count -= len(found)
        mine = self.taken.setdefault(rank, SpanSet())
        for span in found:
            mine.add(span)
        return tuple(found)

    def note(self, rank: Rank, used: Used) -> None:
        """Note what a rank used, joined with the last of the same rank if the pace is the same."""
        at = self.newest.get(rank)
        joined = None if at is None else _joined(self.news_used[at].used, used)
        if at is not None and joined is not None:
            self.news_used[at] = UsedBy(rank, joined)
        else:
            self.newest[rank] = len(self.news_used)
            self.news_used.append(UsedBy(rank, used))

    def pop_news(
        self,
    ) -> tuple[tuple[UsedBy, ...], tuple[ShardFailure, ...], tuple[Span, ...]]:
        """Return what was not reported yet, as the next report."""
        self.number += 1
        if self.has_news:
            self.unheard.append((self.number, self.through()))
        news = tuple(self.news_used), tuple(self.news_failed), tuple(self.news_returned)
        self.news_used, self.news_failed, self.news_returned = [], [], []
        self.newest = {}
        return news

    def through(self) -> SpanSet:
        """Return the spans of what was not reported yet."""
        used, failed = (one.used.span for one in self.news_used), (f.span for f in self.news_failed)
        return SpanSet.of([*used, *failed, *self.news_returned])


@dataclass
class NodeShards:
    node: NodeId
    clock: JobClock
    report: Callable[[AnyEvent], None]
    reply: Callable[[Rank, ScriptReply], None]
    """Answers a rank's script, if its worker is still there."""
    now: Callable[[], float]
    _round: RoundNumber = RoundNumber(0)
    _nodes: int = 1
    _report_at: float = 0.0
    """When what was used is reported next."""
    _sets: dict[str, HeldShards] = field(default_factory=dict)

    def begin_round(self, part: Part) -> None:
        self._round = part.round
        self._nodes = part.group_world_size
        self._sets = {}

    # ---- what ranks say ----

    def opened(self, spec: DataSpec) -> None:
        """Note what a data set is that a rank is about to use."""
        self._sets.setdefault(spec.name, HeldShards()).spec = spec

    def ask(self, rank: Rank, message: Ask) -> None:
        """Answer a rank that wants shards, now or when there are some."""
        request = message.request
        assert isinstance(request, TakeShards)
        held = self._sets.setdefault(request.dataset, HeldShards())
        if not held.free and not held.finished:
            held.demand.waited()
        held.waiting.append((rank, message))
        self._serve(request.dataset, held)

    def heard(self, rank: Rank, message: DataUsed) -> None:
        """Note what became of positions; the coordinator hears of it soon."""
        held = self._sets.setdefault(message.dataset, HeldShards())
        mine = held.taken.setdefault(rank, SpanSet())
        for used in message.used:
            held.note(rank, used)
            mine.remove(used.span)
        for failed in message.failed:
            held.news_failed.append(ShardFailure(rank, failed.span, failed.error))
            mine.remove(failed.span)
        for span in message.returned:
            held.news_returned.append(span)
            mine.remove(span)
        if message.failed or message.returned:
            self._tell(message.dataset, held)

    def forget(self, rank: Rank) -> None:
        """Give back what a rank that is gone had not finished, and say all that it has done."""
        for name, held in self._sets.items():
            held.waiting = deque(one for one in held.waiting if one[0] != rank)
            held.news_returned += held.taken.pop(rank, ())
            if held.has_news:
                self._tell(name, held)

    # ---- what the coordinator says ----

    def lent(self, order: LendShards) -> None:
        if order.round != self._round:
            return
        held = self._sets.get(order.dataset)
        if held is None or held.spec is None:
            return  # Only a node whose rank has opened a data set is lent any of it.
        held.asked = 0
        held.finished = order.finished
        held.add(order.spans, order.heard)
        self._serve(order.dataset, held)

    def ask_again(self) -> None:
        """Repeat what is wanted, on a new stream."""
        for name, held in self._sets.items():
            held.asked = 0
            if held.waiting or held.has_news:
                self._tell(name, held)

    def look(self) -> None:
        """Report what is new, if that is due; called once a second."""
        now = self.now()
        due = now >= self._report_at
        if due:
            self._report_at = now + max(REPORT_EVERY_S, self._nodes / REPORTS_PER_S)
        for name, held in self._sets.items():
            held.demand.relax()
            if due and held.has_news:
                self._tell(name, held)

    # ---- between them ----

    def _serve(self, name: str, held: HeldShards) -> None:
        """Hand out what there is, and ask for more in time."""
        while held.waiting and (held.free or held.finished):
            rank, message = held.waiting.popleft()
            assert isinstance(message.request, TakeShards)
            spans = held.take(rank, message.request.count)
            held.demand.taken(len(spans), self.now())
            answer = ShardsTaken(spans=spans)
            reply = ScriptReply(channel=message.channel, number=message.number, answer=answer)
            self.reply(rank, reply)
        ahead = held.demand.ahead(self.now())
        if not held.finished and 2 * (held.count + held.asked) <= ahead:
            self._tell(name, held)

    def _tell(self, name: str, held: HeldShards) -> None:
        waiting = sum(_wanted(message) for _, message in held.waiting)
        ahead = held.demand.ahead(self.now()) if held.taken or held.waiting else 0
        held.asked = 0 if held.finished else min(MAX_WANT, max(waiting, ahead - held.count))
        used, failed, returned = held.pop_news()
        self.report(
            ShardsReported(
                at=self.clock.now(),
                node=self.node,
                round=self._round,
                dataset=name,
                number=held.number,
                want=held.asked,
                used=used,
                failed=failed,
                returned=returned,
            )
        )


def _joined(before: Used, after: Used) -> Used | None:
    """Return two uses as one; None if the second does not go on as the first did."""
    follows = before.span.line == after.span.line and before.span.stop == after.span.start
    at_once = before.first_step == before.last_step == after.first_step == after.last_step
    if not _stretch(after).continues(_stretch(before)) and not (follows and at_once):
        return None
    span = Span(before.span.line, before.span.start, after.span.stop)
    records = before.records + after.records
    return Used(span, before.first_step, after.last_step, records)


def _stretch(used: Used) -> Stretch:
    return Stretch(used.span, used.first_step, used.last_step)


def _wanted(message: Ask) -> int:
    return message.request.count if isinstance(message.request, TakeShards) else 0
