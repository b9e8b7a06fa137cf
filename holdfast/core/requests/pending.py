"""Every request of a round's scripts, from its arrival to its answer.

What is asked is for `requests.store` and `requests.barriers` to say; here it is kept who
asked, who still waits and until when, and what was answered last.

    asked ──▶ answered at once
          └─▶ open ──▶ answered when what it waits for has come
                   ├── denied: its time is up
                   └── denied: the round is over

An answer can be lost with a stream, or with a coordinator that died between writing and sending; then
the agent asks again. The last answer of each channel is kept for that, and given again, so nothing is
ever done twice. What only reads is done again instead: its answer may be large, and who has not got
it cannot mind a newer one.

All of it lives and dies with the round.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.core.requests import barriers as meeting
from holdfast.core.requests import store as keys
from holdfast.core.requests.barriers import Attendance, Meetings, Over
from holdfast.core.requests.store import Store
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
    """The newest request of a channel."""

    number: int
    answer: AnyAnswer | None = None
    """None while it is open, and for what can be done again."""


class OpenRequest(Struct, frozen=True):
    asked: Asked
    until: Time | None


class Requests(Struct):
    store: Store = field(default_factory=Store)
    meetings: Meetings = field(default_factory=Meetings)
    last: dict[Rank, dict[int, LastAnswer]] = field(default_factory=dict)
    """By rank and channel."""
    open: dict[Asker, OpenRequest] = field(default_factory=dict)
    until: Time | None = None
    """No open request's time is up before this; it may be earlier than need be, never later."""


def take(state: Requests, event: Asked, attendance: Attendance, now: Time) -> list[Answered]:
    """Take a request of the round in force."""
    asker = _asker(event.rank, event.channel)
    before = _before(state, event, asker)
    if before is not None:
        return before
    request = event.request
    if isinstance(request, JoinBarrier | CastVote):
        return _meet(state, event, asker, attendance, now)
    assert not isinstance(request, HeldRequest), "held requests are answered by other machines"
    taken = keys.take(state.store, asker, request)
    if taken.answer is None:
        _keep_open(state, event, asker, now)
        return _in_time(state, now)
    state.last[event.rank][event.channel].answer = _kept(taken.answer, event)
    return [_to(event, taken.answer), *_answer(state, taken.woken, Granted())]


def hold(state: Requests, event: Asked, now: Time) -> tuple[Asker | None, list[Answered]]:
    """Keep a request open that others will `answer`; None: it was asked before."""
    asker = _asker(event.rank, event.channel)
    before = _before(state, event, asker)
    if before is not None:
        return None, before
    _keep_open(state, event, asker, now)
    return asker, []


def answer(state: Requests, answers: Iterable[tuple[Asker, AnyAnswer]]) -> list[Answered]:
    """Answer held requests, if they still wait."""
    found = []
    for asker, one in answers:
        if asker in state.open and isinstance(state.open[asker].asked.request, HeldRequest):
            found += _answer(state, [asker], one)
    return found


def _before(state: Requests, event: Asked, asker: Asker) -> list[Answered] | None:
    """What to say to a request that came before; None: it is new, and its channel's newest now."""
    channels = state.last.setdefault(event.rank, {})
    last = channels.get(event.channel)
    if last is not None and event.number <= last.number:
        if event.number < last.number or asker in state.open:
            return []  # It had its answer, or waits for it.
        if last.answer is not None:
            return [_to(event, _again(last.answer, event))]
    if asker in state.open:
        _drop(state, asker)
    channels[event.channel] = LastAnswer(event.number)
    return None


def _meet(
    state: Requests, event: Asked, asker: Asker, attendance: Attendance, now: Time
) -> list[Answered]:
    assert isinstance(event.request, JoinBarrier | CastVote)
    _keep_open(state, event, asker, now)
    before, over = meeting.join(state.meetings, event.request, event.rank, asker, attendance)
    answers = []
    if before is not None:
        detail = f"rank {event.rank} came to {event.request.name!r} again"
        answers += _answer(state, [before], Denied(reason="joined again", detail=detail))
    return answers + _all_over(state, [over] if over is not None else []) + _in_time(state, now)


def rank_ended(state: Requests, rank: Rank, attendance: Attendance) -> list[Answered]:
    """A rank ended with 0: nobody has to wait for it."""
    for channel in state.last.pop(rank, {}):
        if _asker(rank, channel) in state.open:
            _drop(state, _asker(rank, channel))
    return _all_over(state, meeting.ended(state.meetings, attendance))


