"""Puts members in reserve. Those that stay active keep their order and are numbered from 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from holdfast.errors import UsageError
from holdfast.inprocess.arguments import require_count
from holdfast.inprocess.assignment.members import (
    Assignment,
    Key,
    Member,
    Members,
    group_of,
    in_order,
    numbered_from_zero,
)

Order = Callable[[Member], Any]
"""Sort key of members; the greatest go to reserve first."""


def at_most(count: int) -> Assignment:
    """Keep the lowest `count` numbers active. The others are spares, which fill gaps later."""
    require_count("at_most", "count", count)
    return lambda members: numbered_from_zero(members, in_order(members)[:count])


def divisible_by(divisor: int, *, reserve_first: Order | None = None) -> Assignment:
    """Make the number of active members divisible by `divisor`.

    The highest numbers go to reserve, or those that are greatest by `reserve_first`.
    """
    require_count("divisible_by", "divisor", divisor)

    def select(members: Members) -> Members:
        active = in_order(members)
        surplus = len(active) % divisor
        leaving = active if reserve_first is None else sorted(active, key=reserve_first)
        reserved = {member.rank for member in leaving[len(active) - surplus :]}
        return numbered_from_zero(members, [m for m in active if m.rank not in reserved])

    return select


def only_groups(
    key: Key,
    *,
    at_least: int | None = None,
    exactly: int | None = None,
    multiple_of: int | None = None,
) -> Assignment:
    """Keep the groups, by `key`, that have such a number of active members (`at_least`, `exactly`,
    `multiple_of`); all members of another group go to reserve."""
    conditions = {"at_least": at_least, "exactly": exactly, "multiple_of": multiple_of}
    wanted = {name: count for name, count in conditions.items() if count is not None}
    if not wanted:
        raise UsageError("only_groups needs at_least=, exactly= or multiple_of=")
    for name, count in wanted.items():
        require_count("only_groups", name, count)

    def fits(size: int) -> bool:
        return (
            (at_least is None or size >= at_least)
            and (exactly is None or size == exactly)
            and (multiple_of is None or size % multiple_of == 0)
        )

    def select(members: Members) -> Members:
        active = in_order(members)
        groups = {member.rank: group_of(member, key) for member in active}
        sizes = Counter(groups.values())
        return numbered_from_zero(members, [m for m in active if fits(sizes[groups[m.rank]])])

    return select
