"""Who is in the world: the promises, and the pitfalls of earlier systems that we must not have."""

from __future__ import annotations

from typing import Any

from driver import spec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from holdfast.core.membership import rounds
from holdfast.core.membership.rounds import Membership
from holdfast.messages.records import Terms, World
from holdfast.messages.units import NodeId, RoundNumber, Time

NOON = 1000.0


frozen: dict[int, World] = {}
"""The newest world of each membership."""


def validate(m: Membership) -> None:
    rounds.validate(m, frozen[id(m)] if m.placed else None)


def waiting(count: int, **terms: Any) -> Membership:
    m = Membership(Terms(**terms))
    for i in range(count):
        join(m, f"n{i}", NOON)
    return m


def join(m: Membership, node: str, now: float = NOON, slots: int = 2, **more: Any) -> None:
    rounds.join(m, NodeId(node), spec(slots, **more), 1000 + len(m.nodes()), Time(now))
    validate(m)


def close(m: Membership, now: float = NOON) -> World | None:
    world = rounds.close(m, Time(now))
    if world is not None:
        frozen[id(m)] = world
    validate(m)
    return world


def closed(m: Membership, now: float = NOON) -> World:
    world = close(m, now)
    assert world is not None
    return world


def ready(m: Membership, node: str, round: int, port: int = 5) -> bool:
    answer = rounds.ready(m, NodeId(node), RoundNumber(round), port)
    validate(m)
    return answer


def names(world: World) -> list[str]:
    return [place.node for place in world.places]


# ---- closing ----


def test_a_world_at_its_maximum_closes_at_once() -> None:
    assert closed(waiting(3, min_nodes=3, max_nodes=3)).size == 6


def test_below_the_minimum_nothing_closes() -> None:
    m = waiting(2, min_nodes=3, max_nodes=4)
    assert close(m, NOON + 1e6) is None
    assert m.closes_at is None


def test_between_minimum_and_maximum_the_first_round_waits_for_more_then_closes_once() -> None:
    m = waiting(2, min_nodes=1, max_nodes=4)
    assert close(m) is None
    assert m.closes_at is not None
    assert close(m, m.closes_at - 0.001) is None
    assert closed(m, m.closes_at).round == 1
    assert close(m, NOON + 100) is None


def test_the_wait_for_newcomers_is_learnt_from_the_gaps_between_them() -> None:
    m = waiting(1, min_nodes=1, max_nodes=4)
    join(m, "late", NOON + 10)
    close(m, NOON + 10)
    assert m.closes_at == NOON + 10 + rounds.NEWCOMER_FACTOR * 10


def test_a_given_last_call_is_kept() -> None:
    m = waiting(1, min_nodes=1, max_nodes=4, last_call_s=7.0)
    close(m)
    assert m.closes_at == NOON + 7


def test_later_rounds_do_not_wait_for_newcomers() -> None:
    m = waiting(2, min_nodes=1, max_nodes=3)
    closed(m, NOON + 60)
    rounds.dissolve(m, Time(NOON))
    rounds.leave(m, NodeId("n1"))
    assert ready(m, "n0", 1)
    assert names(closed(m, NOON + 61)) == ["n0"]


def test_a_round_waits_for_its_busy_nodes() -> None:
    m = waiting(2, min_nodes=1, max_nodes=2)
    closed(m)
    rounds.dissolve(m, Time(NOON))
    assert ready(m, "n0", 1)
    assert close(m) is None
    assert ready(m, "n1", 1)
    assert closed(m).round == 2


def test_busy_nodes_are_waited_for_although_spares_could_fill_the_world() -> None:
    m = waiting(4, min_nodes=2, max_nodes=2)
    first = closed(m)
    rounds.dissolve(m, Time(NOON))
    assert rounds.close(m, Time(1.0)) is None
    for place in first.places:
        assert rounds.ready(m, place.node, first.round, store_port=1)
    assert names(closed(m)) == ["n0", "n1"]


# ---- what a frozen world is ----


def test_ranks_are_prefix_sums_of_the_slots() -> None:
    m = Membership(Terms(min_nodes=3, max_nodes=3))
    for i, slots in enumerate((1, 4, 2)):
        join(m, f"n{i}", slots=slots)
    world = closed(m)
    assert [(p.first_rank, p.slots) for p in world.places] == [(0, 1), (1, 4), (5, 2)]
    assert world.size == 7


