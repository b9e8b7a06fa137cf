"""Makes the faults happen that a platform can have: its nodes end, it lies, and its supplier dies.

They are drawn like those of `faults`, from the platform's own source of randomness.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.messages.requests import ChangeNodes
from holdfast.messages.units import Seconds
from holdfast.sim.rank import PARTING

if TYPE_CHECKING:
    from holdfast.sim.cluster import Cluster
    from holdfast.sim.supply import SimNode, SimPlatform

LIE_S: tuple[Seconds, Seconds] = (1.0, 60.0)
GRACE_S: tuple[Seconds, Seconds] = (5.0, 60.0)
"""Between the word that a node is preempted and its end."""


class SupplyFaults:
    """Draws what befalls a platform and its nodes, and makes it happen."""

    def __init__(self, cluster: Cluster, platform: SimPlatform) -> None:
        self.cluster, self.platform, self.rng = cluster, platform, platform.rng
        self._rates = cluster.schedule.supply_rates

    def plan(self) -> None:
        for name in self._rates:
            self._plan_next(name)

    def _plan_next(self, name: str) -> None:
        settings = self.cluster.settings
        rate = self._rates[name] * (settings.nodes + settings.spares)
        self.cluster.clock.after(self.rng.expovariate(rate / 3600), self._draw, name)

    def _draw(self, name: str) -> None:
        if not self.cluster.faults.over:
            self.strike(name)
            self._plan_next(name)

    def strike(self, name: str) -> None:
        """Have a fault happen, if there is a node that it can befall."""
        running = [node for node in self.platform.alive() if node.status == "running"]
        if running:
            counts = self.cluster.faults.counts
            counts[name] = counts.get(name, 0) + 1
            node = self.rng.choice(running)
            self.cluster.log.fault(self.cluster.clock.now, name, node.wish.id)
            getattr(self, f"_{name}")(node)

    # ---- nodes ----

    def _node_preempted(self, node: SimNode) -> None:
        agent = self.platform.agent_of(node)
        if agent is not None:
            agent.later(0.0, agent.told_to_leave, "preempted")
        end_at_s = self.rng.uniform(*GRACE_S)
        self.cluster.clock.after(end_at_s, self.platform.end, node, "preempted")

    def _node_evicted(self, node: SimNode) -> None:
        self.platform.end(node, "evicted")

    def _node_oom(self, node: SimNode) -> None:
        self.platform.end(node, "oom")

    def _node_broken(self, node: SimNode) -> None:
        self.platform.end(node, "hardware")

    def _node_deleted(self, node: SimNode) -> None:
        self.platform.remove(node)

    def _mass(self, node: SimNode) -> None:
        """Evict half of all nodes at the same moment."""
        alive = self.platform.alive()
        for one in self.rng.sample(alive, (len(alive) + 1) // 2):
            self.platform.end(one, "evicted")

    # ---- the platform and its supplier ----

    def _lie(self, node: SimNode) -> None:
        """Say that a dead node runs, or that one failed that runs on for a while."""
        agent = self.platform.agent_of(node)
        if self.rng.random() < 0.5 and agent is not None:
            agent.die(silently=True)
        else:
            node.said = "failed"
            self.platform.supplier.wake()
        lasts_s = self.rng.uniform(*LIE_S)
        self.cluster.clock.after(lasts_s, self.platform.end, node, None, self.rng.choice((3, 137)))

    def _outage(self, node: SimNode) -> None:
        until = self.cluster.clock.now + self.rng.uniform(*LIE_S)
        self.platform.refuses_until = max(self.platform.refuses_until, until)
        self.platform.supplier.wake()

    def _supplier(self, node: SimNode) -> None:
        self.platform.supplier.die(self.rng.uniform(0.0, 10.0))

    def _supplier_stream(self, node: SimNode) -> None:
        self.platform.supplier.cut()

    # ---- people ----

    def _scale(self, node: SimNode) -> None:
        """Have a person or the script want another number of nodes."""
        settings = self.cluster.settings
        step = max(settings.node_unit, settings.segment)
        most = step * self.rng.randrange(1, 2 * settings.nodes // step + 1)
        least = step * self.rng.randrange(1, most // step + 1)
        least = min(least, settings.min_nodes)
        agent = node.host.agent if node.host is not None else None
        if agent is None or not agent.ranks or self.rng.random() < 0.5:
            self.cluster.coordinator.ask_scale(least, most)
            return
        one = self.rng.choice(list(agent.ranks.values()))
        agent.later(0.0, one.ask, PARTING, ChangeNodes(min_nodes=least, max_nodes=most))

    def _requeue(self, node: SimNode) -> None:
        """End all nodes and the coordinator at once; the platform starts the job again."""
        for one in self.platform.alive():
            self.platform.remove(one)
        self.cluster.coordinator.be_requeued()
