"""Serves a coordinator on a real socket for tests, and connects peers to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from holdfast import __version__
from holdfast.clock import JobClock
from holdfast.coordinator.diagnosis import Examinations
from holdfast.coordinator.journal import Journal, replay
from holdfast.coordinator.memories import Memories
from holdfast.coordinator.server import Coordinator
from holdfast.core.job import Job
from holdfast.messages.actions import StartWorkers
from holdfast.messages.events import CoordinatorRestarted, NodeJoined, Progress
from holdfast.messages.records import NodeSpec, RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import (
    PROTOCOL,
    Ack,
    Beat,
    FromCoordinator,
    Hello,
    Lease,
    Rejected,
    Sent,
    Welcome,
)
from holdfast.wire import framing
from holdfast.wire.ends import address_of

TOKEN = "a-token"
LIMIT_S = 50.0
BEAT_S = 0.5
SPEC = NodeSpec(host="h", address="127.0.0.1", slots=1, pid=1)


def hello(node: str = "good", **other: Any) -> Hello:
    said: dict[str, Any] = {
        "protocol": PROTOCOL,
        "token": TOKEN,
        "node": NodeId(node),
        "round": RoundNumber(0),
        "busy": False,
        "terms": Terms(max_nodes=1),
        "version": __version__,
    }
    return Hello(**{**said, **other})


class Peer:
    """One connection to the coordinator."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder: framing.FrameDecoder[Any] = framing.FrameDecoder(FromCoordinator)  # type: ignore[arg-type]
        self._heard: list[Any] = []

    def send(self, *messages: msgspec.Struct) -> None:
        self.writer.write(b"".join(map(framing.encode, messages)))

    async def hear(self) -> Any:
        """The next message; None when the stream has ended."""
        while not self._heard:
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), LIMIT_S)
            except ConnectionError:
                return None
            if not data:
                return None
            self._heard = self._decoder.feed(data)
        return self._heard.pop(0)

    async def hear_a(self, kind: type) -> Any:
        while not isinstance(message := await self.hear(), kind):
            assert message is not None, f"the stream ended before a {kind.__name__} came"
        return message

    async def is_cut_off(self) -> bool:
        while (message := await self.hear()) is not None:
            assert isinstance(message, Rejected | Ack | Welcome | Lease | StartWorkers)
        return True

    def keep_beating(self, every_s: float = BEAT_S) -> None:
        """Beat as an agent does, until the connection is closed."""
        if not self.writer.transport.is_closing():
            self.send(Beat(number=1))
            asyncio.get_running_loop().call_later(every_s, self.keep_beating, every_s)

    def close(self) -> None:
        self.writer.transport.abort()


class Served:
    """A coordinator that is being served, and its address."""

    def __init__(self, coordinator: Coordinator, port: int, serving: asyncio.Task[int]) -> None:
        self.coordinator = coordinator
        self.port = port
        self.serving = serving
        self.peers: list[Peer] = []

    @property
    def job(self) -> Job:
        assert self.coordinator.job is not None
        return self.coordinator.job

    async def connect(self) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        self.peers.append(peer)
        return peer

    async def greet(
        self, node: str = "good", direct: bool = False, **other: Any
    ) -> tuple[Peer, Welcome]:
        """A node's stream; `direct` if it says which end of it is its own, as agents do."""
        peer = await self.connect()
        address = address_of(peer.writer.get_extra_info("sockname")) if direct else ""
        peer.send(hello(node, address=address, **other))
        return peer, await peer.hear_a(Welcome)

    async def join(self, node: str = "good", direct: bool = False) -> Peer:
        """An agent that has its part of the first round."""
        peer, _ = await self.greet(node, direct)
        peer.send(Sent(number=1, event=joined(node)))
        await peer.hear_a(StartWorkers)
        assert await peer.hear() == Ack(number=1)
        return peer


def joined(node: str = "good") -> NodeJoined:
    return NodeJoined(at=Time(1.0), node=NodeId(node), spec=SPEC, store_port=1)


def stepped(step: int, node: str = "good") -> Progress:
    at = Time(JobClock().now())
    told = RankProgress(rank=Rank(0), step=StepNumber(step), steps=step, first_at=at, last_at=at)
    return Progress(at=at, node=NodeId(node), round=RoundNumber(1), ranks=(told,))


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[Served]:
    before = replay(path) if path.exists() else None
    journal = Journal(path)
    clock = JobClock(before.at if before else Time(0.0))
    examinations, memories = Examinations(path.parent), Memories(path.parent / "pauses.json")
    coordinator = Coordinator("j", None, journal, clock, TOKEN, examinations, memories)
    restarted = None
    if before is not None:
        coordinator.job, coordinator.acked = before.job, before.acked
        restarted = CoordinatorRestarted(at=clock.now())
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(coordinator.serve(listener, restarted=restarted))
    here = Served(coordinator, listener.getsockname()[1], serving)
    try:
        yield here
    finally:
        for peer in here.peers:
            peer.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        journal.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 4 * LIMIT_S))