def test_ranks_are_counted_by_role_too() -> None:
    m = Membership(Terms(min_nodes=4, max_nodes=4))
    for i, (slots, role) in enumerate(((2, "actor"), (1, "critic"), (3, "actor"), (2, "critic"))):
        join(m, f"n{i}", slots=slots, role=role)
    world = closed(m)
    assert [(p.first_role_rank, p.role_size) for p in world.places] == [
        (0, 5),
        (0, 3),
        (2, 5),
        (1, 3),
    ]
    part = rounds.part_of(world, world.places[2], 0, 0)
    assert (part.first_rank, part.first_role_rank, part.role_size) == (3, 2, 5)


def test_the_store_has_the_name_that_the_user_gave_its_node() -> None:
    m = Membership(Terms(min_nodes=2, max_nodes=2))
    rounds.join(m, NodeId("a"), spec(node_rank=0, store_name="node0"), 111, Time(NOON))
    rounds.join(m, NodeId("b"), spec(node_rank=1), 222, Time(NOON))
    assert closed(m).store_address == "node0"


def test_the_store_is_at_the_node_of_rank_0() -> None:
    m = Membership(Terms(min_nodes=2, max_nodes=2))
    rounds.join(m, NodeId("a"), spec(node_rank=1), 111, Time(NOON))
    rounds.join(m, NodeId("b"), spec(node_rank=0), 222, Time(NOON))
    assert closed(m).store_port == 222


def test_a_node_is_told_its_own_part_only() -> None:
    world = closed(waiting(2, min_nodes=2, max_nodes=2))
    part = rounds.part_of(world, world.places[1], 3, 5)
    assert (part.first_rank, part.slots, part.world_size, part.group_rank) == (2, 2, 4, 1)
    assert (part.restarts, part.max_restarts, part.group_world_size) == (3, 5, 2)


def test_survivors_keep_their_order_and_a_spare_takes_the_empty_place() -> None:
    m = waiting(4, min_nodes=3, max_nodes=3)
    closed(m)
    rounds.leave(m, NodeId("n1"))
    rounds.dissolve(m, Time(NOON))
    ready(m, "n2", 1)
    ready(m, "n0", 1)
    world = closed(m)
    assert names(world) == ["n0", "n3", "n2"]
    assert world.size == 6


def test_a_node_rank_decides_the_first_order() -> None:
    m = Membership(Terms(min_nodes=3, max_nodes=3))
    for node, rank in (("a", 2), ("b", 0), ("c", 1)):
        join(m, node, node_rank=rank)
    assert names(closed(m)) == ["b", "c", "a"]


def test_the_nodes_of_a_switch_are_side_by_side_and_rank_0s_switch_is_first() -> None:
    m = Membership(Terms(min_nodes=4, max_nodes=4))
    for node, switch in (("a", "s1"), ("b", "s2"), ("c", "s1"), ("d", "s2")):
        join(m, node, switch=switch)
    assert names(closed(m)) == ["a", "c", "b", "d"]


# ---- pitfalls of earlier systems ----


def test_a_unit_that_floors_to_nothing_never_closes_an_empty_world() -> None:
    m = waiting(3, min_nodes=1, max_nodes=8, node_unit=4)
    for later in range(10):
        assert close(m, NOON + later * 100) is None
    assert m.round == 0


def test_a_unit_larger_than_the_maximum_never_closes_an_empty_world() -> None:
    m = waiting(5, min_nodes=1, max_nodes=2, node_unit=4)
    assert close(m, NOON + 1000) is None
    assert m.round == 0


def test_a_unit_that_leaves_less_than_the_minimum_closes_nothing() -> None:
    m = waiting(3, min_nodes=3, max_nodes=3, node_unit=2)
    assert close(m, NOON + 1000) is None


def test_what_is_over_a_multiple_of_the_unit_waits() -> None:
    m = waiting(5, min_nodes=2, max_nodes=8, node_unit=2)
    close(m)
    assert len(closed(m, NOON + 100).places) == 4
    assert len(m.waiting) == 1


def test_a_late_joiner_never_changes_a_frozen_world() -> None:
    m = waiting(2, min_nodes=2, max_nodes=2)
    world = closed(m)
    join(m, "late")
    assert close(m) is None
    assert list(m.placed) == [place.node for place in world.places]
    assert list(m.waiting) == ["late"]


def test_more_nodes_than_the_maximum_still_close_a_world_of_the_maximum() -> None:
    m = waiting(7, min_nodes=3, max_nodes=3)
    assert len(closed(m).places) == 3
    assert len(m.waiting) == 4


def test_to_join_twice_is_to_join_once() -> None:
    m = waiting(1, min_nodes=2, max_nodes=2)
    join(m, "n0")
    assert m.count() == 1
    assert close(m) is None
    join(m, "n1")
    assert names(closed(m)) == ["n0", "n1"]


