"""Numbers the active members by the numbers they had before.

before          0  ×  2  3  ×  ×  6  7      × is gone
fill_gaps       0     2  3        1  4      five members: whoever was below 5 keeps his number
shift           0     1  2        3  4      the order stays, the numbers behind a gap do not
"""

from __future__ import annotations

from holdfast.inprocess.assignment.members import (
    Members,
    in_order,
    numbered_from_zero,
    renumbered,
)


def fill_gaps(members: Members) -> Members:
    """Fill the numbers of those that are gone with the highest numbers, and then with newcomers.

    No numbering of these `members` from 0 changes fewer numbers.
    """
    active = sorted(in_order(members), key=lambda member: member.seniority)
    kept = {
        member.previous: member
        for member in active
        if member.previous is not None and member.previous < len(active)
    }
    staying = {member.rank for member in kept.values()}
    moved = iter([member for member in active if member.rank not in staying])
    numbers = {
        (kept[number] if number in kept else next(moved)).rank: number
        for number in range(len(active))
    }
    return renumbered(members, numbers)


def shift(members: Members) -> Members:
    """Close the gaps in the order of the numbers that `members` had; newcomers come last."""
    return numbered_from_zero(members, sorted(in_order(members), key=lambda m: m.seniority))