def times_up(state: Requests, now: Time) -> list[Answered]:
    """Deny what waited for too long."""
    if state.until is None or state.until > now:
        return []
    late = [a for a, held in state.open.items() if held.until is not None and held.until <= now]
    answers = []
    for asker in late:
        asked = state.open[asker].asked
        _leave(state, asker)
        answers += _answer(
            state, [asker], Denied(reason="timeout", detail=_waited_for(state, asked))
        )
    state.until = min((h.until for h in state.open.values() if h.until is not None), default=None)
    return answers


def close(state: Requests, why: str) -> list[Answered]:
    """Deny what is open, because the round is over, and forget all that its scripts shared."""
    denied = [
        _to(held.asked, Denied(reason="fenced", detail=f"round {held.asked.round} is over: {why}"))
        for held in state.open.values()
    ]
    state.store, state.meetings = Store(), Meetings()
    state.last, state.open, state.until = {}, {}, None
    return denied


def fenced(event: Asked, why: str) -> Answered:
    """The answer to a request that is not of the round in force."""
    return _to(event, Denied(reason="fenced", detail=why))


# ---- answers -----------------------------------------------------------------------------------


def _asker(rank: Rank, channel: int) -> Asker:
    return f"{rank}/{channel}"


def _to(event: Asked, answer: AnyAnswer) -> Answered:
    return Answered(
        node=event.node,
        round=event.round,
        rank=event.rank,
        channel=event.channel,
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


def _answer(state: Requests, askers: Iterable[Asker], answer: AnyAnswer) -> list[Answered]:
    """Answer open requests that wait for nothing any more."""
    answers = []
    for asker in askers:
        held = state.open.pop(asker)
        state.last[held.asked.rank][held.asked.channel].answer = answer
        answers.append(_to(held.asked, answer))
    return answers


def _all_over(state: Requests, over: Iterable[Over]) -> list[Answered]:
    answers = []
    for one in over:
        answers += _answer(state, one.askers, one.answer)
    return answers


# ---- open requests -----------------------------------------------------------------------------


def _keep_open(state: Requests, event: Asked, asker: Asker, now: Time) -> None:
    request = event.request
    assert isinstance(request, WaitForKeys | JoinBarrier | CastVote | HeldRequest)
    limit_s = getattr(request, "timeout_s", None)
    until = None if limit_s is None else Time(now + limit_s)
    state.open[asker] = OpenRequest(event, until)
    if until is not None:
        state.until = min(until, state.until if state.until is not None else until)


def _in_time(state: Requests, now: Time) -> list[Answered]:
    """Deny at once what would not wait at all."""
    return times_up(state, now)


def _leave(state: Requests, asker: Asker) -> None:
    """Stop waiting for anything; the request stays open."""
    asked = state.open[asker].asked
    if isinstance(asked.request, JoinBarrier | CastVote):
        meeting.withdraw(state.meetings, asked.request, asked.rank)
    elif isinstance(asked.request, WaitForKeys):
        keys.forget(state.store, asker)


def _drop(state: Requests, asker: Asker) -> None:
    _leave(state, asker)
    del state.open[asker]


def _waited_for(state: Requests, asked: Asked) -> str:
    request = asked.request
    if isinstance(request, WaitForKeys):
        missing = [key for key in request.keys if key not in state.store.items]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        named = ", ".join(repr(key) for key in missing[:3])
        return f"{request.timeout_s:.3g} s for {named}{more}"
    if isinstance(request, AwaitSave):
        return f"{request.timeout_s:.3g} s for step {request.step} to be saved to {request.to}"
    assert isinstance(request, JoinBarrier | CastVote)
    return f"{request.timeout_s:.3g} s for all ranks to come to {request.name!r}"


def validate(state: Requests, attendance: Attendance) -> None:
    """Every invariant of the requests and of the machines behind them."""
    keys.validate(state.store)
    meeting.validate(state.meetings, attendance)
    waiting = list(state.store.waits)
    for of_kind in (state.meetings.barriers, state.meetings.votes):
        waiting += [member.asker for members in of_kind.values() for member in members.values()]
    waiting += [
        asker for asker, held in state.open.items() if isinstance(held.asked.request, HeldRequest)
    ]
    assert sorted(waiting) == sorted(state.open), "open requests are not those that wait"
    for asker, held in state.open.items():
        assert asker == _asker(held.asked.rank, held.asked.channel)
        last = state.last[held.asked.rank][held.asked.channel]
        assert last.number == held.asked.number, "an open request is not its channel's newest"
        assert last.answer is None, "an open request was answered"
        if held.until is not None:
            assert state.until is not None, "nobody minds the time"
            assert state.until <= held.until, "a request may wait for too long"