def test_joining_again_and_again_does_not_put_off_the_first_round() -> None:
    m = waiting(1, min_nodes=1, max_nodes=2)
    close(m)
    due = m.closes_at
    assert due is not None
    join(m, "n0", NOON + 0.4)
    assert close(m, due) is not None


def test_a_member_that_joins_again_waits_and_keeps_its_place() -> None:
    m = waiting(2, min_nodes=2, max_nodes=2)
    closed(m)
    rounds.leave(m, NodeId("n0"))
    rounds.dissolve(m, Time(NOON))
    join(m, "n0")
    join(m, "n1")
    assert m.count() == 2
    assert sorted(names(closed(m))) == ["n0", "n1"]


def test_a_replacement_that_joins_while_the_old_node_is_known_outlives_it() -> None:
    m = waiting(1, min_nodes=2, max_nodes=2)
    join(m, "old", node_rank=1)
    closed(m)
    join(m, "new", node_rank=1)
    rounds.leave(m, NodeId("old"))
    assert "new" in m.waiting


def test_a_store_port_is_of_the_round_it_serves() -> None:
    m = waiting(1, min_nodes=1, max_nodes=1)
    first = closed(m).store_port
    rounds.dissolve(m, Time(NOON))
    assert ready(m, "n0", 1, port=4321)
    assert closed(m).store_port == 4321 != first


def test_ready_for_another_round_is_refused() -> None:
    m = waiting(1, min_nodes=1, max_nodes=1)
    closed(m)
    rounds.dissolve(m, Time(NOON))
    assert not ready(m, "n0", 0)
    assert not ready(m, "n0", 2)
    assert not ready(m, "stranger", 1)
    assert ready(m, "n0", 1)
    assert not ready(m, "n0", 1)


# ---- any sequence ----


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 5), st.integers(0, 20))
def test_a_world_is_always_a_legal_multiple(lowest: int, more: int, unit: int, count: int) -> None:
    m = waiting(count, min_nodes=lowest, max_nodes=lowest + more, node_unit=unit)
    world = close(m) or close(m, NOON + 1e6)
    legal = [n for n in range(lowest, min(count, lowest + more) + 1) if n % unit == 0]
    assert (world is not None) == bool(legal)
    if world is not None:
        assert len(world.places) == max(legal)


labels = st.tuples(st.sampled_from("xyz"), st.sampled_from("stu"), st.sampled_from("bc"))
"""Domain, switch and block of a node: a domain may span switches, and a switch domains."""


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(labels, max_size=14),
    st.lists(st.tuples(st.sets(st.integers(0, 13)), st.lists(labels, max_size=4)), max_size=3),
)
def test_segments_are_complete_and_side_by_side(
    segment: int,
    groups: int,
    first: list[tuple[str, ...]],
    later: list[tuple[set[int], list[tuple[str, ...]]]],
) -> None:
    """In the first round, and after any nodes were lost and any others came."""
    m = Membership(Terms(min_nodes=segment, max_nodes=segment * groups, segment=segment))
    domains: dict[str, str] = {}
    for lost, joining in [(set[int](), first), *later]:
        rounds.dissolve(m, Time(NOON))
        for node in list(m.busy):
            ready(m, node, m.round)
        for node in [f"n{i}" for i in lost]:
            rounds.leave(m, NodeId(node))
        for domain, switch, block in joining:
            node = f"n{len(domains)}"
            domains[node] = domain
            join(m, node, domain=domain, switch=switch, block=block)
        world = close(m) or close(m, NOON + 1e6)
        order = names(world) if world is not None else []
        for i in range(0, len(order), segment):
            assert len({domains[node] for node in order[i : i + segment]}) == 1


def segments_of_two(*nodes: tuple[str, str, str], most: int = 4) -> Membership:
    m = Membership(Terms(min_nodes=2, max_nodes=most, segment=2))
    for node, domain, switch in nodes:
        join(m, node, domain=domain, switch=switch)
    return m


def test_a_domain_that_spans_switches_keeps_its_segments_side_by_side() -> None:
    m = segments_of_two(("a", "x", "s"), ("b", "y", "s"), ("c", "x", "t"), ("d", "y", "t"))
    assert names(closed(m)) == ["a", "c", "b", "d"]


def test_segments_of_a_switch_are_side_by_side() -> None:
    m = segments_of_two(
        *(("a", "x", "s"), ("b", "y", "t"), ("c", "z", "s")),
        *(("d", "x", "s"), ("e", "y", "t"), ("f", "z", "s")),
        most=6,
    )
    assert names(closed(m)) == ["a", "d", "c", "f", "b", "e"]


