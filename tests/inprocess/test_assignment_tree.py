"""Assignment along a topology: examples, and exhaustive search on all that is small enough."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import StopRestarting, UsageError
from holdfast.inprocess.assignment import (
    Fill,
    Layer,
    Member,
    fill_gaps,
    shift,
    tree,
)
from holdfast.inprocess.assignment.members import (
    Members,
    assign_ranks,
    with_gone,
)

Matching: TypeAlias = dict[int, Member]
"""Gaps and the members that take them."""


def nodes(*sizes: int, rack_size: int = 2) -> Members:
    """The members of a first round: so many on each node, so many nodes in a rack."""
    return tuple(
        Member(
            rank=rank,
            host=f"node{node}",
            node_rank=node,
            local_rank=local,
            keys={"rack": f"rack{node // rack_size}"},
        )
        for rank, (node, local) in enumerate(
            (node, local) for node, size in enumerate(sizes) for local in range(size)
        )
    )


def without(before: Members, *lost: int, listed: bool = True) -> Members:
    """The members of the next round, when these ranks are gone."""
    living = [member for member in before if member.rank not in lost]
    now = tuple(
        msgspec.structs.replace(member, rank=rank, previous=member.active, active=None)
        for rank, member in enumerate(living)
    )
    return with_gone(now, before) if listed else now


def numbers_by_origin(before: Members, lost: set[int], after: Members) -> dict[int, int | None]:
    """Numbers after a loss, by the rank that the member had before it."""
    living = [member.rank for member in before if member.rank not in lost]
    return {rank: member.active for rank, member in zip(living, after, strict=True)}


# ---- examples ----


def test_the_first_round_is_filled_node_by_node_up_to_the_limits() -> None:
    assign = tree([Layer(most=4), Layer(key="host", most=3)])
    assert [m.active for m in assign_ranks(nodes(4, 4), assign)] == [
        0,
        1,
        2,
        None,
        3,
        None,
        None,
        None,
    ]


def test_numbers_are_contiguous_in_a_node_even_if_ranks_are_not() -> None:
    members = tuple(Member(rank=rank, host=host) for rank, host in enumerate("abab"))
    assert [m.active for m in assign_ranks(members, tree([Layer(key="host")]))] == [0, 2, 1, 3]


def test_a_reserve_on_the_same_node_goes_before_one_elsewhere() -> None:
    assign = tree([Layer(), Layer(key="host", most=2)])
    before = assign_ranks(nodes(3, 3), assign)
    after = assign_ranks(without(before, 3), assign)
    assert numbers_by_origin(before, {3}, after) == {0: 0, 1: 1, 2: None, 4: 3, 5: 2}


def test_a_reserve_in_the_same_rack_goes_before_one_elsewhere() -> None:
    layers = [Layer(most=6), Layer(key="rack"), Layer(key="host", most=2)]
    before = assign_ranks(nodes(2, 2, 2, 2), tree(layers))
    assert [m.active for m in before[6:]] == [None, None]
    after = assign_ranks(without(before, 4), tree(layers))
    assert numbers_by_origin(before, {4}, after)[6] == 4


def test_a_later_gap_keeps_the_reserve_of_its_own_node() -> None:
    """Gap by gap, the first would take the only reserve of the second one's node."""
    layers = [Layer(most=4), Layer(key="host", most=2)]
    before = assign_ranks(nodes(2, 3, 1), tree(layers))
    after = assign_ranks(without(before, 0, 2), tree(layers))
    assert numbers_by_origin(before, {0, 2}, after) == {1: 1, 3: 3, 4: 2, 5: 0}


def test_without_the_flag_no_member_takes_a_number_across_that_layer() -> None:
    layers = [Layer(fill=Fill.NONE, most=4), Layer(key="host")]
    before = assign_ranks(nodes(2, 2, 2), tree(layers))
    after = assign_ranks(without(before, 0), tree(layers))
    assert numbers_by_origin(before, {0}, after) == {1: 0, 2: 1, 3: 2, 4: 3, 5: None}


def test_a_node_with_too_few_ranks_is_left_out_and_a_whole_one_takes_its_numbers() -> None:
    layers = [Layer(most=4), Layer(key="host", least=2)]
    before = assign_ranks(nodes(2, 2, 2), tree(layers))
    after = assign_ranks(without(before, 1), tree(layers))
    assert numbers_by_origin(before, {1}, after) == {0: None, 2: 2, 3: 3, 4: 0, 5: 1}


