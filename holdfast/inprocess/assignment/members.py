"""Defines what an assignment works on, and checks what it returns.

An assignment may be the user's own, and a wrong one would make ranks disagree about the world, so
`assign_ranks` refuses every result whose numbers are not exactly 0 to n-1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NoReturn

import msgspec
from msgspec import Struct

from holdfast.errors import StopRestarting, UsageError
from holdfast.messages.exits import EXIT_TRY_AGAIN


class Member(Struct, frozen=True, kw_only=True):
    """A process of the round, or one that was active in the round before and is gone."""

    rank: int
    """Rank in the round, of active members and those in reserve alike."""
    host: str = ""
    """Name of its machine."""
    node_rank: int = 0
    """Rank of its node in the round."""
    local_rank: int = 0
    """Rank within its node."""
    previous: int | None = None
    """Number in the entry before; None for a newcomer and for a member that was in reserve."""
    active: int | None = None
    """Number in the next entry; None in reserve."""
    keys: dict[str, str] = {}
    """Where the process is, in the user's words: rack, power domain, pipeline stage."""
    gone: bool = False
    """Whether it is not in this round. It is listed because its number and place are known."""

    @property
    def seniority(self) -> tuple[bool, int, int]:
        """Order of members: first by the number they had, then newcomers by rank."""
        return (self.previous is None, self.previous or 0, self.rank)


Members = tuple[Member, ...]
Assignment = Callable[[Members], Members]

Key = str | Callable[[Member], Hashable]
"""What members are grouped by: "host", "node_rank", a name in `Member.keys`, or a function."""


def assign_ranks(members: Iterable[Member], assign: Assignment | None = None) -> Members:
    """Return the living members in the order of their ranks, with the numbers they enter under.

    Before the assignment, and without one, all are active under their rank.
    """
    given = tuple(
        msgspec.structs.replace(member, active=None if member.gone else member.rank)
        for member in sorted(members, key=lambda member: (member.gone, member.rank))
    )
    _check_given(given)
    assigned = given if assign is None else assign(given)
    _check(given, assigned)
    living = tuple(sorted((m for m in assigned if not m.gone), key=lambda member: member.rank))
    if not any(member.active is not None for member in living):
        raise StopRestarting(
            f"the rank assignment leaves all {len(living)} ranks of the round in reserve: "
            "too few of them are left for its limits",
            code=EXIT_TRY_AGAIN,
        )
    return living


def with_gone(members: Iterable[Member], before: Iterable[Member]) -> Members:
    """Add those that were active in the assignment before and are not among the members now."""
    members = tuple(members)
    staying = {member.previous for member in members}
    gone = (
        msgspec.structs.replace(member, previous=member.active, active=None, gone=True)
        for member in before
        if member.active is not None and member.active not in staying
    )
    return (*members, *gone)


def group_of(member: Member, key: Key) -> Hashable:
    """Return the group of a member by that key."""
    if callable(key):
        return key(member)
    if key == "host":
        return member.host
    if key == "node_rank":
        return member.node_rank
    if key not in member.keys:
        known = ", ".join(sorted({"host", "node_rank", *member.keys}))
        raise UsageError(
            f"ranks cannot be grouped by {key!r}: rank {member.rank} on {member.host or 'its node'} "
            f"does not have that key; it has {known}"
        )
    return member.keys[key]


def in_order(members: Members) -> list[Member]:
    """Return the active members in the order of their numbers."""
    numbered = [(m.active, m.rank, m) for m in members if m.active is not None and not m.gone]
    return [member for _, _, member in sorted(numbered, key=lambda found: found[:2])]


def renumbered(members: Members, numbers: dict[int, int]) -> Members:
    """Return the members with these numbers by rank; all others are in reserve."""
    return tuple(
        msgspec.structs.replace(m, active=None if m.gone else numbers.get(m.rank))
        for m in sorted(members, key=lambda member: (member.gone, member.rank))
    )


def numbered_from_zero(members: Members, active: Iterable[Member]) -> Members:
    """Return the members with these active, numbered in the order given."""
    return renumbered(members, {member.rank: number for number, member in enumerate(active)})


def _check_given(given: Members) -> None:
    ranks = [member.rank for member in given if not member.gone]
    if ranks != list(range(len(ranks))):
        raise UsageError(f"the members of a round must have the ranks 0 to n-1, not {ranks[:20]}")
    had = [member.previous for member in given if member.previous is not None]
    if len(had) != len(set(had)):
        raise UsageError(f"two members had the same number in the entry before: {sorted(had)[:20]}")


def _check(given: Members, assigned: object) -> None:
    if not isinstance(assigned, tuple) or not all(isinstance(m, Member) for m in assigned):
        _refuse(f"it returned {type(assigned).__name__}, not a tuple of Member")

    def identities(members: Members) -> list[tuple[bool, int]]:
        return sorted((member.gone, member.rank) for member in members)

    if identities(assigned) != identities(given):
        _refuse("it does not return each member that it was given once")
    numbers = sorted(m.active for m in assigned if m.active is not None)
    if any(member.gone and member.active is not None for member in assigned):
        _refuse("it makes a member active that is gone")
    if numbers != list(range(len(numbers))):
        _refuse(f"the active numbers are not 0 to {len(numbers) - 1}: {numbers[:20]}")


def _refuse(why: str) -> NoReturn:
    raise UsageError(f"the rank assignment (assign=) cannot be used: {why}")