def after_losing(m: Membership, lost: str) -> list[str]:
    """The next world, without that node."""
    rounds.dissolve(m, Time(NOON))
    rounds.leave(m, NodeId(lost))
    for node in list(m.busy):
        assert ready(m, node, m.round)
    return names(closed(m, NOON + 60))


def test_survivors_keep_their_seats_in_segments_too() -> None:
    m = segments_of_two(*((node, "x", "s") for node in "abcd"))
    assert names(closed(m)) == ["a", "b", "c", "d"]
    join(m, "e", domain="x", switch="t")
    assert after_losing(m, "a") == ["e", "b", "c", "d"]


def test_a_segment_that_cannot_be_filled_up_closes_a_gap() -> None:
    m = segments_of_two(("a", "x", "s"), ("b", "x", "s"), ("c", "y", "s"), ("d", "y", "s"))
    closed(m)
    assert after_losing(m, "a") == ["c", "d"]
    join(m, "e", domain="x", switch="s")
    rounds.dissolve(m, Time(NOON))
    for node in ("c", "d"):
        assert ready(m, node, m.round)
    assert names(closed(m)) == ["c", "d", "e", "b"], "b had the second seat of a segment"


def test_survivors_keep_their_seats_in_a_domain_without_segments() -> None:
    m = Membership(Terms(min_nodes=2, max_nodes=3))
    for node, switch in (("a", "s"), ("b", "t"), ("c", "u")):
        join(m, node, domain="x", switch=switch)
    assert names(closed(m)) == ["a", "b", "c"]
    join(m, "d", domain="x", switch="u")
    assert after_losing(m, "a") == ["d", "b", "c"]


def test_a_node_of_an_older_round_does_not_take_its_seat_back() -> None:
    m = waiting(3, min_nodes=2, max_nodes=2)
    assert names(closed(m)) == ["n0", "n1"]
    rounds.dissolve(m, Time(NOON))
    assert ready(m, "n0", 1)
    m.patient_until = None
    assert close(m) is None, "its workers may still run"
    m.busy[NodeId("n1")].killed = True
    assert names(closed(m)) == ["n0", "n2"], "n1 took too long to stop"
    assert ready(m, "n1", 1)
    rounds.dissolve(m, Time(NOON))
    assert ready(m, "n0", 2)
    assert ready(m, "n2", 2)
    assert names(closed(m)) == ["n0", "n2"]


class Churn(RuleBasedStateMachine):
    """Fifty nodes that come, go, get ready and join again in any order."""

    node = Bundle("node")

    @initialize(lowest=st.integers(1, 5), more=st.integers(0, 5), unit=st.integers(1, 3))
    def open(self, lowest: int, more: int, unit: int) -> None:
        self.m = Membership(Terms(min_nodes=lowest, max_nodes=lowest + more, node_unit=unit))
        self.now = NOON
        self.worlds: dict[int, World] = {}

    @rule(target=node, number=st.integers(0, 49), slots=st.integers(1, 8))
    def join(self, number: int, slots: int) -> str:
        name = f"n{number}"
        if name not in self.m.placed:
            join(self.m, name, self.now, slots)
        return name

    @rule(name=node)
    def leave(self, name: str) -> None:
        if rounds.leave(self.m, NodeId(name)):
            rounds.dissolve(self.m, Time(self.now))

    @rule(name=node, back=st.integers(0, 2))
    def get_ready(self, name: str, back: int) -> None:
        held = self.m.busy.get(NodeId(name))
        accepted = ready(self.m, name, self.m.round - back)
        assert accepted == (held is not None and held.round == self.m.round - back)

    @rule()
    def break_up(self) -> None:
        if self.m.placed:
            rounds.dissolve(self.m, Time(self.now))

    @rule(later=st.sampled_from([0.0, 0.1, 1.0, 1000.0]))
    def close(self, later: float) -> None:
        self.now += later
        before = self.m.round
        world = close(self.m, self.now)
        assert self.m.round == before + (world is not None)
        if world is not None:
            self.worlds[world.round] = world

    @invariant()
    def frozen_and_contiguous(self) -> None:
        if not hasattr(self, "m"):
            return
        validate(self.m)
        if self.m.placed:
            world = self.worlds[self.m.round]
            ranks = [
                rank
                for place in world.places
                for rank in range(place.first_rank, place.first_rank + place.slots)
            ]
            assert ranks == list(range(world.size))


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