def test_a_subtree_may_fall_below_its_minimum_because_an_inner_one_did() -> None:
    layers = [Layer(key="rack", least=3), Layer(key="host", least=2)]
    before = assign_ranks(nodes(2, 2, 2, 2), tree(layers))
    after = assign_ranks(without(before, 0), tree(layers))
    expected = {1: None, 2: None, 3: None, 4: 0, 5: 1, 6: 2, 7: 3}
    assert numbers_by_origin(before, {0}, after) == expected


def test_fewer_than_the_whole_needs_ends_the_job_with_try_again() -> None:
    with pytest.raises(StopRestarting) as caught:
        assign_ranks(nodes(2, 2), tree([Layer(least=5)]))
    assert caught.value.code == 75


def test_backfill_moves_only_the_highest_numbers_of_the_same_node() -> None:
    layers = [Layer(fill=Fill.NONE), Layer(key="host", fill=Fill.BACKFILL)]
    before = assign_ranks(nodes(4, 2), tree(layers))
    after = assign_ranks(without(before, 1), tree(layers))
    assert numbers_by_origin(before, {1}, after) == {0: 0, 2: 2, 3: 1, 4: 3, 5: 4}


def test_backfill_reaches_as_far_out_as_the_layers_have_it() -> None:
    layers = [Layer(fill=Fill.BACKFILL), Layer(key="host", fill=Fill.BACKFILL)]
    before = assign_ranks(nodes(4, 2), tree(layers))
    after = assign_ranks(without(before, 1), tree(layers))
    assert numbers_by_origin(before, {1}, after) == {0: 0, 2: 2, 3: 3, 4: 4, 5: 1}


def test_a_node_that_joins_is_numbered_after_all_others() -> None:
    before = assign_ranks(nodes(2, 2), tree([Layer(), Layer(key="host")]))
    joined = msgspec.structs.replace(nodes(2, 2, 2)[4], rank=4)
    after = assign_ranks((*without(before), joined), tree([Layer(), Layer(key="host")]))
    assert [m.active for m in after] == [0, 1, 2, 3, 4]


def test_a_gap_whose_holder_is_not_listed_is_filled_from_anywhere() -> None:
    layers = [Layer(most=4), Layer(key="host")]
    before = assign_ranks(nodes(2, 2, 2), tree(layers))
    after = assign_ranks(without(before, 0, listed=False), tree(layers))
    assert numbers_by_origin(before, {0}, after) == {1: 1, 2: 2, 3: 3, 4: 0, 5: None}


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda: tree([]),
        lambda: tree(["host"]),  # type: ignore[list-item]
        lambda: Layer(least=0),
        lambda: Layer(most=0),
        lambda: Layer(least=4, most=2),
        lambda: Layer(fill=1),  # type: ignore[arg-type]
    ],
)
def test_layers_that_make_no_sense_are_refused(nonsense: object) -> None:
    with pytest.raises(UsageError):
        nonsense()  # type: ignore[operator]


# ---- small worlds, exhaustively ----

SEEDS = st.integers(0, 2**32)
FLAGS = (Fill.NONE, Fill.RESERVE, Fill.BACKFILL, Fill.RESERVE | Fill.BACKFILL)


@st.composite
def layers_of(draw: st.DrawFn, flags: tuple[Fill, ...]) -> list[Layer]:
    """Up to three layers; limits are rare enough that members are left to choose from."""
    chance = random.Random(draw(SEEDS))

    def layer(key: str | None) -> Layer:
        least = chance.choice([1, 1, 2])
        most = chance.choice([None, None, *range(least, 6)])
        return Layer(key=key, least=least, most=most, fill=chance.choice(flags))

    return [layer(None), layer("rack"), layer("host")][chance.choice([0, 0, 1, 2]) :]


@st.composite
def losses(draw: st.DrawFn) -> Members:
    """A world in which some were active, some of those are gone and some newcomers are there.

    Drawn evenly by a seed: hypothesis prefers small cases, in which hardly anything is lost.
    """
    chance = random.Random(draw(SEEDS))
    members = nodes(*(chance.randint(1, 3) for _ in range(chance.randint(1, 4))))[:7]
    were = [member.rank for member in members if chance.random() < 0.7]
    chance.shuffle(were)
    had = {rank: number for number, rank in enumerate(were)}
    before = tuple(msgspec.structs.replace(m, active=had.get(m.rank)) for m in members)
    lost = [m.rank for m in members[1:] if chance.random() < 0.4]
    return without(before, *lost)


