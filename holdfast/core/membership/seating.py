"""Decides which nodes get a place in a round, and in which order of ranks.

Choice: nodes that had a seat (a group rank) come first, then newcomers with a rank given by the user or
the infrastructure, in that order, then others in order of arrival. With segments, only complete ones
are taken: N adjacent nodes of one fast-interconnect domain. Nodes beyond a multiple of the node unit
wait.

Seating: survivors keep their seats, so that few ranks move; a newcomer takes a free seat, one at the
same switch if possible. In the first round the nodes of a switch are adjacent, the switch of rank 0
first. With fewer nodes than seats, the remaining nodes close the gaps.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping

from holdfast.core.view import Candidate
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId


def unit(terms: Terms) -> int:
    """Return the number of which every world size in nodes is a multiple."""
    return math.lcm(terms.node_unit, terms.segment)


def choose(candidates: Mapping[NodeId, Candidate], terms: Terms) -> list[NodeId]:
    """Return the nodes that can form a world now, in order of preference; empty if none can."""
    order = sorted(candidates, key=lambda node: _preference(candidates[node]))
    if terms.segment > 1:
        order = _complete_segments(order, candidates, terms.segment)
    most = min(len(order), terms.max_nodes)
    return order[: most - most % unit(terms)]


def _preference(candidate: Candidate) -> tuple[float, float, int]:
    spec = candidate.spec
    seat = math.inf if candidate.seat is None else candidate.seat
    given = spec.node_rank if spec.node_rank is not None else spec.infra_rank
    return seat, math.inf if given is None else given, candidate.joined


def _complete_segments(
    order: list[NodeId], candidates: Mapping[NodeId, Candidate], size: int
) -> list[NodeId]:
    domains: dict[str, list[NodeId]] = {}
    complete: list[NodeId] = []
    for node in order:
        members = domains.setdefault(candidates[node].spec.domain, [])
        members.append(node)
        if len(members) == size:
            complete += members
            members.clear()
    return complete


def seat(
    chosen: list[NodeId], candidates: Mapping[NodeId, Candidate], seats: list[str]
) -> list[NodeId]:
    """Return the chosen nodes in rank order; `seats` are the switches of the last round's seats."""
    if not seats or any(candidates[node].spec.domain for node in chosen):
        return _by_switch(chosen, candidates)
    taken: dict[int, NodeId] = {}
    newcomers = []
    for node in chosen:
        held = candidates[node].seat
        if held is None or held in taken:
            newcomers.append(node)
        else:
            taken[held] = node
    left = deque(number for number in range(len(seats)) if number not in taken)
    at_switch: dict[str, deque[int]] = {}
    for number in left:
        at_switch.setdefault(seats[number], deque()).append(number)
    beyond = itertools.count(max(len(seats), max(taken, default=-1) + 1))
    for node in newcomers:
        beside = at_switch.get(candidates[node].spec.switch, deque())
        found = _lowest_free(beside, taken)
        if found is None:
            found = _lowest_free(left, taken)
        taken[next(beyond) if found is None else found] = node
    return [taken[number] for number in sorted(taken)]


def _lowest_free(seats: deque[int], taken: Mapping[int, NodeId]) -> int | None:
    while seats and seats[0] in taken:
        seats.popleft()
    return seats[0] if seats else None


def _by_switch(chosen: list[NodeId], candidates: Mapping[NodeId, Candidate]) -> list[NodeId]:
    """Group nodes by block, then by switch, in order of first appearance."""
    blocks: dict[str, dict[str, list[NodeId]]] = {}
    for node in chosen:
        spec = candidates[node].spec
        blocks.setdefault(spec.block, {}).setdefault(spec.switch, []).append(node)
    return [node for switches in blocks.values() for nodes in switches.values() for node in nodes]
