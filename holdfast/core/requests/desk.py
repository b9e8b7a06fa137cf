"""Every request of a round's scripts, from its arrival to its answer.

What is asked is for `requests.store` and `requests.barriers` to say; here it is kept who
asked, who still waits and until when, and what was answered last.

    asked ──▶ answered at once
          └─▶ open ──▶ answered when what it waits for has come
                   ├── denied: its time is up
                   └── denied: the round is over

An answer can be lost with a stream, or with a coordinator that died between writing and sending; then
the agent asks again. The last answer of each lane is kept for that, and given again, so nothing is
ever done twice. What only reads is done again instead: its answer may be large, and who has not got
it cannot mind a newer one.

All of it lives and dies with the round.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from holdfast.core.requests import barriers as meeting
from holdfast.core.requests import store as keys
from holdfast.core.requests.barriers import Attendance, Meetings, Over
from holdfast.core.requests.store import Asker, Store
from holdfast.messages.actions import Answered
from holdfast.messages.events import Asked
from holdfast.messages.requests import (
    AnyAnswer,
    AwaitSave,
    CastVote,
    CompareSet,
    Denied,
    Get,
    Granted,
    HeldRequest,
    JoinBarrier,
    Values,
    WaitForKeys,
)
from holdfast.messages.units import Rank, Time


class LastAnswer(Struct):
    """The newest request of a lane."""

    number: int
    answer: AnyAnswer | None = None
    """None while it is open, and for what can be done again."""


class Open(Struct, frozen=True):
    asked: Asked
    until: Time | None


class Desk(Struct):
    store: Store = field(default_factory=Store)
    meetings: Meetings = field(default_factory=Meetings)
    last: dict[Rank, dict[int, LastAnswer]] = field(default_factory=dict)
    """By rank and lane."""
    open: dict[Asker, Open] = field(default_factory=dict)
    until: Time | None = None
    """No open request's time is up before this; it may be earlier than need be, never later."""


def take(desk: Desk, event: Asked, attendance: Attendance, now: Time) -> list[Answered]:
    """Take a request of the round in force."""
    asker = _asker(event.rank, event.lane)
    before = _before(desk, event, asker)
    if before is not None:
        return before
    request = event.request
    if isinstance(request, JoinBarrier | CastVote):
        return _meet(desk, event, asker, attendance, now)
    assert not isinstance(request, HeldRequest), "not for this desk alone"
    taken = keys.take(desk.store, asker, request)
    if taken.answer is None:
        _keep_open(desk, event, asker, now)
        return _in_time(desk, now)
    desk.last[event.rank][event.lane].answer = _kept(taken.answer, event)
    return [_to(event, taken.answer), *_answer(desk, taken.woken, Granted())]


def hold(desk: Desk, event: Asked, now: Time) -> tuple[Asker | None, list[Answered]]:
    """Keep a request open that others will `answer`; None: it was asked before."""
    asker = _asker(event.rank, event.lane)
    before = _before(desk, event, asker)
    if before is not None:
        return None, before
    _keep_open(desk, event, asker, now)
    return asker, []


def answer(desk: Desk, answers: Iterable[tuple[Asker, AnyAnswer]]) -> list[Answered]:
    """Answer held requests, if they still wait."""
    found = []
    for asker, one in answers:
        if asker in desk.open and isinstance(desk.open[asker].asked.request, HeldRequest):
            found += _answer(desk, [asker], one)
    return found


def _before(desk: Desk, event: Asked, asker: Asker) -> list[Answered] | None:
    """What to say to a request that came before; None: it is new, and its lane's newest now."""
    lanes = desk.last.setdefault(event.rank, {})
    last = lanes.get(event.lane)
    if last is not None and event.number <= last.number:
        if event.number < last.number or asker in desk.open:
            return []  # It had its answer, or waits for it.
        if last.answer is not None:
            return [_to(event, _again(last.answer, event))]
    if asker in desk.open:
        _drop(desk, asker)
    lanes[event.lane] = LastAnswer(event.number)
    return None


def _meet(
    desk: Desk, event: Asked, asker: Asker, attendance: Attendance, now: Time
) -> list[Answered]:
    assert isinstance(event.request, JoinBarrier | CastVote)
    _keep_open(desk, event, asker, now)
    before, over = meeting.join(desk.meetings, event.request, event.rank, asker, attendance)
    answers = []
    if before is not None:
        detail = f"rank {event.rank} came to {event.request.name!r} again"
        answers += _answer(desk, [before], Denied(reason="joined again", detail=detail))
    return answers + _all_over(desk, [over] if over is not None else []) + _in_time(desk, now)


def rank_ended(desk: Desk, rank: Rank, attendance: Attendance) -> list[Answered]:
    """A rank ended with 0: nobody has to wait for it."""
    for lane in desk.last.pop(rank, {}):
        if _asker(rank, lane) in desk.open:
            _drop(desk, _asker(rank, lane))
    return _all_over(desk, meeting.ended(desk.meetings, attendance))


