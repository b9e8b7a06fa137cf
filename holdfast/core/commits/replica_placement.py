"""Decides which nodes keep copies of whose images.

Nodes form cliques, whose members keep copies of each other's images. Few groups that share nothing
lose less than many that overlap: two nodes that die together are seldom of the same clique.

Where nothing is known of the nodes' locations, a clique is n, n+J, n+2J, … for a jump J, within
stretches of J times as many nodes as there are to be copies (the last stretch takes the remainder).
Two labels improve on that: nodes on one host die together, and nodes of one failure domain (a switch, a
block; "block/switch" for both) often do. So nodes are also sorted by their labels and dealt out like
cards. Each label is then a run in that order, and no other way spreads a run over more cliques. The
dealt cliques are used where they share less than those of the jump.

A clique with more members than there are to be copies is a ring, in which every member keeps the same
number of copies. Only where one host has more nodes than all others together do those others keep more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct


class NodeLocation(Struct, frozen=True):
    """What a node shares with others, and may be lost together with."""

    host: str
    domain: tuple[str, ...]

    def shares(self, other: NodeLocation) -> tuple[int, int]:
        """How much two nodes share: first the host, then the failure domain."""
        near = 0
        for mine, others in zip(self.domain, other.domain, strict=False):
            if not mine or mine != others:
                break
            near += 1
        return int(self.host == other.host), near


def peers_of(
    node_index: int,
    node_count: int,
    factor: int,
    jump: int,
    domains: Sequence[str] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[int]:
    """The nodes that keep copies of this one's images, the most independent first."""
    return placement(node_count, factor, jump, domains, hosts)[node_index]


def placement(
    node_count: int,
    factor: int,
    jump: int,
    domains: Sequence[str] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[list[int]]:
    """For each node, those that keep copies of its images. `factor` counts the original too."""
    if min(factor, jump) < 1:
        raise ValueError(f"factor {factor}, jump {jump}: both are at least 1")
    copies = min(factor, node_count)
    if copies < 2:
        return [[] for _ in range(node_count)]
    locations = [
        NodeLocation(
            hosts[node] if hosts is not None else str(node),
            tuple(domains[node].split("/")) if domains is not None else (),
        )
        for node in range(node_count)
    ]
    by_label = sorted(range(node_count), key=lambda n: (locations[n].domain, locations[n].host, n))
    by_jump = _rings(_jumping(node_count, copies, jump), node_count, copies)
    dealt = _rings(_dealt(by_label, copies), node_count, copies)
    best = min(by_jump, dealt, key=lambda peers: _shared(peers, locations))
    _mend(best, locations)
    for node, peers in enumerate(best):
        peers.sort(key=lambda peer: locations[node].shares(locations[peer]))
    return best


def _jumping(node_count: int, copies: int, jump: int) -> list[list[int]]:
    """Form cliques n, n+J, n+2J, … within each stretch of nodes."""
    stretch = jump * copies
    starts = range(0, max(1, node_count // stretch) * stretch, stretch)
    ends = [*starts[1:], node_count]
    return [
        clique
        for start, end in zip(starts, ends, strict=True)
        for clique in _dealt(range(start, end), copies)
    ]


def _dealt(order: Sequence[int], copies: int) -> list[list[int]]:
    """Deal the nodes out to as many cliques as can be full."""
    count = max(1, len(order) // copies)
    return [list(order[first::count]) for first in range(count)]


def _rings(cliques: list[list[int]], node_count: int, copies: int) -> list[list[int]]:
    """Give each member as peers those at equal distances around its clique."""
    peers: list[list[int]] = [[] for _ in range(node_count)]
    for clique in cliques:
        size = len(clique)
        for place, node in enumerate(clique):
            steps = (turn * size // copies for turn in range(1, copies))
            peers[node] = [clique[(place + step) % size] for step in steps]
    return peers


def _shared(peers: list[list[int]], locations: Sequence[NodeLocation]) -> tuple[int, int, int]:
    """Rate a placement: nodes whose copies are all on their host, such copies, and near ones."""
    pairs = [
        [locations[node].shares(locations[peer]) for peer in peers[node]]
        for node in range(len(peers))
    ]
    alone = sum(all(host for host, _ in chosen) for chosen in pairs)
    both = [pair for chosen in pairs for pair in chosen]
    return alone, sum(host for host, _ in both), sum(near for _, near in both)


def _mend(peers: list[list[int]], locations: Sequence[NodeLocation]) -> None:
    """Move a copy of each node that has copies on its own host alone to another host."""
    if len({location.host for location in locations}) == 1:
        return
    kept = Counter(peer for chosen in peers for peer in chosen)
    for node, chosen in enumerate(peers):
        host = locations[node].host
        if all(locations[peer].host == host for peer in chosen):
            others = [n for n, location in enumerate(locations) if location.host != host]
            instead = min(others, key=lambda n: (kept[n], locations[node].shares(locations[n]), n))
            kept.subtract([chosen[-1]])
            kept.update([instead])
            chosen[-1] = instead
