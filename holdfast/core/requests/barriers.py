"""Decides when the ranks of a round have met: barriers and votes.

A meeting has a name and opens with the first rank that joins. It is over when every rank of the round
that has not exited has joined; then all are answered at once, a vote with its tally, and the name is
free for the next meeting. A rank that exited with 0 counts as having passed every barrier, and as
absent from votes. A rank that died ends the round, and with it every meeting.

A rank is in a meeting once. When it joins again while the meeting is open (from another thread, or
because its first call was interrupted), the later call replaces the earlier one.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct, field

from holdfast.core.decisions import Asker
from holdfast.messages.requests import MAX_LISTED, Ballot, CastVote, Granted, JoinBarrier, Tally
from holdfast.messages.units import Rank


class Attendee(Struct, frozen=True):
    """One rank's part in a meeting."""

    asker: Asker
    ballot: Ballot | None = None
    """None at a barrier."""


class Meetings(Struct):
    """Open meetings, by name and rank."""

    barriers: dict[str, dict[Rank, Attendee]] = field(default_factory=dict)
    votes: dict[str, dict[Rank, Attendee]] = field(default_factory=dict)


class Attendance(Struct, frozen=True):
    """Numbers of ranks of the round."""

    present: int
    """Ranks that have not exited."""
    ended: int
    """Ranks that exited with 0."""


class Over(Struct, frozen=True):
    """A meeting that is over, and the answer to all who joined."""

    askers: tuple[Asker, ...]
    answer: Granted | Tally


def join(
    meetings: Meetings,
    request: JoinBarrier | CastVote,
    rank: Rank,
    asker: Asker,
    attendance: Attendance,
) -> tuple[Asker | None, Over | None]:
    """Join a meeting; return the call that this one replaces, and the meeting if it is over."""
    ballot = request.ballot if isinstance(request, CastVote) else None
    of_kind = _of_kind(meetings, request)
    members = of_kind.setdefault(request.name, {})
    before = members.pop(rank, None)
    members[rank] = Attendee(asker, ballot)
    over = _over(of_kind, request.name, attendance)
    return (before.asker if before is not None else None), over


def withdraw(meetings: Meetings, request: JoinBarrier | CastVote, rank: Rank) -> None:
    """Remove a rank that no longer waits."""
    of_kind = _of_kind(meetings, request)
    del of_kind[request.name][rank]
    if not of_kind[request.name]:
        del of_kind[request.name]


def ended(meetings: Meetings, attendance: Attendance) -> list[Over]:
    """Return the meetings that are over because a rank exited with 0 (and was withdrawn)."""
    over = []
    for of_kind in (meetings.barriers, meetings.votes):
        over += [_over(of_kind, name, attendance) for name in list(of_kind)]
    return [meeting for meeting in over if meeting is not None]


def _of_kind(
    meetings: Meetings, request: JoinBarrier | CastVote
) -> dict[str, dict[Rank, Attendee]]:
    return meetings.barriers if isinstance(request, JoinBarrier) else meetings.votes


def _over(
    of_kind: dict[str, dict[Rank, Attendee]], name: str, attendance: Attendance
) -> Over | None:
    if len(of_kind[name]) < attendance.present:
        return None
    members = of_kind.pop(name).values()
    ballots = [member.ballot for member in members if member.ballot is not None]
    answer = _tally(ballots, attendance.ended) if ballots else Granted()
    return Over(tuple(member.asker for member in members), answer)


def _tally(ballots: list[Ballot], absent: int) -> Tally:
    # True and 1 are equal in Python, but different ballots.
    counted = Counter((type(ballot).__name__, ballot) for ballot in ballots)
    counts = tuple((ballot, number) for (_, ballot), number in counted.most_common(MAX_LISTED))
    return Tally(counts=counts, voters=len(ballots), absent=absent)


def validate(meetings: Meetings, attendance: Attendance) -> None:
    """Check every invariant."""
    for of_kind in (meetings.barriers, meetings.votes):
        for name, members in of_kind.items():
            assert 0 < len(members) < attendance.present, f"meeting {name!r} should be over"
    assert all(m.ballot is None for b in meetings.barriers.values() for m in b.values())
    assert all(m.ballot is not None for v in meetings.votes.values() for m in v.values())
