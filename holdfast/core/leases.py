"""Decides when a node that is not heard of may be given up, so that no two worlds run at once.

A node's places in a round are lent to it. Its agent beats; the coordinator answers each beat with a
lease, and the agent counts from when it *sent* that beat. The coordinator counts from when it *heard*
it, which is later, and waits longer than the lease lasts. So by the time it gives the node's places to
others, the agent has paused its ranks. No clock is compared with another machine's.

    agent        beat sent ────────── lease is over: ranks paused
    coordinator        beat heard ──────────────────────────────── silence is over: node given up

What follows from that:

    the agent died           its kernel closes the stream, or its launcher starts another agent, which
                             says whose place it takes: both prove that the ranks are gone, and the
                             node is given up at once
    the stream broke         a node that comes back within the silence is where it was; meanwhile it
                             gets no place in a new round
    the coordinator stood    (stopped, starved, restarted) it may have words in its buffers that it
                             has not read: everybody is given the whole silence again
    it was itself cut off    when all nodes on other hosts fall silent together, the coordinator is the
                             likelier reason: they are waited for much longer
    nobody can go on         without the silent nodes no world can be formed: they are waited for
                             just as long

An agent that can prove that the coordinator's host is reachable and only its process is not (a
connection refused, beats acknowledged by the kernel and not answered) keeps its lease: a process that
is dead or stands gives nobody up, and one that comes back gives everybody time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable

from msgspec import Struct, field

from holdfast.messages.units import NodeId, Seconds

LOOK_EVERY_S: Seconds = 0.5
"""How often the coordinator looks for silent nodes."""
STOOD_S: Seconds = 0.5
"""A look that comes this much too late shows that the coordinator itself stood."""
LEASE_SHARE = 0.75
"""Of the silence, what a lease lasts. The rest is for the look, and for pausing the ranks."""
CUT_OFF_S: Seconds = 30.0
"""How long nodes are waited for that the job cannot do without, or if the coordinator is cut off."""
AFTER_RESTART_S: Seconds = 10.0
"""At least this long, agents may take to find a coordinator that was restarted."""


def lease_s(silence_s: Seconds) -> Seconds:
    """Return how long a node's ranks may run after the last beat that was answered."""
    return LEASE_SHARE * silence_s


class Leases(Struct):
    """When the coordinator heard of each node, on its machine's monotonic clock."""

    looked_at: float
    heard: dict[NodeId, float] = field(default_factory=dict)
    remote: dict[NodeId, bool] = field(default_factory=dict)
    """Whether the node is on another host."""
    renewed_at: float = 0.0
    """When everybody was last given the whole silence again."""
    _cut_off: bool = False

    def begin(self, node: NodeId, remote: bool, now: float) -> None:
        """Begin to count for a node that has a new stream."""
        self.remote[node] = remote
        self.hear(node, now)

    def restarted(self, nodes: Iterable[NodeId], silence_s: Seconds, now: float) -> None:
        """Give the members of a replayed job time to find the coordinator."""
        for node in nodes:
            self.heard[node] = now + max(0.0, AFTER_RESTART_S - silence_s)
            self.remote[node] = True

    def hear(self, node: NodeId, now: float) -> Seconds:
        """Note that a node was heard of; return how long it had been silent while we listened."""
        since = max(self.heard.get(node, now), self.renewed_at)
        self.heard[node] = now
        if self._cut_off and self.remote.get(node):
            self._cut_off, self.renewed_at = False, now
        return max(0.0, now - since)

    def silent_s(self, node: NodeId, now: float) -> Seconds:
        """Return for how long a node has not been heard of."""
        return max(0.0, now - self.heard.get(node, now))

    def forget(self, node: NodeId) -> None:
        self.heard.pop(node, None)
        self.remote.pop(node, None)

    def attend(self, members: Collection[NodeId], connected: Container[NodeId]) -> None:
        """Count for every member, and for nobody else that has no stream."""
        for node in [one for one in self.heard if one not in connected and one not in members]:
            self.forget(node)
        for node in members:
            self.heard.setdefault(node, self.looked_at)

    def look(
        self, now: float, silence_s: Seconds, dispensable: Callable[[Collection[NodeId]], bool]
    ) -> list[NodeId]:
        """Return the nodes whose leases are certainly over and that are to be given up.

        `dispensable` tells whether the job could go on without these nodes.
        """
        if now - self.looked_at > LOOK_EVERY_S + STOOD_S:
            self.renewed_at = now
        self.looked_at = now
        limit = now - silence_s
        if self.renewed_at > limit:
            return []
        late = [node for node, at in self.heard.items() if at < limit]
        if not late:
            return []
        others = [node for node, remote in self.remote.items() if remote and node in self.heard]
        self._cut_off = len(others) > 1 and set(others) <= set(late)
        if self._cut_off or not dispensable(late):
            return [node for node in late if self.heard[node] < now - CUT_OFF_S]
        return late
