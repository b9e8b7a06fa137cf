"""The coordinator on a real socket: what strangers do to it (nothing), and what agents can rely on."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.clock import JobClock
from holdfast.coordinator import stream as streams
from holdfast.coordinator.diagnosis import Examinations
from holdfast.coordinator.journal import Journal, replay
from holdfast.coordinator.memories import Memories
from holdfast.coordinator.server import Coordinator
from holdfast.core.job import Job
from holdfast.core.ranks.events import RanksMachine
from holdfast.core.replay import TRIES
from holdfast.messages.actions import Finish, StartWorkers, StopWorkers
from holdfast.messages.events import (
    AnyEvent,
    CoordinatorRestarted,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    Progress,
    StreamEnded,
    Tick,
    WorkerExited,
)
from holdfast.messages.records import NodeSpec, RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import PROTOCOL, Ack, FromCoordinator, Hello, Rejected, Sent, Welcome
from holdfast.wire import framing

TOKEN = "a-token"
LIMIT_S = 10.0
SPEC = NodeSpec(host="h", address="127.0.0.1", slots=1, pid=1)


def hello(node: str = "good", **other: Any) -> Hello:
    said: dict[str, Any] = {
        "protocol": PROTOCOL,
        "token": TOKEN,
        "node": NodeId(node),
        "round": RoundNumber(0),
        "busy": False,
        "terms": Terms(max_nodes=1),
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
            assert isinstance(message, Rejected | Ack | Welcome | StartWorkers)
        return True

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

    async def greet(self, node: str = "good", **other: Any) -> tuple[Peer, Welcome]:
        peer = await self.connect()
        peer.send(hello(node, **other))
        return peer, await peer.hear_a(Welcome)

    async def join(self, node: str = "good") -> Peer:
        """An agent that has its part of the first round."""
        peer, _ = await self.greet(node)
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


# ---- strangers ----

Stranger = Callable[[Served, Peer], Coroutine[Any, Any, None]]


async def wrong_token(here: Served, peer: Peer) -> None:
    peer.send(hello("evil", token="wrong"))
    assert await peer.hear() == Rejected(reason="wrong token for this job")
    assert await peer.is_cut_off()


async def no_token(here: Served, peer: Peer) -> None:
    peer.send(hello("evil", token=""))
    assert isinstance(await peer.hear(), Rejected)
    assert await peer.is_cut_off()


async def events_without_a_hello(here: Served, peer: Peer) -> None:
    peer.send(Sent(number=1, event=joined("evil")))
    assert await peer.is_cut_off()


async def another_protocol(here: Served, peer: Peer) -> None:
    peer.send(hello("evil", protocol=99))
    refused = await peer.hear()
    assert "99" in refused.reason
    assert await peer.is_cut_off()


async def plain_http(here: Served, peer: Peer) -> None:
    peer.writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await peer.is_cut_off()


async def half_a_frame_then_gone(here: Served, peer: Peer) -> None:
    peer.writer.write(framing.encode(hello("evil"))[:-3])
    await peer.writer.drain()
    peer.writer.close()


async def an_oversized_length(here: Served, peer: Peer) -> None:
    peer.writer.write(b"\xff\xff\xff\xff" + b"x" * 1000)
    assert await peer.is_cut_off()


async def random_bytes(here: Served, peer: Peer) -> None:
    peer.writer.write(b"\x00\x00\x01\x00" + os.urandom(256))
    assert await peer.is_cut_off()


async def a_valid_frame_of_another_shape(here: Served, peer: Peer) -> None:
    body = msgspec.msgpack.encode({"type": "Hello", "token": 5, "node": ["x"]})
    peer.writer.write(len(body).to_bytes(4, "big") + body)
    assert await peer.is_cut_off()


async def a_pickle(here: Served, peer: Peer) -> None:
    body = b"cposix\nsystem\n(S'touch /tmp/holdfast-owned'\ntR."
    peer.writer.write(len(body).to_bytes(4, "big") + body)
    assert await peer.is_cut_off()
    assert not Path("/tmp/holdfast-owned").exists()


async def nothing_at_all(here: Served, peer: Peer) -> None:
    peer.close()


async def hello_twice(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"), hello("evil"))
    assert await peer.is_cut_off()


async def speaking_for_another(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    peer.send(Sent(number=1, event=StreamEnded(at=Time(1), node=NodeId("good"))))
    assert await peer.is_cut_off()


async def an_event_of_the_coordinators_own(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    peer.send(Sent(number=1, event=Tick(at=Time(1))))
    assert await peer.is_cut_off()


async def a_time_that_is_no_number(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    event = NodeLeft(at=Time(float("nan")), node=NodeId("evil"), round=RoundNumber(0))
    peer.send(Sent(number=1, event=event))
    assert await peer.is_cut_off()


async def a_rank_of_another_node(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    progress = RankProgress(rank=Rank(0), step=StepNumber(10**6))
    event = WorkerExited(
        at=Time(1),
        node=NodeId("evil"),
        round=RoundNumber(1),
        rank=Rank(0),
        code=1,
        progress=progress,
    )
    peer.send(Sent(number=1, event=event))
    assert await peer.hear() == Ack(number=1)


async def leaving_without_having_joined(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    event = NodeLeaving(at=Time(1), node=NodeId("evil"), reason="x", code=1)
    peer.send(Sent(number=1, event=event))
    assert await peer.hear_a(Ack) == Ack(number=1)


STRANGERS: list[Stranger] = [
    wrong_token,
    no_token,
    events_without_a_hello,
    another_protocol,
    plain_http,
    half_a_frame_then_gone,
    an_oversized_length,
    random_bytes,
    a_valid_frame_of_another_shape,
    a_pickle,
    nothing_at_all,
    hello_twice,
    speaking_for_another,
    an_event_of_the_coordinators_own,
    a_time_that_is_no_number,
    a_rank_of_another_node,
    leaving_without_having_joined,
]


def known(job: Job) -> bytes:
    """All that the job knows, but for how many events it has heard and refused."""
    return msgspec.json.encode(msgspec.structs.replace(job, events=0, refused={}))


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda each: each.__name__)
def test_a_stranger_harms_neither_the_job_nor_its_agents(
    stranger: Stranger, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            before = known(here.job)
            await stranger(here, await here.connect())
            assert known(here.job) == before
            good.send(Sent(number=2, event=stepped(5)))
            await good.hear_a(Ack)
            assert here.job.highest == 5
            assert not here.serving.done()
        assert replay(tmp_path / "journal.db") is not None

    run(scenario())


def test_who_says_no_hello_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HELLO_LIMIT_S", 0.05)

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            peer = await here.connect()
            assert await peer.is_cut_off()

    run(scenario())


def test_who_never_reads_is_cut_off_and_others_are_not_kept_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_UNSENT_BYTES", 1 << 16)

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            deaf, _ = await here.greet("deaf")
            deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
            stream = here.coordinator._streams[NodeId("deaf")]
            stop = StopWorkers(
                node=NodeId("deaf"), round=RoundNumber(1), grace_s=0.0, why="x" * 500_000
            )
            for _ in range(100):
                stream.send(stop)
            assert stream.transport.is_closing()
            good.send(Sent(number=2, event=stepped(5)))
            assert await good.hear_a(Ack) == Ack(number=2)

    run(scenario())


def test_a_silent_stranger_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.connect()
            good = await here.join()
            leaving = NodeLeaving(at=Time(1), node=NodeId("good"), reason="told to", code=75)
            good.send(Sent(number=2, event=leaving))
            assert (await good.hear_a(Finish)).code == 75
            left = NodeLeft(at=Time(1), node=NodeId("good"), round=RoundNumber(1))
            good.send(Sent(number=3, event=left))
            assert await good.hear_a(Ack) == Ack(number=2)
            assert await good.hear_a(Ack) == Ack(number=3)
            assert await asyncio.wait_for(asyncio.shield(here.serving), 3.0) == 75

    run(scenario())


# ---- agents ----


def test_an_event_sent_again_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def scenario() -> None:
        async with served(path) as here:
            good = await here.join()
            event: AnyEvent = stepped(5)
            for _ in range(3):
                good.send(Sent(number=2, event=event))
                assert await good.hear_a(Ack) == Ack(number=2)
            good.close()
            again, welcome = await here.greet(round=RoundNumber(1), busy=True)
            assert welcome.acked == 2
            again.send(Sent(number=1, event=joined()), Sent(number=3, event=stepped(6)))
            assert await again.hear_a(Ack) == Ack(number=3)
            assert here.job.incidents == []
            assert here.job.highest == 6

    run(scenario())


def test_everything_acted_upon_is_in_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def scenario() -> None:
        async with served(path) as here:
            good = await here.join()
            for number in range(2, 50):
                good.send(Sent(number=number, event=stepped(number)))
            while (await good.hear_a(Ack)).number < 49:
                pass
            found = replay(path)
            assert found is not None
            assert msgspec.json.encode(found.job) == msgspec.json.encode(here.job)

    run(scenario())


def test_a_restarted_coordinator_welcomes_its_agents_with_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def scenario() -> None:
        async with served(path) as here:
            good = await here.join()
            good.send(Sent(number=2, event=stepped(5)))
            await good.hear_a(Ack)
        async with served(path) as here:
            again, welcome = await here.greet(round=RoundNumber(1), busy=True)
            assert welcome.acked == 2
            again.send(Sent(number=3, event=stepped(7)))
            assert await again.hear_a(Ack) == Ack(number=3)
            assert here.job.state.name == "running"
            assert here.job.incidents == []
            assert here.job.highest == 7
            assert here.job.membership.absent == {}

    run(scenario())


def test_an_agent_that_comes_back_takes_over_from_its_older_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            older = await here.join()
            newer, _ = await here.greet(round=RoundNumber(1), busy=True)
            assert await older.is_cut_off()
            newer.send(Sent(number=2, event=stepped(5)))
            assert await newer.hear_a(Ack) == Ack(number=2)
            assert here.job.membership.absent == {}

    run(scenario())


def test_an_agent_that_missed_its_start_is_told_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            good.close()
            again, _ = await here.greet(round=RoundNumber(0))
            assert (await again.hear_a(StartWorkers)).part.round == 1

    run(scenario())


def test_a_node_whose_stream_ends_is_given_up_soon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            good.close()
            later, _ = await here.greet("later")
            later.send(Sent(number=1, event=joined("later")))
            start = await later.hear_a(StartWorkers)
            assert start.part.round == 2
            assert here.job.incidents[0].kind == "node"

    run(scenario())


def test_a_full_disk_does_not_stop_the_job_and_the_journal_catches_up(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"

    async def scenario() -> None:
        async with served(path) as here:
            good = await here.join()
            db = here.coordinator.journal._db
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count={pages}")
            for number in range(2, 100):
                good.send(Sent(number=number, event=stepped(number)))
                await good.hear_a(Ack)
            assert here.job.highest == 99
            behind = replay(path)
            assert behind is not None
            assert behind.job.highest < 99
            db.execute("PRAGMA max_page_count=100000")
            good.send(Sent(number=100, event=stepped(100)))
            await good.hear_a(Ack)
            found = replay(path)
            assert found is not None
            assert msgspec.json.encode(found.job) == msgspec.json.encode(here.job)

    run(scenario())


def test_an_error_of_the_coordinators_own_ends_it_so_that_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()

            def broken(*_: object) -> None:
                raise RuntimeError("a bug of ours")

            monkeypatch.setattr(here.coordinator.journal, "append", broken)
            good.send(Sent(number=2, event=stepped(5)))
            with pytest.raises(RuntimeError, match="a bug of ours"):
                await asyncio.wait_for(asyncio.shield(here.serving), 3.0)

    run(scenario())


# ---- errors of our own ---------------------------------------------------------------------------


def break_progress(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have the next reports of progress raise in the middle of being handled."""
    handle, calls = RanksMachine.on_progress, [0]

    def raising(self: RanksMachine, *arguments: Any) -> Any:
        handle(self, *arguments)
        calls[0] += 1
        if calls[0] <= times:
            raise ZeroDivisionError("a bug of our own")
        return handle(self, *arguments)

    raising.rule = handle.rule  # type: ignore[attr-defined]
    monkeypatch.setattr(RanksMachine, "on_progress", raising)


@pytest.mark.parametrize("times", [1, TRIES])
def test_a_handler_that_raises_costs_neither_the_job_nor_its_agents(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.db"

    async def scenario() -> None:
        async with served(path) as here:
            good = await here.join()
            break_progress(monkeypatch, times)
            here.job.__dict__.clear()  # Who hears what was looked up before.
            good.send(Sent(number=2, event=stepped(5)))
            assert await good.hear_a(Ack) == Ack(number=2)
            assert here.job.highest == (5 if times < TRIES else 0), "dropped when it always fails"
            good.send(Sent(number=3, event=stepped(6)))
            await good.hear_a(Ack)
            assert here.job.highest == 6
            assert [one.kind for one in here.job.incidents] == ["internal"] * times
            monkeypatch.undo()
            again = replay(path)
            assert again is not None
            assert msgspec.json.encode(again.job) == msgspec.json.encode(here.job)
            assert again.acked == {"good": 3}

    asyncio.run(scenario())