def path(member: Member, layers: list[Layer]) -> tuple[str, ...]:
    groups = {None: "", "rack": member.keys["rack"], "host": member.host}
    return tuple(groups[layer.key] for layer in layers)  # type: ignore[index]


def fitting(members: Members, layers: list[Layer]) -> list[Member]:
    """The living members of subtrees that have enough of them."""
    living = [member for member in members if not member.gone]
    for depth in range(len(layers), 0, -1):
        sizes = Counter(path(m, layers)[:depth] for m in living)
        living = [m for m in living if sizes[path(m, layers)[:depth]] >= layers[depth - 1].least]
    return living


def within_limits(some: tuple[Member, ...], layers: list[Layer]) -> bool:
    counts = Counter(path(m, layers)[:depth] for m in some for depth in range(1, len(layers) + 1))
    return all(
        (most := layers[len(subtree) - 1].most) is None or count <= most
        for subtree, count in counts.items()
    )


def selections(members: Members, layers: list[Layer]) -> list[tuple[Member, ...]]:
    """All that may be active: most members, and of these most of those that were active."""
    usable = fitting(members, layers)
    allowed = [
        some
        for size in range(len(usable) + 1)
        for some in itertools.combinations(usable, size)
        if within_limits(some, layers)
    ]

    def rating(some: tuple[Member, ...]) -> tuple[int, int]:
        return (len(some), sum(m.previous is not None for m in some))

    best = max(map(rating, allowed))
    return [some for some in allowed if rating(some) == best]


@settings(max_examples=300)
@given(members=losses(), layers=layers_of(FLAGS))
def test_the_active_are_as_many_as_limits_allow_and_most_were_active_before(
    members: Members, layers: list[Layer]
) -> None:
    best = {frozenset(m.rank for m in some) for some in selections(members, layers)}
    try:
        assigned = assign_ranks(members, tree(layers))
    except StopRestarting:
        assert best == {frozenset()}
    else:
        assert frozenset(m.rank for m in assigned if m.active is not None) in best


def matchings(gaps: list[Member], takers: list[Member]) -> Iterator[Matching]:
    """All ways to give gaps to members, every gap to one or to nobody."""
    for count in range(min(len(gaps), len(takers)) + 1):
        for some in itertools.combinations(gaps, count):
            for chosen in itertools.permutations(takers, count):
                yield {g.previous: m for g, m in zip(some, chosen, strict=True)}  # type: ignore[misc]


def fills_by_depth(matching: Matching, gaps: list[Member], layers: list[Layer]) -> list[int]:
    """How many gaps are filled within the innermost subtree, the next one, ...; [-1] if not allowed."""
    flagged = 0
    while flagged < len(layers) and Fill.RESERVE in layers[-1 - flagged].fill:
        flagged += 1
    filled = [0] * len(layers)
    places = {gap.previous: path(gap, layers) for gap in gaps}
    for number, member in matching.items():
        mine, its = path(member, layers), places[number]
        common = sum(1 for n in range(1, len(layers) + 1) if mine[:n] == its[:n])
        out = len(layers) - common
        if out >= flagged:
            return [-1]
        filled[out] += 1
    return filled


def closed_up(
    active: tuple[Member, ...], matching: Matching, layers: list[Layer]
) -> dict[int, int]:
    """Numbers by rank after the rest was appended and gaps were shifted away."""
    held = {m.previous: m for m in active if m.previous is not None} | matching
    taken = {member.rank for member in held.values()}
    order = [held[number] for number in sorted(held)]
    rest = [m for m in active if m.rank not in taken]
    order += sorted(rest, key=lambda m: (m.keys["rack"], m.node_rank, m.local_rank))
    return {member.rank: number for number, member in enumerate(order)}


@settings(max_examples=300)
@given(members=losses(), layers=layers_of((Fill.NONE, Fill.RESERVE, Fill.RESERVE)))
def test_no_other_choice_fills_more_gaps_from_nearer_reserves(
    members: Members, layers: list[Layer]
) -> None:
    best, explained = [-1], [-1]
    try:
        assigned = assign_ranks(members, tree(layers))
    except StopRestarting:
        return
    result = {m.rank: m.active for m in assigned if m.active is not None}
    for active in selections(members, layers):
        ranks = {m.rank for m in active}
        lost = [m for m in members if m.previous is not None and (m.gone or m.rank not in ranks)]
        takers = [m for m in active if m.previous is None]
        for matching in matchings(lost, takers):
            filled = fills_by_depth(matching, lost, layers)
            best = max(best, filled)
            if filled > explained and closed_up(active, matching, layers) == result:
                explained = filled
    assert explained == best


