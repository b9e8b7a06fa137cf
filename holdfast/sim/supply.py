"""Simulates a platform that provides the nodes of a job, and the supplier that speaks for it.

`SimPlatform` is what an engine is: requests become nodes after a while, on hosts that it picks; nodes
end for reasons of their own; what is over is forgotten some day. It is slow, it refuses, it is away,
and for a while it says of a node what is not so. `SimSupplier` follows the rules of the real one
(`holdfast.platforms.supplier`) in simulated time: news get lost, come late or twice, its stream breaks,
and it is killed and knows nothing any more.

    no request is made twice    once the core has heard of it; the core itself never repeats a name
    no node is leaked           after everything is healed, and after the end of the job
    what is wanted comes back   after everything is healed
    budgets are kept            of relaunches and of memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from holdfast.messages.actions import Finish
from holdfast.messages.events import (
    AnyEvent,
    NodesSighted,
    RequestsRefused,
    SupplierJoined,
    SupplierLeft,
)
from holdfast.messages.supply import (
    Cordon,
    ExitReason,
    NodeWish,
    RequestId,
    SeenStatus,
    Sighting,
    SupplyPlan,
)
from holdfast.messages.units import Seconds
from holdfast.sim import look

if TYPE_CHECKING:
    from holdfast.sim.agent import SimAgent
    from holdfast.sim.cluster import Cluster, Host

ALIVE = frozenset({"pending", "running"})
LIST_EVERY_S: Seconds = 10.0
RETRY_S: Seconds = 1.0
LEAVE_LIMIT_S: Seconds = 30.0
"""How long a node that was told to leave may take."""
FORGET_S: Seconds = 300.0
"""How long a platform remembers what is over."""
CODES: tuple[int | None, ...] = (137, 143, 75, 1, 3, None)
"""Exit codes of nodes that died; None where the platform does not know."""


@dataclass(eq=False)
class SimNode:
    """One request that the platform has taken."""

    wish: NodeWish
    status: SeenStatus = "pending"
    reason: ExitReason | None = None
    code: int | None = None
    host: Host | None = None
    said: SeenStatus | None = None
    """What the platform says of it, while that is not so."""

    @property
    def alive(self) -> bool:
        return self.status in ALIVE

    def sighting(self) -> Sighting:
        status = self.said or self.status
        over = status not in ALIVE
        return Sighting(
            request=self.wish.id,
            status=status,
            reason=self.reason if over else None,
            code=self.code if over else None,
            host=self.host.name if self.host is not None else "",
        )


class SimPlatform:
    """The engine: nodes by the names of their requests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.clock = cluster, cluster.clock
        self.rng = Random(f"supply {cluster.settings.seed}")
        """Its own, so that jobs without a platform draw what they always drew."""
        self.schedule = cluster.schedule
        self.nodes: dict[RequestId, SimNode] = {}
        self.refuses_until = 0.0
        self.supplier = SimSupplier(self)
        self._free = deque(cluster.hosts)
        self._known: set[RequestId] = set()
        """Requests that were made, and of which the core has heard."""

    # ---- what a supplier can ask of it ----

    def make(self, wishes: Iterable[NodeWish], avoid: Iterable[Cordon]) -> None:
        hosts = {cordon.host for cordon in avoid}
        for wish in wishes:
            if wish.id not in self.nodes:
                again = wish.id in self._known
                self.cluster.invariants.demand(not again, f"request {wish.id} was made twice")
                node = self.nodes[wish.id] = SimNode(wish)
                shortest, longest = self.schedule.pending_s
                longest = min(longest, 3.0) if self.cluster.healing else longest
                self.clock.after(self.rng.uniform(shortest, longest), self._run, node, hosts)

    def release(self, requests: Iterable[RequestId]) -> None:
        for request in requests:
            node = self.nodes.get(request)
            if node is None or not node.alive:
                continue
            agent = self.agent_of(node)
            if agent is None:
                self.remove(node)
            else:
                agent.later(0.0, agent.told_to_leave, "preempted: its request was released")
                self.clock.after(LEAVE_LIMIT_S, self.remove, node)

    def heard_of(self, sightings: Iterable[Sighting]) -> None:
        """Note which requests the core has heard of."""
        self._known.update(one.request for one in sightings)

    # ---- nodes ----

    def alive(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.alive]

    def agent_of(self, node: SimNode) -> SimAgent | None:
        """Return the agent of a node that runs, if it lives."""
        agent = node.host.agent if node.host is not None else None
        mine = node.host is not None and node.host.request == node.wish.id
        return agent if agent is not None and mine and not agent.dead else None

    def node_on(self, host: Host) -> SimNode | None:
        node = self.nodes.get(host.request) if host.request else None
        return node if node is not None and node.host is host and node.alive else None

    def _run(self, node: SimNode, avoid: set[str]) -> None:
        if node.status != "pending" or self.nodes.get(node.wish.id) is not node:
            return
        host = self._free_host(avoid)
        host.request = node.wish.id
        node.host, node.status = host, "running"
        self.cluster.boot(host)
        self.supplier.wake()

    def _free_host(self, avoid: set[str]) -> Host:
        """Pick a host that is free and not to be avoided; some platforms do not care for that."""
        excluded = look.excluded(self.cluster.coordinator.job)
        cares = self.rng.random() >= self.schedule.return_excluded or self.cluster.healing
        for _ in range(len(self._free)):
            host = self._free.popleft()
            if cares and (host.name in avoid or host.name in excluded):
                self._free.append(host)
            else:
                return host
        return self.cluster.new_host()

    def end(self, node: SimNode, reason: ExitReason | None = None, code: int | None = None) -> None:
        """Have a node end; its host is free then."""
        if not node.alive:
            return
        node.status = "succeeded" if code == 0 else "failed"
        node.reason, node.code, node.said = reason, code, None
        self._kill(node)
        self.clock.after(self.rng.uniform(0.0, FORGET_S), self._forget, node)
        self.supplier.wake()

    def remove(self, node: SimNode) -> None:
        """Have a node be gone, without a trace."""
        if node.alive and self.nodes.get(node.wish.id) is node:
            node.status = "deleted"
            self._kill(node)
            del self.nodes[node.wish.id]
            self.supplier.wake()

    def _kill(self, node: SimNode) -> None:
        agent = self.agent_of(node)
        if agent is not None:
            agent.die(silently=True)
            agent.host.images.clear()
        if node.host is not None and node.host.request == node.wish.id:
            node.host.request = ""
            self._free.append(node.host)

    def _forget(self, node: SimNode) -> None:
        if self.nodes.get(node.wish.id) is node:
            del self.nodes[node.wish.id]

    # ---- what becomes of agents ----

    def agent_gone(self, host: Host, away_s: Seconds) -> None:
        """Have the node of an agent that died come back on its host, or end."""
        node = self.node_on(host)
        if node is None:
            return
        if self.rng.random() < 0.4 and not self.cluster.healing:
            self.clock.after(away_s, self._boot_again, node)
        else:
            code = self.rng.choice(CODES) if not self.cluster.healing else 137
            self.clock.after(self.rng.uniform(0.0, 3.0), self.end, node, None, code)

    def agent_finished(self, host: Host, order: Finish) -> None:
        """Have the node of an agent that ended in order end, or start another for its launcher."""
        node = self.node_on(host)
        if node is None:
            return
        if order.rejoin:
            self.clock.after(self.rng.uniform(0.2, 1.0), self._boot_again, node)
        else:
            self.end(node, None, order.code)

    def _boot_again(self, node: SimNode) -> None:
        if node.alive and node.host is not None and node.host.request == node.wish.id:
            self.cluster.boot(node.host)

    # ---- healing ----

    def heal(self) -> None:
        """Be honest and quick from now on; nodes without an agent end."""
        self.refuses_until = 0.0
        for node in self.alive():
            node.said = None
            if node.status == "running" and self.agent_of(node) is None:
                self.end(node, None, 137)
            elif node.status == "pending":
                self.clock.after(self.rng.uniform(0.0, 3.0), self._run, node, set[str]())
        self.supplier.come_up()

    def strays(self) -> set[RequestId]:
        """Return the nodes that exist although nobody wants them."""
        wanted = set(look.standing_requests(self.cluster.coordinator.job))
        return {node.wish.id for node in self.alive()} - wanted

    def absent(self) -> set[RequestId]:
        """Return what is wanted and not there, or no member of the job."""
        job = self.cluster.coordinator.job
        there = {node.wish.id for node in self.alive() if self.agent_of(node) is not None}
        return {name for name, filled in look.standing_requests(job).items() if not filled} | (
            set(look.standing_requests(job)) - there
        )


