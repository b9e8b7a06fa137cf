"""Remembers which node had which ranks, and how much of each node's machine was in use.

A node that keeps its place through many rounds is one entry: memory grows with changes and not with
rounds. Of the samples each node keeps a few, fewer in a job of many nodes.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct, field

from holdfast.messages.records import World
from holdfast.messages.units import NodeId, Time
from holdfast.messages.usage import NodeUsage
from holdfast.view.history.series import Series

MOST_NODES = 20_000
"""Nodes whose samples are kept: those that reported last."""
MOST_SAMPLES = 100_000
"""Samples of all nodes together, about."""


class UsagePoint(NamedTuple):
    """How much of a machine was in use; None for what is unknown."""

    cpu: float | None
    memory: float | None
    gpu: float | None
    network_bytes_per_s: float | None


class Stay(NamedTuple):
    """Ranks that a node had, from some time on."""

    since: Time
    first_rank: int
    slots: int
    node: NodeId


class Seats(Struct):
    """Which node had which ranks."""

    _stays: dict[int, list[Stay]] = field(default_factory=dict)
    """By first rank, in the order of time."""
    sizes: list[tuple[Time, int]] = field(default_factory=list)
    """World size, when it changed."""

    def begin_round(self, world: World, at: Time) -> None:
        if not self.sizes or self.sizes[-1][1] != world.size:
            self.sizes.append((at, world.size))
        for place in world.places:
            stays = self._stays.setdefault(place.first_rank, [])
            if not stays or (stays[-1].node, stays[-1].slots) != (place.node, place.slots):
                stays.append(Stay(at, place.first_rank, place.slots, place.node))

    def of(self, rank: int) -> list[tuple[Time, NodeId]]:
        """Return the nodes that a rank was on, with the time from which on."""
        found = [
            (stay.since, stay.node)
            for stays in self._stays.values()
            for stay in stays
            if stay.first_rank <= rank < stay.first_rank + stay.slots
        ]
        return sorted(found)

    def stays(self) -> list[Stay]:
        """Return all stays, in the order of time."""
        return sorted(stay for stays in self._stays.values() for stay in stays)


class UsageHistory(Struct):
    """How much of each machine was in use over time."""

    nodes: dict[NodeId, Series[UsagePoint]] = field(default_factory=dict)

    def add(self, node: NodeId, at: Time, usage: NodeUsage) -> None:
        series = self.nodes.pop(node, None)
        if series is None:
            most = max(32, min(256, MOST_SAMPLES // (len(self.nodes) + 1)))
            series = Series(most, every_s=10.0)
        self.nodes[node] = series  # At the end: it reported last.
        series.add(at, UsagePoint(usage.cpu, usage.memory, usage.gpu, usage.network_bytes_per_s))
        if len(self.nodes) > MOST_NODES:
            del self.nodes[next(iter(self.nodes))]
