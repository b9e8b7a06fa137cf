"""When a round closes, and what is frozen then.

A round gathers nodes until it may close, then it is frozen: ranks, addresses and number never change
again, and a node that is not in it waits for the next. Closing is decided when a node joins, gets
ready or leaves, or when a deadline passes, never because somebody asks.

A member is in exactly one of three places:

    waiting    it has no workers and wants a place; beyond the maximum such a node is a spare
    busy       it was in the last round and is still stopping its workers
    placed     it is in the frozen world

or it was one, and is leaving: told to finish, while it stops its workers.

A round does not close while a node is busy: it will be ready in a moment, and it has a seat. When that
takes far too long its workers are killed, and spares go on without a node whose workers are not gone
even then. Then it closes when as many nodes wait as
the job may have, or when at least the minimum waits and the grace for newcomers is over. There is
such a grace only before the first round, when nodes are still being started one after the other;
later, a node that is not there is not waited for. The grace is learnt from the gaps between the joins
seen so far. A member without a stream gets no place: the round waits until it is back or given up,
unless it is complete without that one. `membership.seating` decides who gets the places, and in which
order.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core.membership import seating
from holdfast.core.membership.state import Membership
from holdfast.core.view import Candidate
from holdfast.messages.records import NodeSpec, Part, Place, World
from holdfast.messages.units import NodeId, Rank, RoundNumber, Seconds, Time

NEWCOMER_FACTOR = 3.0
NEWCOMER_FLOOR_S: Seconds = 0.5


def join(m: Membership, node: NodeId, spec: NodeSpec, store_port: int, now: Time) -> None:
    """Admit a node. To join twice is no harm; a placed node that joins again lost its workers."""
    known = m.waiting.pop(node, None) or m.busy.pop(node, None) or m.placed.pop(node, None)
    m.joins += 1
    candidate = Candidate(spec, store_port, m.joins)
    if known is not None:
        candidate.seat, candidate.joined = known.seat, known.joined
    else:
        if m.last_join_at is not None:
            m.longest_gap_s = max(m.longest_gap_s, now - m.last_join_at)
        m.last_join_at = now
    m.waiting[node] = candidate


def leave(m: Membership, node: NodeId) -> bool:
    """Forget a node; True when the world in force has lost a member by that."""
    m.absent.pop(node, None)
    m.waiting.pop(node, None)
    m.busy.pop(node, None)
    m.leaving.pop(node, None)
    return m.placed.pop(node, None) is not None


def send_away(m: Membership, node: NodeId) -> bool:
    """Part with a living node; True when the world in force has lost a member by that."""
    stops = m.placed.get(node) or m.busy.get(node)
    placed = leave(m, node)
    if stops is not None:
        m.leaving[node] = stops
        stops.killed = False
    return placed


def dissolve(m: Membership, now: Time, grace_s: Seconds = 0.0) -> None:
    """Give up the world in force: its nodes are busy until they say that they are ready.

    Until then they are waited for even if spares could fill the world without them. Their workers
    have at least the grace that they are promised.
    """
    m.dissolved_at = now
    m.patient_until = Time(now + max(m.patience.limit_s(), grace_s))
    for candidate in m.placed.values():
        candidate.killed = False
    m.busy.update(m.placed)
    m.placed.clear()


def ready(m: Membership, node: NodeId, round: RoundNumber, store_port: int) -> bool:
    """A node stopped its workers of that round. False when that is not what it was asked for."""
    candidate = m.busy.get(node)
    if candidate is None or round != candidate.round:
        return False
    del m.busy[node]
    candidate.store_port = store_port
    m.waiting[node] = candidate
    return True


def must_wait(m: Membership) -> bool:
    """Whether nodes that are still busy hold up the next round.

    One whose workers may still run always does, so that no two worlds run at once.
    """
    stopping = [*m.busy.values(), *m.leaving.values()]
    if any(not candidate.killed for candidate in stopping):
        return True
    patient = m.patient_until is not None
    return bool(m.busy) and (patient or len(m.waiting) < most_nodes(m))


def most_nodes(m: Membership) -> int:
    """The largest legal world."""
    return m.terms.max_nodes - m.terms.max_nodes % seating.unit(m.terms)


def can_grow(m: Membership) -> int:
    """How many nodes the world would have if it were formed anew now; 0 when not more than now."""
    if not m.placed or len(m.placed) >= most_nodes(m):
        return 0
    fresh = {node: candidate for node, candidate in m.waiting.items() if candidate.warm}
    size = len(seating.choose({**m.placed, **fresh}, m.terms))
    return size if size > len(m.placed) else 0


def close(m: Membership, now: Time, withheld: Collection[NodeId] = ()) -> World | None:
    """Freeze the next round if it may be, else note until when it waits for more.

    Withheld nodes stay waiting and count for nothing.
    """
    aside = {node: m.waiting.pop(node) for node in withheld}
    try:
        return _close(m, now)
    finally:
        m.waiting.update(aside)


def _close(m: Membership, now: Time) -> World | None:
    if m.placed or not may_close(m, now):
        return None
    m.closes_at = m.patient_until = m.dissolved_at = m.saves_at_wish = None
    m.round = RoundNumber(m.round + 1)
    m.fewest = m.terms.min_nodes
    chosen = seating.choose(m.waiting, m.terms)
    order = seating.seat(chosen, m.waiting, m.seats, m.terms.segment)
    m.placed = {node: m.waiting.pop(node) for node in order}
    m.seats = [candidate.spec.switch for candidate in m.placed.values()]
    return _freeze(m, now)


def may_close(m: Membership, now: Time) -> bool:
    """Whether the next round has all the nodes it waits for."""
    m.closes_at = None
    fewest = max(1, m.terms.min_nodes)
    if len(m.waiting) < fewest or must_wait(m):  # The cheap answer, for most of many joins.
        return False
    if len(m.waiting) < most_nodes(m) and (m.absent or not _grace_is_over(m, now)):
        return False
    size = len(seating.choose(m.waiting, m.terms))
    if size < fewest:
        m.closes_at = None
        return False
    return size >= most_nodes(m) or _grace_is_over(m, now)


def _grace_is_over(m: Membership, now: Time) -> bool:
    """Whether no newcomer is waited for any more; else `closes_at` says until when."""
    if m.round > 0 or m.last_join_at is None:
        return True
    m.closes_at = Time(m.last_join_at + _newcomer_grace_s(m))
    return now >= m.closes_at


def _newcomer_grace_s(m: Membership) -> Seconds:
    if m.terms.last_call_s is not None:
        return m.terms.last_call_s
    return max(NEWCOMER_FLOOR_S, NEWCOMER_FACTOR * m.longest_gap_s)


def _freeze(m: Membership, now: Time) -> World:
    places = []
    rank = 0
    role_sizes = _role_sizes(m)
    m.stayed = sum(candidate.parked for candidate in m.placed.values())
    role_ranks = dict.fromkeys(role_sizes, 0)
    for group_rank, (node, candidate) in enumerate(m.placed.items()):
        candidate.round = m.round
        candidate.seat = group_rank
        candidate.parked = 0
        slots, role = candidate.spec.slots, candidate.spec.role
        place = Place(
            node=node,
            group_rank=group_rank,
            first_rank=Rank(rank),
            slots=slots,
            first_role_rank=role_ranks[role],
            role_size=role_sizes[role],
        )
        places.append(place)
        rank += slots
        role_ranks[role] += slots
    host = m.placed[places[0].node]
    return World(
        round=m.round,
        places=tuple(places),
        size=rank,
        store_address=host.spec.store_name or host.spec.address,
        store_port=host.store_port,
        frozen_at=now,
    )


def _role_sizes(m: Membership) -> dict[str, int]:
    """Count the ranks of each role."""
    sizes: dict[str, int] = {}
    for candidate in m.placed.values():
        spec = candidate.spec
        sizes[spec.role] = sizes.get(spec.role, 0) + spec.slots
    return sizes


def part_of(world: World, place: Place, restarts: int, max_restarts: int) -> Part:
    """Cut out what the node at that place is told: its own part, never the whole world."""
    return Part(
        round=world.round,
        first_rank=place.first_rank,
        slots=place.slots,
        group_rank=place.group_rank,
        group_world_size=len(world.places),
        world_size=world.size,
        first_role_rank=place.first_role_rank,
        role_size=place.role_size,
        store_address=world.store_address,
        store_port=world.store_port,
        restarts=restarts,
        max_restarts=max_restarts,
    )


def validate(m: Membership, world: World | None) -> None:
    """Assert every invariant; tests and the simulator call it after each event."""
    assert len(set(m.nodes())) == m.count(), "a node is in two places"
    if world is None:
        assert not m.placed, "placed without a world"
        return
    size = len(world.places)
    assert world.round == m.round, "the world in force is not the newest"
    assert 0 < size <= m.terms.max_nodes, "an illegal number of nodes"
    assert size % seating.unit(m.terms) == 0, "not a multiple of the node unit"
    assert size >= m.fewest, "below the minimum"
    first = 0
    for place in world.places:
        assert place.first_rank == first, "a gap in the ranks"
        first += place.slots
    assert first == world.size, "ranks do not add up"
    assert set(m.placed) <= {p.node for p in world.places}, "placed outside the world"