def backfilled(members: Members, layers: list[Layer]) -> dict[int, int]:
    """Numbers by the definition: in each subtree the lowest numbers, with the fewest changes."""
    flagged = 0
    while flagged < len(layers) and Fill.BACKFILL in layers[-1 - flagged].fill:
        flagged += 1
    depth = len(layers) + 1 - flagged
    held: dict[int, int] = {}
    for subtree in {path(m, layers)[:depth] for m in members}:
        inside = [m for m in members if path(m, layers)[:depth] == subtree]
        living = sorted((m for m in inside if not m.gone), key=lambda m: m.previous or 0)
        lowest = sorted(m.previous for m in inside if m.previous is not None)
        ways = itertools.permutations(lowest[: len(living)])
        chosen = min(
            ways,
            key=lambda way: (sum(m.previous != n for m, n in zip(living, way, strict=True)), way),
        )
        held |= {m.rank: number for m, number in zip(living, chosen, strict=True)}
    return {rank: place for place, rank in enumerate(sorted(held, key=held.__getitem__))}


@settings(max_examples=300)
@given(members=losses(), layers=layers_of((Fill.NONE, Fill.BACKFILL, Fill.BACKFILL)))
def test_backfilling_changes_the_fewest_numbers_of_each_subtree(
    members: Members, layers: list[Layer]
) -> None:
    if Fill.BACKFILL not in layers[-1].fill:
        layers[-1] = msgspec.structs.replace(layers[-1], fill=Fill.BACKFILL)
    layers = [msgspec.structs.replace(layer, least=1, most=None) for layer in layers]
    survivors = [m for m in members if m.previous is not None and not m.gone]
    if survivors:
        again = tuple(
            msgspec.structs.replace(m, rank=rank) for rank, m in enumerate(survivors)
        ) + tuple(m for m in members if m.gone)
        assigned = assign_ranks(again, tree(layers))
        assert {m.rank: m.active for m in assigned} == backfilled(again, layers)


@given(members=losses())
def test_a_tree_without_limits_and_flags_shifts(members: Members) -> None:
    assigned = assign_ranks(members, tree([Layer(fill=Fill.NONE)]))
    assert assigned == assign_ranks(members, shift)


@given(members=losses())
def test_a_tree_of_one_layer_with_both_flags_keeps_the_numbers_that_filling_gaps_keeps(
    members: Members,
) -> None:
    both = tree([Layer(fill=Fill.RESERVE | Fill.BACKFILL)])

    def kept(assigned: Members) -> set[int]:
        return {m.rank for m in assigned if m.previous is not None and m.previous == m.active}

    assert kept(assign_ranks(members, both)) >= kept(assign_ranks(members, fill_gaps))


@settings(max_examples=200)
@given(members=losses(), layers=layers_of(FLAGS), data=st.data())
def test_the_order_in_which_members_are_given_does_not_matter(
    members: Members, layers: list[Layer], data: st.DataObject
) -> None:
    prepared = tuple(msgspec.structs.replace(m, active=None if m.gone else m.rank) for m in members)
    shuffled = tuple(data.draw(st.permutations(prepared)))
    assert tree(layers)(shuffled) == tree(layers)(prepared)


def test_sixteen_times_as_many_ranks_take_about_sixteen_times_as_long() -> None:
    layers = [
        Layer(most=15_000, fill=Fill.RESERVE | Fill.BACKFILL),
        Layer(key="rack", fill=Fill.RESERVE | Fill.BACKFILL),
        Layer(key="host", least=4, most=8, fill=Fill.RESERVE | Fill.BACKFILL),
    ]

    def assigned_s(hosts: int) -> float:
        """CPU time to assign ranks when one of sixteen is lost."""
        before = assign_ranks(nodes(*[8] * hosts, rack_size=16), tree(layers))
        members = without(before, *random.Random(7).sample(range(8 * hosts), hosts // 2))
        began = time.thread_time()
        assign_ranks(members, tree(layers))
        return time.thread_time() - began

    few, many = (min(assigned_s(hosts) for _ in range(3)) for hosts in (128, 2048))
    assert many < 4 * 16 * few
