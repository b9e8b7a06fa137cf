"""A model of an engine: nodes in a dictionary, with all that engines do wrong.

It is the first user of the chaos harness, and an example for the fakes of real engines: it is slow, it
refuses, it makes a request and fails before it says so, it forgets what is over, it says nothing when
something has changed, and its nodes end in every way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec import Struct

from holdfast.errors import PlatformError
from holdfast.messages.supply import (
    Cordon,
    ExitReason,
    NodeWish,
    RequestId,
    SeenStatus,
    Sighting,
)

ENDS: tuple[tuple[ExitReason | None, int | None], ...] = (
    *(("preempted", None), ("evicted", None), ("oom", None), ("hardware", None)),
    *((None, 137), (None, 143), (None, 75), (None, 1), (None, 134), (None, None), ("fatal", None)),
)
"""How nodes end: the engine's word, and the exit code."""


class ModelNode(Struct):
    """One node of the engine."""

    wish: NodeWish
    host: str
    status: SeenStatus = "pending"
    reason: ExitReason | None = None
    code: int | None = None
    leaving: bool = False

    @property
    def alive(self) -> bool:
        return self.status in ("pending", "running")


class ModelEngine:
    """All nodes, and the clients that see them."""

    def __init__(self) -> None:
        self.faults: Mapping[str, Callable[[Random], None]] = {
            "ends": self._end_some,
            "mass": self._end_all,
            "deleted": self._delete,
            "refuses": self._refuse,
            "half made": self._make_half,
            "slow": self._be_slow,
            "silent": self._say_nothing,
            "forgets": self._forget,
        }
        self.made: dict[RequestId, ModelNode] = {}
        self.refusals = 0
        self.half = False
        self.silent = False
        self.delay_s = 0.0
        self.client = ModelPlatform
        """The kind of client that it has."""
        self._hosts = 0
        self._clients: list[ModelPlatform] = []

    def open(self) -> ModelPlatform:
        self._clients = [self.client(self)]
        return self._clients[0]

    def nodes(self) -> Sequence[RequestId]:
        return [name for name, node in self.made.items() if node.alive]

    def settle(self) -> None:
        self.refusals, self.half, self.delay_s, self.silent = 0, False, 0.0, False
        for name, node in list(self.made.items()):
            if node.leaving and node.alive:
                del self.made[name]
            elif node.status == "pending":
                node.status = "running"
        self._news()

    def new_host(self) -> str:
        self._hosts += 1
        return f"host-{self._hosts}"

    # ---- faults ----

    def _alive(self, rng: Random, most: int) -> list[ModelNode]:
        alive = [node for node in self.made.values() if node.alive]
        return rng.sample(alive, min(len(alive), most))

    def _end(self, rng: Random, node: ModelNode) -> None:
        node.reason, node.code = rng.choice(ENDS)
        node.status = "failed"
        self._news()

    def _end_some(self, rng: Random) -> None:
        for node in self._alive(rng, 1):
            self._end(rng, node)

    def _end_all(self, rng: Random) -> None:
        for node in self._alive(rng, len(self.made)):
            node.status, node.reason = "failed", "evicted"
        self._news()

    def _delete(self, rng: Random) -> None:
        for node in self._alive(rng, 1):
            del self.made[node.wish.id]
        self._news()

    def _refuse(self, rng: Random) -> None:
        self.refusals = rng.choice((1, 2, 5))

    def _make_half(self, rng: Random) -> None:
        self.half = True

    def _be_slow(self, rng: Random) -> None:
        self.delay_s = rng.choice((0.1, 2.0, 20.0))

    def _say_nothing(self, rng: Random) -> None:
        self.silent = True

    def _forget(self, rng: Random) -> None:
        for name in [name for name, node in self.made.items() if not node.alive]:
            del self.made[name]

    def _news(self) -> None:
        if not self.silent:
            for client in self._clients:
                client.news.set()


class ModelPlatform:
    """A client of the model, as a platform."""

    name = "model"
    together = False

    def __init__(self, engine: ModelEngine) -> None:
        self._engine = engine
        self.news = asyncio.Event()

    async def list(self) -> Sequence[Sighting]:
        await asyncio.sleep(self._engine.delay_s)
        return [self._sighting(name, node) for name, node in self._engine.made.items()]

    def _sighting(self, name: RequestId, node: ModelNode) -> Sighting:
        return Sighting(
            request=name,
            status=node.status,
            reason=node.reason,
            code=node.code,
            host=node.host,
        )

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        engine = self._engine
        self._refuse()
        for number, wish in enumerate(wishes):
            await asyncio.sleep(engine.delay_s)
            if engine.half and number:
                rest = tuple(one.id for one in wishes[number:])
                raise PlatformError("the connection was reset", rest)
            if wish.id not in engine.made:
                engine.made[wish.id] = ModelNode(wish, engine.new_host())
        await asyncio.sleep(engine.delay_s)
        if engine.half:
            raise PlatformError("the connection was reset")

    async def release(self, requests: Sequence[RequestId]) -> None:
        await asyncio.sleep(self._engine.delay_s)
        self._refuse()
        for request in requests:
            if request in self._engine.made:
                self._engine.made[request].leaving = True

    async def changed(self) -> None:
        await self.news.wait()
        self.news.clear()

    def _refuse(self) -> None:
        if self._engine.refusals:
            self._engine.refusals -= 1
            raise PlatformError("the quota is used up")
