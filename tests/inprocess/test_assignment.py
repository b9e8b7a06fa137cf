"""Rank assignments: what they promise, on examples and on all small worlds."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import StopRestarting, UsageError
from holdfast.inprocess.assignment import (
    Member,
    at_most,
    divisible_by,
    fill_gaps,
    only_groups,
    shift,
)
from holdfast.inprocess.assignment.members import (
    Assignment,
    Members,
    assign_ranks,
    with_gone,
)
from holdfast.inprocess.composition import compose


def world(*previous: int | None, node_size: int = 2) -> Members:
    """Members in the order of ranks, with the numbers they had."""
    return tuple(
        Member(
            rank=rank,
            host=f"node{rank // node_size}",
            node_rank=rank // node_size,
            local_rank=rank % node_size,
            previous=had,
        )
        for rank, had in enumerate(previous)
    )


def active(members: Members) -> list[int | None]:
    return [member.active for member in members]


@st.composite
def worlds(draw: st.DrawFn, largest: int = 10) -> Members:
    """Worlds after some faults: survivors with gaps between their numbers, and newcomers."""
    size = draw(st.integers(1, largest))
    numbers = draw(st.permutations(range(size + 4)))[:size]
    newcomers = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    had = [None if new else number for number, new in zip(numbers, newcomers, strict=True)]
    return world(*had, node_size=draw(st.integers(1, 4)))


ASSIGNMENTS: dict[str, Assignment] = {
    "fill_gaps": fill_gaps,
    "shift": shift,
    "at_most": at_most(3),
    "divisible_by": divisible_by(2),
    "divisible_by_rule": divisible_by(3, reserve_first=lambda member: -member.rank),
    "only_groups": only_groups("host", at_least=1),
    "composed": compose(only_groups("host", at_least=1), fill_gaps, at_most(7), divisible_by(1)),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
@given(members=worlds(), data=st.data())
def test_a_result_depends_on_the_members_and_not_on_their_order(
    name: str, members: Members, data: st.DataObject
) -> None:
    prepared = tuple(msgspec.structs.replace(m, active=m.rank) for m in members)
    shuffled = tuple(data.draw(st.permutations(prepared)))
    assert ASSIGNMENTS[name](shuffled) == ASSIGNMENTS[name](prepared)


@pytest.mark.parametrize("name", ASSIGNMENTS)
@given(members=worlds())
def test_the_active_are_numbered_from_zero_and_all_else_is_unchanged(
    name: str, members: Members
) -> None:
    prepared = tuple(msgspec.structs.replace(m, active=m.rank) for m in members)
    assigned = ASSIGNMENTS[name](prepared)
    numbers = sorted(m.active for m in assigned if m.active is not None)
    assert numbers == list(range(len(numbers)))
    assert [msgspec.structs.replace(m, active=m.rank) for m in assigned] == list(prepared)


def test_without_an_assignment_all_are_active_under_their_ranks() -> None:
    assert active(assign_ranks(reversed(world(2, None, 0)))) == [0, 1, 2]


# ---- numbering ----


def test_gaps_are_filled_by_the_highest_numbers() -> None:
    assert active(assign_ranks(world(0, 2, 3, 6, 7), fill_gaps)) == [0, 2, 3, 1, 4]


def test_newcomers_fill_gaps_after_the_highest_numbers() -> None:
    assert active(assign_ranks(world(None, 0, 7, None), fill_gaps)) == [2, 0, 1, 3]


def fewest_changes(members: Members) -> int:
    """The changed numbers of survivors in the best of all numberings."""
    return min(
        sum(m.previous not in (None, number) for m, number in zip(members, numbers, strict=True))
        for numbers in itertools.permutations(range(len(members)))
    )


@given(members=worlds(largest=6))
def test_no_numbering_changes_fewer_numbers_than_filling_gaps(members: Members) -> None:
    assigned = assign_ranks(members, fill_gaps)
    changed = sum(m.previous not in (None, m.active) for m in assigned)
    assert changed == fewest_changes(members)


def test_shifting_closes_gaps_and_puts_newcomers_last() -> None:
    assert active(assign_ranks(world(None, 0, 6, 3, None), shift)) == [3, 0, 2, 1, 4]


@given(members=worlds())
def test_shifting_keeps_the_order_of_survivors(members: Members) -> None:
    assigned = assign_ranks(members, shift)
    survivors = sorted((m.previous, m.active) for m in assigned if m.previous is not None)
    assert [number for _, number in survivors] == list(range(len(survivors)))


# ---- selections ----


@given(members=worlds(), count=st.integers(1, 12))
def test_at_most_so_many_are_active_and_the_lowest_numbers_are(
    members: Members, count: int
) -> None:
    before = assign_ranks(members, fill_gaps)
    after = assign_ranks(members, compose(fill_gaps, at_most(count)))
    kept = [m.active if m.active is not None and m.active < count else None for m in before]
    assert active(after) == kept


def test_a_spare_takes_the_number_of_a_rank_that_is_gone() -> None:
    assign = compose(fill_gaps, at_most(4))
    assert active(assign_ranks(world(0, 1, 3, None, None), assign)) == [0, 1, 3, 2, None]


@given(members=worlds(), divisor=st.integers(1, 4))
def test_the_active_world_is_the_largest_that_is_divisible(members: Members, divisor: int) -> None:
    expected = len(members) // divisor * divisor
    if expected == 0:
        with pytest.raises(StopRestarting):
            assign_ranks(members, divisible_by(divisor))
    else:
        found = active(assign_ranks(members, divisible_by(divisor)))
        assert sum(number is not None for number in found) == expected


def test_a_rule_says_who_goes_to_reserve() -> None:
    slow = {"slow": "1"}
    members = tuple(
        msgspec.structs.replace(m, keys=slow if m.rank == 1 else {"slow": "0"})
        for m in world(0, 1, 2, 3, 4)
    )
    assign = divisible_by(2, reserve_first=lambda member: member.keys["slow"])
    assert active(assign_ranks(members, assign)) == [0, None, 1, 2, 3]


CONDITIONS = {
    "at_least": lambda size: size >= 2,
    "exactly": lambda size: size == 2,
    "multiple_of": lambda size: size % 2 == 0,
}


@pytest.mark.parametrize("condition", CONDITIONS)
@given(hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_only_groups_of_such_a_size_are_active(condition: str, hosts: list[str]) -> None:
    members = tuple(
        Member(rank=rank, active=rank, keys={"rack": host}) for rank, host in enumerate(hosts)
    )
    assigned = only_groups("rack", **{condition: 2})(members)
    sizes = Counter(hosts)
    found = [member.active is not None for member in assigned]
    assert found == [CONDITIONS[condition](sizes[host]) for host in hosts]


def test_only_whole_nodes_are_active() -> None:
    assign = compose(only_groups("host", exactly=2), fill_gaps)
    assert active(assign_ranks(world(0, 1, 2, 3, 4), assign)) == [0, 1, 2, 3, None]


def test_members_in_reserve_are_not_counted_again() -> None:
    assign = compose(at_most(3), only_groups("host", exactly=2))
    assert active(assign_ranks(world(0, 1, 2, 3), assign)) == [0, 1, None, None]


# ---- those that are gone ----


def test_the_gone_are_those_that_were_active_and_are_not_there() -> None:
    before = assign_ranks(world(None, None, None, None), at_most(3))
    now = world(0, 2, None)
    gone = [m for m in with_gone(now, before) if m.gone]
    assert [(m.previous, m.host, m.active) for m in gone] == [(1, "node0", None)]


def test_the_gone_are_never_active() -> None:
    before = assign_ranks(world(None, None, None))
    assigned = assign_ranks(with_gone(world(0, 2), before), fill_gaps)
    assert [(m.rank, m.active, m.gone) for m in assigned] == [(0, 0, False), (1, 1, False)]


# ---- what is refused ----


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda: at_most(0),
        lambda: at_most(True),
        lambda: divisible_by(-2),
        lambda: divisible_by(1.5),  # type: ignore[arg-type]
        lambda: only_groups("host"),
        lambda: only_groups("host", exactly=0),
        lambda: compose(fill_gaps, "shift"),  # type: ignore[call-overload]
    ],
)
def test_arguments_that_make_no_sense_are_refused(nonsense: object) -> None:
    with pytest.raises(UsageError):
        nonsense()  # type: ignore[operator]


def test_a_key_that_a_member_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(UsageError, match=r"'rack': rank 0 on node0 .* has host, node_rank"):
        assign_ranks(world(None, None), only_groups("rack", at_least=1))


def first_as(number: int | None) -> Assignment:
    return lambda members: (msgspec.structs.replace(members[0], active=number), *members[1:])


@pytest.mark.parametrize(
    ("assign", "why"),
    [
        (lambda members: None, "NoneType"),
        (lambda members: members[1:], "each member"),
        (lambda members: (*members, members[0]), "each member"),
        (first_as(1), "not 0 to 2"),
        (first_as(None), "not 0 to 1"),
        (compose(lambda members: None, shift), "NoneType"),  # type: ignore[list-item, arg-type, return-value]
    ],
)
def test_an_assignment_of_the_users_own_is_checked(assign: Assignment, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        assign_ranks(world(None, None, None), assign)


def test_nobody_active_ends_the_job_with_try_again() -> None:
    with pytest.raises(StopRestarting) as caught:
        assign_ranks(world(None, None), only_groups("host", exactly=8))
    assert caught.value.code == 75


def test_two_members_with_one_number_are_refused() -> None:
    with pytest.raises(UsageError, match="same number"):
        assign_ranks(world(1, 1))
