"""Who is in the world.

A round gathers nodes until it may close, then it is frozen: ranks, addresses and number never change
again, and a node that is not in it waits for the next. Closing is decided when a node joins, gets
ready or leaves, or when a deadline passes, never because somebody asks.

A node is in exactly one of three places:

    waiting    it has no workers and wants a place
    busy       it was in the last round and is still stopping its workers
    placed     it is in the frozen world

A round closes when as many nodes wait as the job may have, or when at least the minimum waits and
nobody else can be expected: no node is busy, and the grace for newcomers is over. There is such a
grace only before the first round, when nodes are still being started one after the other; later, a
node that is not there is not waited for. The grace is learnt from the gaps between the joins seen so
far. Survivors keep their order, so that ranks move as little as possible.
"""

from __future__ import annotations

from msgspec import Struct, field

from holdfast.messages.records import NodeSpec, Part, Place, Terms, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time

NEWCOMER_FACTOR = 3.0
NEWCOMER_FLOOR_S: Seconds = 0.5


class Candidate(Struct):
    """A node that wants a place, and the order in which it would get one."""

    spec: NodeSpec
    store_port: int
    seat: int
    """Survivors keep the seat they had; newcomers get the next free number."""
    round: RoundNumber = RoundNumber(0)
    """The last round it was placed in."""


class Membership(Struct):
    min_nodes: int
    max_nodes: int
    node_unit: int
    round: RoundNumber = RoundNumber(0)
    world: World | None = None
    waiting: dict[NodeId, Candidate] = field(default_factory=dict)
    busy: dict[NodeId, Candidate] = field(default_factory=dict)
    placed: dict[NodeId, Candidate] = field(default_factory=dict)
    next_seat: int = 0
    last_join_at: Time | None = None
    longest_gap_s: Seconds = 0.0
    closes_at: Time | None = None

    def nodes(self) -> list[NodeId]:
        return [*self.placed, *self.busy, *self.waiting]


def gathering(terms: Terms) -> Membership:
    """A job's membership before anybody came."""
    return Membership(terms.min_nodes, terms.max_nodes, terms.node_unit)


def join(m: Membership, node: NodeId, spec: NodeSpec, store_port: int, now: Time) -> None:
    """Admit a node. To join twice is no harm; a placed node that joins again lost its workers."""
    if m.last_join_at is not None:
        m.longest_gap_s = max(m.longest_gap_s, now - m.last_join_at)
    m.last_join_at = now
    known = m.waiting.pop(node, None) or m.busy.pop(node, None) or m.placed.pop(node, None)
    if known is not None:
        seat = known.seat
    elif spec.node_rank is not None:
        seat = spec.node_rank
        m.next_seat = max(m.next_seat, seat + 1)
    else:
        seat = m.next_seat
        m.next_seat += 1
    m.waiting[node] = Candidate(spec, store_port, seat)


def leave(m: Membership, node: NodeId) -> bool:
    """Forget a node; True when the world in force has lost a member by that."""
    m.waiting.pop(node, None)
    m.busy.pop(node, None)
    return m.placed.pop(node, None) is not None


def dissolve(m: Membership) -> None:
    """Give up the world in force: its nodes are busy until they say that they are ready."""
    m.busy.update(m.placed)
    m.placed.clear()
    m.world = None


def ready(m: Membership, node: NodeId, round: RoundNumber, store_port: int) -> bool:
    """A node stopped its workers of that round. False when that is not what it was asked for."""
    candidate = m.busy.get(node)
    if candidate is None or round != candidate.round:
        return False
    del m.busy[node]
    candidate.store_port = store_port
    m.waiting[node] = candidate
    return True


def close(m: Membership, now: Time) -> World | None:
    """Freeze the next round if it may be, else note until when it waits for more."""
    if m.world is not None:
        return None
    count = _closing_count(m, now)
    if count == 0:
        return None
    m.closes_at = None
    m.round = RoundNumber(m.round + 1)
    chosen = sorted(m.waiting, key=lambda node: m.waiting[node].seat)[:count]
    m.placed = {node: m.waiting.pop(node) for node in chosen}
    m.world = _freeze(m, now)
    return m.world


def _closing_count(m: Membership, now: Time) -> int:
    """How many nodes the round would close with now; 0 when it should wait."""
    most = m.max_nodes - m.max_nodes % m.node_unit
    if len(m.waiting) >= most:
        return most
    legal = len(m.waiting) - len(m.waiting) % m.node_unit
    if legal < max(m.min_nodes, 1) or m.busy:
        m.closes_at = None
        return 0
    if m.round == 0 and m.last_join_at is not None:
        grace = max(NEWCOMER_FLOOR_S, NEWCOMER_FACTOR * m.longest_gap_s)
        m.closes_at = Time(m.last_join_at + grace)
        if now < m.closes_at:
            return 0
    return legal


def _freeze(m: Membership, now: Time) -> World:
    places = []
    rank = 0
    for group_rank, (node, candidate) in enumerate(m.placed.items()):
        candidate.round = m.round
        slots = candidate.spec.slots
        places.append(Place(node=node, group_rank=group_rank, first_rank=Rank(rank), slots=slots))
        rank += slots
    host = m.placed[places[0].node]
    return World(
        round=m.round,
        places=tuple(places),
        size=rank,
        store_address=host.spec.address,
        store_port=host.store_port,
        frozen_at=now,
    )


def part_of(world: World, place: Place, restarts: int, max_restarts: int) -> Part:
    """What the node at that place is told: its own part, never the whole world."""
    return Part(
        round=world.round,
        first_rank=place.first_rank,
        slots=place.slots,
        group_rank=place.group_rank,
        group_world_size=len(world.places),
        world_size=world.size,
        store_address=world.store_address,
        store_port=world.store_port,
        restarts=restarts,
        max_restarts=max_restarts,
    )


def validate(m: Membership) -> None:
    """Re-check every invariant; tests and the simulator call it after each event."""
    places = [set(m.waiting), set(m.busy), set(m.placed)]
    assert sum(map(len, places)) == len(set().union(*places)), "a node is in two places"
    if m.world is None:
        assert not m.placed, "placed without a world"
        return
    w = m.world
    assert w.round == m.round, "the world in force is not the newest"
    assert 0 < len(w.places) <= m.max_nodes, "an illegal number of nodes"
    assert len(w.places) % m.node_unit == 0, "not a multiple of the node unit"
    assert len(w.places) >= m.min_nodes, "below the minimum"
    firsts = [p.first_rank for p in w.places]
    assert firsts == [sum(p.slots for p in w.places[:i]) for i in range(len(firsts))], (
        "gap in ranks"
    )
    assert set(m.placed) <= {p.node for p in w.places}, "placed outside the world"
