"""Who keeps whose copies.

Nodes form cliques, whose members keep copies of each other's images. Few groups that share nothing
lose less than many that overlap: two nodes that die together are seldom of the same clique.

As long as nothing is known about where nodes stand, a clique is n, n+J, n+2J, … for a jump J, within
stretches of J times as many nodes as there are to be copies (the last stretch has what is over). Two
labels improve on that: nodes on one host die together, and nodes of one domain (a switch, a block;
"block/switch" for both) often do. So nodes are also put in order of their labels and dealt out like
cards. Each label is then a run in that order, and no other way spreads a run over more cliques. The
dealt cliques are taken where they share less than those that the jump gives.

A clique that has more members than there are to be copies is a ring, in which everybody keeps as many
copies as anybody else. Only where one host has more nodes than all others together must those others
keep more than their part.

This is pure: the same nodes in, the same peers out, on whichever node it is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct


class Stand(Struct, frozen=True):
    """Where a node stands: what it may lose together with others."""

    host: str
    domain: tuple[str, ...]

    def shares(self, other: Stand) -> tuple[int, int]:
        """How much would be lost together: first the host, then how near they are."""
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
    stands = [
        Stand(
            hosts[node] if hosts is not None else str(node),
            tuple(domains[node].split("/")) if domains is not None else (),
        )
        for node in range(node_count)
    ]
    by_label = sorted(range(node_count), key=lambda n: (stands[n].domain, stands[n].host, n))
    by_jump = _rings(_jumping(node_count, copies, jump), node_count, copies)
    dealt = _rings(_dealt(by_label, copies), node_count, copies)
    best = min(by_jump, dealt, key=lambda peers: _shared(peers, stands))
    _mend(best, stands)
    for node, peers in enumerate(best):
        peers.sort(key=lambda peer: stands[node].shares(stands[peer]))
    return best


def _jumping(node_count: int, copies: int, jump: int) -> list[list[int]]:
    """Cliques n, n+J, n+2J, … within each stretch of nodes."""
    stretch = jump * copies
    starts = range(0, max(1, node_count // stretch) * stretch, stretch)
    ends = [*starts[1:], node_count]
    return [
        clique
        for start, end in zip(starts, ends, strict=True)
        for clique in _dealt(range(start, end), copies)
    ]


def _dealt(order: Sequence[int], copies: int) -> list[list[int]]:
    """As many cliques as can be full, and the nodes dealt out to them in turn."""
    count = max(1, len(order) // copies)
    return [list(order[first::count]) for first in range(count)]


def _rings(cliques: list[list[int]], node_count: int, copies: int) -> list[list[int]]:
    """Each member's copies go to those that stand at equal distances around its clique."""
    peers: list[list[int]] = [[] for _ in range(node_count)]
    for clique in cliques:
        size = len(clique)
        for place, node in enumerate(clique):
            steps = (turn * size // copies for turn in range(1, copies))
            peers[node] = [clique[(place + step) % size] for step in steps]
    return peers


def _shared(peers: list[list[int]], stands: Sequence[Stand]) -> tuple[int, int, int]:
    """How much would be lost together: nodes with all their copies, copies, and near ones."""
    pairs = [
        [stands[node].shares(stands[peer]) for peer in peers[node]] for node in range(len(peers))
    ]
    alone = sum(all(host for host, _ in chosen) for chosen in pairs)
    both = [pair for chosen in pairs for pair in chosen]
    return alone, sum(host for host, _ in both), sum(near for _, near in both)


def _mend(peers: list[list[int]], stands: Sequence[Stand]) -> None:
    """Give each node that has copies on its own host alone one on another, if there is another."""
    if len({stand.host for stand in stands}) == 1:
        return
    kept = Counter(peer for chosen in peers for peer in chosen)
    for node, chosen in enumerate(peers):
        host = stands[node].host
        if all(stands[peer].host == host for peer in chosen):
            others = [n for n, stand in enumerate(stands) if stand.host != host]
            instead = min(others, key=lambda n: (kept[n], stands[node].shares(stands[n]), n))
            kept.subtract([chosen[-1]])
            kept.update([instead])
            chosen[-1] = instead
