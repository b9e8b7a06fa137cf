"""Forwards the requests of this node's scripts to the coordinator, and the answers back.

A worker does not know its round: the agent fills in rank and round, so no script can ask in
another's name or for a round that is over. A request stays here until it is answered. The stream
resends what the coordinator has not acknowledged; what it acknowledged but did not answer before
the stream broke is sent again on the new stream.

Values may be large. Only a few requests that carry one, or may be answered with one, are in flight
at a time, so that neither end of the stream has to buffer more than a few of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from holdfast.clock import JobClock
from holdfast.messages.actions import Answered
from holdfast.messages.events import AnyEvent, Asked, ExcludeAsked, StopAsked
from holdfast.messages.local import Ask, ScriptReply
from holdfast.messages.requests import (
    LARGE_AT_ONCE,
    AnyAnswer,
    Denied,
    ExcludeNode,
    Granted,
    LocateImage,
    StopJob,
    TakeShards,
    is_large,
)
from holdfast.messages.units import NodeId, Rank, RoundNumber

Place = tuple[Rank, int]
"""A rank and its channel, on which one request at a time waits for its answer."""


@dataclass
class ScriptRequests:
    node: NodeId
    clock: JobClock
    report: Callable[[AnyEvent], None]
    reply: Callable[[Rank, ScriptReply], None]
    """Answers a rank's script, if its worker is still there."""
    _open: dict[Place, Asked] = field(default_factory=dict)
    _large: set[Place] = field(default_factory=set)
    """Large requests that are in flight."""
    _queue: deque[Asked] = field(default_factory=deque)
    """Large requests that wait; some may have been forgotten since."""

    def ask(self, round: RoundNumber, rank: Rank, message: Ask) -> None:
        """Forward a worker's request."""
        at, node, request = self.clock.now(), self.node, message.request
        if isinstance(request, ExcludeNode):
            reason = request.reason
            self.report(ExcludeAsked(at=at, node=node, round=round, rank=rank, reason=reason))
            self._reply(rank, message.channel, message.number, Granted())
            return
        if isinstance(request, StopJob):
            reason, code = request.reason, request.code
            event = StopAsked(at=at, node=node, round=round, rank=rank, reason=reason, code=code)
            self.report(event)
            self._reply(rank, message.channel, message.number, Granted())
            return
        assert not isinstance(request, LocateImage | TakeShards), "the agent answers it itself"
        asked = Asked(
            at=at,
            node=node,
            round=round,
            rank=rank,
            channel=message.channel,
            number=message.number,
            request=request,
        )
        self._open[rank, message.channel] = asked
        if is_large(request):
            self._queue.append(asked)
            self._send_large()
        else:
            self.report(asked)

    def answered(self, action: Answered) -> None:
        """Pass on an answer; a repeated one, or one to another round, is ignored."""
        place = (action.rank, action.channel)
        asked = self._open.get(place)
        if asked is None or (asked.round, asked.number) != (action.round, action.number):
            return
        self._close(place)
        self._reply(action.rank, action.channel, action.number, action.answer)
        self._send_large()

    def ask_again(self, sent: Collection[AnyEvent]) -> None:
        """Send unanswered requests again on a new stream, besides the events already sent on it."""
        in_flight = {id(event) for event in sent} | {id(asked) for asked in self._queue}
        for asked in list(self._open.values()):
            if id(asked) not in in_flight:
                self.report(asked)

    def fence(self, rank: Rank, why: str) -> None:
        """Refuse what a worker asked for whose round is over, and which lives on."""
        for (asker, channel), asked in list(self._open.items()):
            if asker == rank:
                denied = Denied(reason="fenced", detail=f"round {asked.round} is over: {why}")
                self._reply(rank, channel, asked.number, denied)
        self.forget(rank)

    def forget(self, rank: Rank) -> None:
        """Drop the requests of a worker that is gone."""
        for place in [place for place in self._open if place[0] == rank]:
            self._close(place)
        self._send_large()

    def _close(self, place: Place) -> None:
        del self._open[place]
        self._large.discard(place)

    def _send_large(self) -> None:
        while self._queue and len(self._large) < LARGE_AT_ONCE:
            asked = self._queue.popleft()
            place = (asked.rank, asked.channel)
            if self._open.get(place) is asked:
                self._large.add(place)
                self.report(asked)

    def _reply(self, rank: Rank, channel: int, number: int, answer: AnyAnswer) -> None:
        self.reply(rank, ScriptReply(channel=channel, number=number, answer=answer))
