"""Decides which nodes get a place in a round, and in which order of ranks.

Choice: nodes of the newest round come first, by their seats (group ranks), then those of older rounds,
then newcomers with a rank given by the user or the infrastructure, in that order, then others in order
of arrival. Nodes beyond a multiple of the node unit wait.

With segments, only complete ones are taken: N nodes of one fast-interconnect domain that get adjacent
group ranks, whatever switches they are at. Nodes that formed a segment stay together; one that lost
members is filled up with newcomers of its domain first, then with what is left of other such segments.

Seating: survivors keep their seats, so that few ranks move; a newcomer takes a free seat, one at the
same switch if possible. In the first round the nodes of a switch are adjacent, the switch of rank 0
first. With fewer nodes than seats, the remaining nodes close the gaps. With segments, all of this holds
for segments in the place of nodes (the switch of a segment is that of its first node), and within a
segment for its nodes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from holdfast.core.view import Candidate
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId

Segment = list[NodeId]
"""Nodes that are seated side by side; a single one where the job has no segments."""


def unit(terms: Terms) -> int:
    """Return the number of which every world size in nodes is a multiple."""
    return math.lcm(terms.node_unit, terms.segment)


def choose(candidates: Mapping[NodeId, Candidate], terms: Terms) -> list[NodeId]:
    """Return the nodes that can form a world now, in order of preference; empty if none can.

    With segments, each run of as many nodes as a segment has is one.
    """
    order = sorted(candidates, key=lambda node: _preference(candidates[node]))
    if terms.segment > 1:
        order = _complete_segments(order, candidates, terms.segment)
    most = min(len(order), terms.max_nodes)
    return order[: most - most % unit(terms)]


def _preference(candidate: Candidate) -> tuple[int, float, float, int]:
    spec = candidate.spec
    seat = math.inf if candidate.seat is None else candidate.seat
    given = spec.node_rank if spec.node_rank is not None else spec.infra_rank
    return -candidate.round, seat, math.inf if given is None else given, candidate.joined


def _complete_segments(
    order: list[NodeId], candidates: Mapping[NodeId, Candidate], size: int
) -> list[NodeId]:
    """Return the nodes of all segments that can be formed, the one with the first node first."""
    domains: dict[str, list[NodeId]] = {}
    for node in order:
        domains.setdefault(candidates[node].spec.domain, []).append(node)
    segments = [one for nodes in domains.values() for one in _segments(nodes, candidates, size)]
    number = {node: i for i, node in enumerate(order)}
    segments.sort(key=lambda segment: min(number[node] for node in segment))
    return [node for segment in segments for node in segment]


def _segments(
    nodes: list[NodeId], candidates: Mapping[NodeId, Candidate], size: int
) -> list[Segment]:
    """Form segments of the nodes of one domain; as many as can be."""
    remains: dict[int, Segment] = {}
    newcomers = deque[NodeId]()
    for node in nodes:
        held = candidates[node].seat
        kept = remains.setdefault(held // size, []) if held is not None else None
        if kept is None or len(kept) == size:
            newcomers.append(node)
        else:
            kept.append(node)
    broken = deque(sorted(remains.values(), key=len, reverse=True))
    segments = []
    while broken or newcomers:
        segment = broken.popleft() if broken else []
        while len(segment) < size and (newcomers or broken):
            segment.append(newcomers.popleft() if newcomers else broken[-1].pop())
            if broken and not broken[-1]:
                broken.pop()
        if len(segment) == size:
            segments.append(segment)
    return segments


def seat(
    chosen: list[NodeId], candidates: Mapping[NodeId, Candidate], seats: list[str], size: int = 1
) -> list[NodeId]:
    """Return the chosen nodes in rank order.

    `seats` are the switches of the last round's seats, `size` is the number of nodes of a segment.
    """
    segments = [chosen[i : i + size] for i in range(0, len(chosen), size)]
    ordered = (
        _kept(segments, candidates, seats, size) if seats else _by_switch(segments, candidates)
    )
    return [node for segment in ordered for node in _within(segment, candidates)]


def _kept(
    segments: list[Segment], candidates: Mapping[NodeId, Candidate], seats: list[str], size: int
) -> list[Segment]:
    """Order segments by the places that they had; newcomers take free ones."""
    switches = seats[::size]
    taken: dict[int, Segment] = {}
    newcomers = []
    for segment in segments:
        held = _place(segment, candidates, size)
        if held is None or held in taken:
            newcomers.append(segment)
        else:
            taken[held] = segment
    left = deque(number for number in range(len(switches)) if number not in taken)
    at_switch: dict[str, deque[int]] = {}
    for number in left:
        at_switch.setdefault(switches[number], deque()).append(number)
    beyond = itertools.count(max(len(switches), max(taken, default=-1) + 1))
    for segment in newcomers:
        beside = at_switch.get(candidates[segment[0]].spec.switch, deque())
        found = _lowest_free(beside, taken)
        if found is None:
            found = _lowest_free(left, taken)
        taken[next(beyond) if found is None else found] = segment
    return [taken[number] for number in sorted(taken)]


def _place(segment: Segment, candidates: Mapping[NodeId, Candidate], size: int) -> int | None:
    """Return the number of the segment that most of these nodes were in."""
    held = [
        one.seat // size for one in map(candidates.__getitem__, segment) if one.seat is not None
    ]
    return Counter(held).most_common(1)[0][0] if held else None


def _lowest_free(seats: deque[int], taken: Mapping[int, Segment]) -> int | None:
    while seats and seats[0] in taken:
        seats.popleft()
    return seats[0] if seats else None


def _within(segment: Segment, candidates: Mapping[NodeId, Candidate]) -> list[NodeId]:
    """Order the nodes of a segment: those that were in it keep their seats there."""
    if len(segment) == 1:
        return segment
    taken: dict[int, NodeId] = {}
    for node in segment:
        held = candidates[node].seat
        if held is not None:
            taken.setdefault(held % len(segment), node)
    newcomers = [[node] for node in segment if node not in taken.values()]
    others = iter(_by_switch(newcomers, candidates))
    return [taken[i] if i in taken else next(others)[0] for i in range(len(segment))]


def _by_switch(
    segments: Sequence[Segment], candidates: Mapping[NodeId, Candidate]
) -> list[Segment]:
    """Group segments by block, then by switch, in order of first appearance."""
    blocks: dict[str, dict[str, list[Segment]]] = {}
    for segment in segments:
        spec = candidates[segment[0]].spec
        blocks.setdefault(spec.block, {}).setdefault(spec.switch, []).append(segment)
    return [one for switches in blocks.values() for all_ in switches.values() for one in all_]