class SimSupplier:
    """The supplier: it compares what is wanted with what is there, whenever something wakes it."""

    def __init__(self, platform: SimPlatform) -> None:
        self.platform, self.clock, self.rng = platform, platform.clock, platform.rng
        self.up = self.connected = False
        self._life = 0
        self._stream = 0
        self._told = self.final = False
        """`final` once it was told that the job is over."""
        self._wanted: dict[RequestId, NodeWish] = {}
        self._avoid: tuple[Cordon, ...] = ()
        self._seen: set[RequestId] = set()
        self._asked: set[RequestId] = set()
        self._sent: dict[RequestId, Sighting] | None = None
        self._woken = False
        self._arrives_at = 0.0

    # ---- life and stream ----

    def come_up(self) -> None:
        if not self.up:
            self.up, self._life = True, self._life + 1
            self._wanted, self._seen, self._asked = {}, set(), set()
            self._knock(self._life)

    def die(self, away_s: Seconds) -> None:
        """Be killed; another is started after a while."""
        if self.up:
            self.up = False
            self._life += 1
            self.cut()
            self.clock.after(away_s, self.come_up)

    def cut(self) -> None:
        """Lose the stream; the coordinator notices, unless it is what died."""
        if self.connected:
            self.connected = False
            self._stream += 1
            self._say(SupplierLeft(at=self.clock.now))
            if self.up:
                self.clock.after(self.rng.uniform(0.05, 2.0), self._knock, self._life)

    def left_alone(self) -> None:
        """Lose the stream because the coordinator has gone; what it said before has arrived."""
        if self.connected and not self.final:
            self.connected = False
            self._stream += 1
            self._knock(self._life)

    def _knock(self, life: int) -> None:
        if life != self._life or self.connected or self.final:
            return
        coordinator = self.platform.cluster.coordinator
        if coordinator.closed is not None:  # It went while this supplier was away.
            self.final = self._told = True
            self._wanted = {}
            self._reconcile_soon()
            return
        if not coordinator.up:
            self.clock.after(self.rng.uniform(0.05, 2.0), self._knock, life)
            return
        self._stream += 1
        self.connected, self._told, self._sent = True, False, None
        self._say(SupplierJoined(at=self.clock.now, platform="sim"))
        self.wake()
        self._list_again(self._stream)

    def _say(self, event: AnyEvent) -> None:
        """Say something in its turn; now and then it takes a while."""
        late = self.rng.random() < self.platform.schedule.late_news
        delay_s = self.rng.uniform(0.1, 5.0) if late else 0.001
        if self.platform.cluster.healing:
            delay_s = 0.001
        self._arrives_at = max(self._arrives_at, self.clock.now + delay_s)
        stream = self._stream
        self.clock.at(self._arrives_at, self._arrive, event, stream)

    def _arrive(self, event: AnyEvent, stream: int) -> None:
        left = isinstance(event, SupplierLeft)
        if stream == self._stream or left:
            self.platform.cluster.coordinator.hear_supplier(event)
            if self.rng.random() < self.platform.schedule.doubled_news and not left:
                self.platform.cluster.coordinator.hear_supplier(event)

    def hear(self, plan: SupplyPlan) -> None:
        """Take a plan that is on its way; it is lost if the stream breaks meanwhile."""
        if self.connected:
            self.clock.after(0.001, self._take, plan, self._stream)

    def _take(self, plan: SupplyPlan, stream: int) -> None:
        if stream != self._stream or not self.up:
            return
        if plan.whole:
            self._wanted, self._told = {}, True
        self._wanted.update((wish.id, wish) for wish in plan.ask)
        for request in plan.release:
            self._wanted.pop(request, None)
        self._avoid, self.final = plan.avoid, plan.final
        if self.final:
            self._wanted, self._told = {}, True
        self._reconcile_soon()

    # ---- the comparison ----

    def wake(self) -> None:
        """Hear that something has changed, unless that gets lost."""
        lost = self.rng.random() < self.platform.schedule.lost_news
        if not lost or self.platform.cluster.healing:
            self._reconcile_soon()

    def _list_again(self, stream: int) -> None:
        if stream == self._stream and self.connected:
            self._reconcile_soon()
            self.clock.after(LIST_EVERY_S, self._list_again, stream)

    def _reconcile_soon(self, after_s: Seconds | None = None) -> None:
        coarse = self.platform.cluster.settings.coarse
        if not self._woken and self.up:
            self._woken = True
            usual_s = 0.5 if coarse else 0.01
            self.clock.after(usual_s if after_s is None else after_s, self._reconcile, self._life)

    def _reconcile(self, life: int) -> None:
        self._woken = False
        if life != self._life or not (self.connected or self.final):
            return
        if self.platform.refuses_until > self.clock.now:
            why = "the platform takes no requests"
            self._say(RequestsRefused(at=self.clock.now, requests=(), why=why))
            self._reconcile_soon(RETRY_S)
            return
        listed = {node.wish.id: node.sighting() for node in self.platform.nodes.values()}
        self._seen.update(listed)
        gone = [name for name in self._missing() if name not in listed]
        listed.update((name, Sighting(request=name, status="deleted")) for name in gone)
        self._tell(listed)
        if not self._told:
            return
        alive = [name for name, one in listed.items() if one.status in ALIVE]
        self.platform.release(name for name in alive if name not in self._wanted)
        unmade = self._unmade()
        if unmade:
            self.platform.make(unmade, self._avoid)
            self._asked.update(wish.id for wish in unmade)
            self._reconcile_soon()

    def _missing(self) -> Iterator[RequestId]:
        """Yield what is wanted and was seen or made."""
        for name in self._wanted if self._told else ():
            if name in self._seen or name in self._asked:
                yield name

    def _unmade(self) -> list[NodeWish]:
        return [
            wish
            for name, wish in self._wanted.items()
            if name not in self._seen and name not in self._asked and not wish.seen
        ]

    def _tell(self, listed: dict[RequestId, Sighting]) -> None:
        first, known = self._sent is None, self._sent or {}
        news = [one for name, one in listed.items() if known.get(name) != one]
        gone = [name for name in known if name not in listed]
        news += [Sighting(request=name, status="deleted") for name in gone]
        self._sent = listed
        if news or first:
            self._say(NodesSighted(at=self.clock.now, sightings=tuple(news), whole=first))
