"""The local platform: nodes are groups of processes on this machine.

It is there to try on one machine what a cluster does: `holdfast up`. Each request is one `holdfast run`
in a session of its own, which takes itself to be a host of its own, `node-3`. A guard watches it and
writes down what became of it, so this platform remembers nothing that matters (see `guards`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from holdfast.messages.supply import Cordon, NodeWish, RequestId, Sighting
from holdfast.platforms.guards import GuardedNodes, NodeStart
from holdfast.platforms.opening import NodeOrders


class LocalPlatform(GuardedNodes):
    """Nodes on this machine, by their records in a directory."""

    name = "local"
    together = False

    async def list(self) -> Sequence[Sighting]:
        """List all nodes that have a record."""
        return self.seen()

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        """Start a node for each request, on a host of a name that is free."""
        taken = {cordon.host for cordon in avoid} | self.hosts_in_use()
        starts = []
        for wish in wishes:
            free = (name for n in count(wish.position) if (name := f"node-{n}") not in taken)
            host = next(free)
            taken.add(host)
            starts.append(NodeStart(wish, host, self._orders.command, self._orders.environ))
        await self.start(starts)

    async def release(self, requests: Sequence[RequestId]) -> None:
        """Tell nodes to leave."""
        self.end(requests)


def open_platform(orders: NodeOrders) -> LocalPlatform:
    """Provide nodes on this machine."""
    return LocalPlatform(orders)


def own_host(environ: Mapping[str, str]) -> str:
    """All nodes are here."""
    return "127.0.0.1"
