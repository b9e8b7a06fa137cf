"""A Ray cluster in a dictionary: actors by name, and hosts that die, with what Ray does wrong.

It stands where `RayEngine` stands, so all of the platform above Ray's own calls is real. What it does
was seen of Ray 2.60 (`tests/engines/ray_cluster.py`): an actor on a host that died cannot be reached
until Ray has noticed, and is still listed; one whose launcher has ended stays, with its resources,
until somebody removes it or it ends by itself; a name is free again once its actor is dead.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

from machine import SETTINGS
from msgspec import Struct

from holdfast.errors import PlatformError
from holdfast.messages.supply import RequestId
from holdfast.platforms.opening import NodeOrders
from holdfast.platforms.ray import RayPlatform
from holdfast.platforms.ray_engine import ActorTerms, Death, HostView
from holdfast.platforms.ray_node import NodeState, RayNodeStart

JOB = "test"
COMMAND = (sys.executable, "-m", "holdfast", "run", "--coordinator=10.0.0.1:29400", "train.py")
NODE_DIED = Death("ActorDiedError", "The actor died unexpectedly.\nThe actor's node has died.")
KILLED = Death("ActorDiedError", "The actor is dead because it was killed by `ray.kill`.")
OOM = Death("OutOfMemoryError", "Task was killed due to the node running low on memory.")
PREEMPTED = Death("ActorDiedError", "The actor's node has died.", preempted=True)
CODES = (0, 1, 7, 75, 137, 143, 201, 247)
HOUR_S = 3600.0


class FakeActor(Struct):
    """One actor, as the cluster has it."""

    start: RayNodeStart
    terms: ActorTerms
    host: str = ""
    """Where it is; empty while it is pending."""
    code: int | None = None
    reachable: bool = True
    told: int = 0
    """How often its launcher was told to leave."""


class FakeRay:
    """A cluster; all clients are this object, as all drivers see the same cluster."""

    def __init__(self, *hosts: HostView, autoscales: bool = False) -> None:
        self.faults: Mapping[str, Callable[[Random], None]] = {
            "launcher ends": self._launcher_ends,
            "host dies": self._host_dies,
            "ray.kill": self._kill_one,
            "out of memory": self._oom,
            "unreachable": self._cut_off,
            "head away": self._head_away,
            "slow": self._be_slow,
            "half made": self._make_half,
            "forgets": self._forget,
        }
        self.actors: dict[str, FakeActor] = {}
        self.dead: dict[str, Death] = {}
        self.fixed_hosts = list(hosts)
        self.autoscales = autoscales
        self.places = True
        """Whether actors that are created run at once."""
        self.refusals = 0
        self.half = False
        self.delay_s = 0.0
        self.removed: list[str] = []
        self._numbers = 0
        self._news = asyncio.Event()

    # ---- for the harness ----

    def open(self) -> RayPlatform:
        return self.platform()

    def platform(self, terms: ActorTerms | None = None) -> RayPlatform:
        """A platform as a supplier that was started just now has it."""
        return RayPlatform(orders(), self, terms or ActorTerms(cpus=1))

    def nodes(self) -> Sequence[RequestId]:
        return [name.partition("/")[2] for name, actor in self.actors.items() if actor.code is None]

    def settle(self) -> None:
        self.refusals, self.half, self.delay_s = 0, False, 0.0
        for name, actor in list(self.actors.items()):
            if not actor.reachable and actor.host.startswith("dying"):
                self.die(name, NODE_DIED)
            actor.reachable = True
            if actor.told and actor.code is None:
                actor.code = 75
            elif not actor.host:
                self.place(name)
        self.news()

    # ---- what happens in the cluster ----

    def place(self, name: str, host: str = "") -> None:
        self._numbers += 1
        self.actors[name].host = host or f"host-{self._numbers}"
        self.news()

    def end(self, name: str, code: int) -> None:
        self.actors[name].code = code
        self.news()

    def die(self, name: str, death: Death) -> None:
        """End an actor; nobody finds its name any more, and who waits for it hears why."""
        del self.actors[name]
        self.dead[name] = death
        self.news()

    def news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _some(self, rng: Random) -> list[str]:
        alive = [name for name, actor in self.actors.items() if actor.code is None]
        return rng.sample(alive, min(1, len(alive)))

    def _launcher_ends(self, rng: Random) -> None:
        for name in self._some(rng):
            self.end(name, rng.choice(CODES))

    def _host_dies(self, rng: Random) -> None:
        for name in self._some(rng):
            self.actors[name].reachable = False
            self.actors[name].host = f"dying-{self.actors[name].host}"
            self.news()

    def _kill_one(self, rng: Random) -> None:
        for name in self._some(rng):
            self.die(name, KILLED)

    def _oom(self, rng: Random) -> None:
        for name in self._some(rng):
            self.die(name, rng.choice((OOM, PREEMPTED)))

    def _cut_off(self, rng: Random) -> None:
        for name in self._some(rng):
            self.actors[name].reachable = False
            self.news()

    def _head_away(self, rng: Random) -> None:
        self.refusals = rng.choice((1, 2, 6))

    def _be_slow(self, rng: Random) -> None:
        self.delay_s = rng.choice((0.1, 2.0, 20.0))

    def _make_half(self, rng: Random) -> None:
        self.half = True

    def _forget(self, rng: Random) -> None:
        """Actors whose launcher has ended end themselves, as nobody removed them."""
        for name in [name for name, actor in self.actors.items() if actor.code is not None]:
            self.die(name, Death("ActorDiedError", "The actor exited."))

    # ---- RayClient ----

    async def names(self) -> Sequence[str]:
        await self._head()
        return list(self.actors)

    async def create(self, name: str, start: RayNodeStart, terms: ActorTerms) -> None:
        await self._head()
        if name not in self.actors:
            self.actors[name] = FakeActor(start, terms)
            self.dead.pop(name, None)
            if self.places:
                self.place(name)
        if self.half:
            self.half = False
            raise PlatformError("Ray does not answer: the connection was reset")

    async def runs(self, name: str) -> NodeState | Death | None:
        return await self._answer(name, lambda actor: bool(actor.host))

    async def ended(self, name: str) -> NodeState | Death | None:
        return await self._answer(name, lambda actor: actor.code is not None)

    async def leave(self, name: str) -> None:
        await self._head()
        if name in self.actors and self.actors[name].reachable:
            self.actors[name].told += 1

    async def remove(self, name: str) -> None:
        await self._head()
        if name in self.actors:
            self.removed.append(name)
            self.die(name, KILLED)

    async def hosts(self) -> Sequence[HostView]:
        await self._head()
        return self.fixed_hosts or [HostView("any", {"CPU": 64.0, "GPU": 8.0})]

    async def scales(self) -> bool:
        return self.autoscales

    async def _head(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.refusals:
            self.refusals -= 1
            raise PlatformError("Ray does not answer: no connection to the head")

    async def _answer(
        self, name: str, ready: Callable[[FakeActor], bool]
    ) -> NodeState | Death | None:
        while True:
            if name not in self.actors:
                return self.dead.get(name, Death("unknown", "Ray does not know it any more"))
            actor = self.actors[name]
            if not actor.reachable:
                return None
            if ready(actor):
                return NodeState(host=actor.host, code=actor.code)
            await self._news.wait()


def orders(**environ: str) -> NodeOrders:
    return NodeOrders(
        job=JOB,
        settings=SETTINGS,
        command=COMMAND,
        environ={"HOLDFAST_TOKEN": "a-token", "HOME": "/root", **environ},
        records=Path("/nonexistent"),
        lifeline=-1,
        limit_s=5.0,
    )