def times_up(desk: Desk, now: Time) -> list[Answered]:
    """Deny what waited for too long."""
    if desk.until is None or desk.until > now:
        return []
    late = [a for a, held in desk.open.items() if held.until is not None and held.until <= now]
    answers = []
    for asker in late:
        asked = desk.open[asker].asked
        _leave(desk, asker)
        answers += _answer(desk, [asker], Denied(reason="timeout", detail=_waited_for(desk, asked)))
    desk.until = min((h.until for h in desk.open.values() if h.until is not None), default=None)
    return answers


def close(desk: Desk, why: str) -> list[Answered]:
    """The round is over: whoever still waits is told so."""
    return [
        _to(held.asked, Denied(reason="fenced", detail=f"round {held.asked.round} is over: {why}"))
        for held in desk.open.values()
    ]


def fenced(event: Asked, why: str) -> Answered:
    """The answer to a request that is not of the round in force."""
    return _to(event, Denied(reason="fenced", detail=why))


# ---- answers -----------------------------------------------------------------------------------


def _asker(rank: Rank, lane: int) -> Asker:
    return f"{rank}/{lane}"


def _to(event: Asked, answer: AnyAnswer) -> Answered:
    return Answered(
        node=event.node,
        round=event.round,
        rank=event.rank,
        lane=event.lane,
        number=event.number,
        answer=answer,
    )


def _kept(answer: AnyAnswer, event: Asked) -> AnyAnswer | None:
    """What to remember of an answer: never a value, which the request itself or the store has."""
    if isinstance(event.request, Get):
        return None
    if isinstance(event.request, CompareSet) and isinstance(answer, Values):
        return Granted() if answer.values == (event.request.desired,) else None
    return answer


def _again(kept: AnyAnswer, event: Asked) -> AnyAnswer:
    if isinstance(event.request, CompareSet) and isinstance(kept, Granted):
        return Values(values=(event.request.desired,))
    return kept


def _answer(desk: Desk, askers: Iterable[Asker], answer: AnyAnswer) -> list[Answered]:
    """Answer open requests that wait for nothing any more."""
    answers = []
    for asker in askers:
        held = desk.open.pop(asker)
        desk.last[held.asked.rank][held.asked.lane].answer = answer
        answers.append(_to(held.asked, answer))
    return answers


def _all_over(desk: Desk, over: Iterable[Over]) -> list[Answered]:
    answers = []
    for one in over:
        answers += _answer(desk, one.askers, one.answer)
    return answers


# ---- open requests -----------------------------------------------------------------------------


def _keep_open(desk: Desk, event: Asked, asker: Asker, now: Time) -> None:
    request = event.request
    assert isinstance(request, WaitForKeys | JoinBarrier | CastVote | HeldRequest)
    limit_s = getattr(request, "timeout_s", None)
    until = None if limit_s is None else Time(now + limit_s)
    desk.open[asker] = Open(event, until)
    if until is not None:
        desk.until = min(until, desk.until if desk.until is not None else until)


def _in_time(desk: Desk, now: Time) -> list[Answered]:
    """Deny at once what would not wait at all."""
    return times_up(desk, now)


def _leave(desk: Desk, asker: Asker) -> None:
    """Stop waiting for anything; the request stays open."""
    asked = desk.open[asker].asked
    if isinstance(asked.request, JoinBarrier | CastVote):
        meeting.withdraw(desk.meetings, asked.request, asked.rank)
    elif isinstance(asked.request, WaitForKeys):
        keys.forget(desk.store, asker)


def _drop(desk: Desk, asker: Asker) -> None:
    _leave(desk, asker)
    del desk.open[asker]


def _waited_for(desk: Desk, asked: Asked) -> str:
    request = asked.request
    if isinstance(request, WaitForKeys):
        missing = [key for key in request.keys if key not in desk.store.items]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        named = ", ".join(repr(key) for key in missing[:3])
        return f"{request.timeout_s:.3g} s for {named}{more}"
    if isinstance(request, AwaitSave):
        return f"{request.timeout_s:.3g} s for step {request.step} to be saved to {request.to}"
    assert isinstance(request, JoinBarrier | CastVote)
    return f"{request.timeout_s:.3g} s for all ranks to come to {request.name!r}"


def validate(desk: Desk, attendance: Attendance) -> None:
    """Every invariant of the requests and of the machines behind them."""
    keys.validate(desk.store)
    meeting.validate(desk.meetings, attendance)
    waiting = list(desk.store.waits)
    for of_kind in (desk.meetings.barriers, desk.meetings.votes):
        waiting += [member.asker for members in of_kind.values() for member in members.values()]
    waiting += [
        asker for asker, held in desk.open.items() if isinstance(held.asked.request, HeldRequest)
    ]
    assert sorted(waiting) == sorted(desk.open), "open requests are not those that wait"
    for asker, held in desk.open.items():
        assert asker == _asker(held.asked.rank, held.asked.lane)
        last = desk.last[held.asked.rank][held.asked.lane]
        assert last.number == held.asked.number, "an open request is not its lane's newest"
        assert last.answer is None, "an open request was answered"
        if held.until is not None:
            assert desk.until is not None, "nobody minds the time"
            assert desk.until <= held.until, "a request may wait for too long"
