"""A coordinator that does not find the journal of its job decides nothing; one that finds most of it
goes on with that."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from serving import LIMIT_S, TOKEN, Peer, hello, joined, run, stepped

from holdfast.coordinator import lost
from holdfast.coordinator.journal import VERSION, Journal, replay
from holdfast.coordinator.main import CoordinatorOrders, _run
from holdfast.core.replay import Entry
from holdfast.jobhome import JobFile, JobHome
from holdfast.messages.actions import StartWorkers, StopWorkers
from holdfast.messages.events import JobOpened, NodeReady
from holdfast.messages.exits import EXIT_FAILED
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, RoundNumber, Time
from holdfast.messages.wire import PROTOCOL, Ack, AskWhy, Rejected, Sent, Visit, Welcome

GOOD = NodeId("good")


@pytest.fixture
def home(tmp_path: Path) -> JobHome:
    found = JobHome(tmp_path / "j")
    found.path.mkdir()
    found.write_job_file(JobFile(job="j", host="127.0.0.1", port=1, token=TOKEN, pid=1))
    return found


class Running:
    """A coordinator of that home, and its address."""

    def __init__(self, port: int, task: asyncio.Task[int]) -> None:
        self.task = task
        self._port = port
        self._peers: list[Peer] = []

    async def connect(self) -> Peer:
        self._peers.append(Peer(*await asyncio.open_connection("127.0.0.1", self._port)))
        return self._peers[-1]

    async def greet(self, node: str = "good", **other: Any) -> tuple[Peer, Welcome]:
        peer = await self.connect()
        peer.send(hello(node, **other))
        return peer, await peer.hear_a(Welcome)

    async def end(self) -> None:
        """As if the process were killed."""
        for peer in self._peers:
            peer.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def coordinator(home: JobHome) -> AsyncIterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    orders = CoordinatorOrders(
        home=home,
        listener=listener,
        token=TOKEN,
        tls=None,
        terms=None,
        since_monotonic=time.monotonic(),
    )
    task = asyncio.ensure_future(_run(orders))
    here = Running(listener.getsockname()[1], task)
    try:
        yield here
    finally:
        await here.end()
        listener.close()


async def train(home: JobHome, steps: int = 5) -> str:
    """Have a job begin and train for some steps; return its id."""
    async with coordinator(home) as here:
        good, welcome = await here.greet()
        good.send(Sent(number=1, event=joined()))
        await good.hear_a(StartWorkers)
        for number in range(2, steps + 2):
            good.send(Sent(number=number, event=stepped(number)))
        while (await good.hear_a(Ack)).number < steps + 1:
            pass
        return welcome.job_id


def test_the_id_of_a_job_is_noted_in_its_home(home: JobHome) -> None:
    async def scenario() -> None:
        assert home.opened_id() == ""
        job_id = await train(home)
        assert home.opened_id() == job_id

    run(scenario())


def test_an_id_that_was_not_noted_before_the_coordinator_died_is_noted_after_its_restart(
    home: JobHome,
) -> None:
    async def scenario() -> None:
        job_id = await train(home)
        home.write_job_file(JobFile(job="j", host="127.0.0.1", port=1, token=TOKEN, pid=1))
        async with coordinator(home) as here:
            await here.greet(job_id=job_id, round=RoundNumber(1), busy=True, stream=2)
        assert home.opened_id() == job_id

    run(scenario())


# ---- the whole journal is lost ----


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def remove(path: Path) -> None:
    for each in path.parent.glob("journal.db*"):
        each.unlink()


def deleted(path: Path) -> None:
    remove(path)


def emptied(path: Path) -> None:
    remove(path)
    path.touch()


def without_events(path: Path) -> None:
    execute(path, "DELETE FROM events", "DELETE FROM snapshots")


def another_jobs(path: Path) -> None:
    remove(path)
    journal = Journal(path)
    opened = JobOpened(at=Time(1.0), job="j", id="another", terms=Terms())
    journal.append([Entry(Time(1.0), opened)])
    journal.close()


def garbage(path: Path) -> None:
    remove(path)
    path.write_bytes(b"this is no database" * 1000)


def of_a_future_version(path: Path) -> None:
    execute(path, f"PRAGMA user_version={VERSION + 1}")


def without_its_beginning(path: Path) -> None:
    execute(path, "DELETE FROM events WHERE number = 1")


LOSSES: list[Callable[[Path], None]] = [
    deleted,
    emptied,
    without_events,
    another_jobs,
    garbage,
    of_a_future_version,
    without_its_beginning,
]


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_without_its_journal_a_coordinator_refuses_every_node_and_writes_none(
    lose: Callable[[Path], None], home: JobHome
) -> None:
    async def scenario() -> None:
        job_id = await train(home)
        lose(home.journal)
        before = content(home.journal)
        async with coordinator(home) as here:
            trains = {"job_id": job_id, "round": RoundNumber(1), "busy": True, "stream": 2}
            for greeting in (hello(**trains), hello("new"), hello("other", job_id="another")):
                peer = await here.connect()
                peer.send(greeting)
                refused = await peer.hear_a(Rejected)
                assert refused.lost, greeting.node
                assert "the journal of job j is lost" in refused.reason
                assert await peer.is_cut_off()
            visitor = await here.connect()
            visitor.send(Visit(protocol=PROTOCOL, token=TOKEN, question=AskWhy()))
            assert "the journal of job j is lost" in (await visitor.hear_a(Rejected)).reason
            assert not here.task.done()
        assert content(home.journal) == before
        assert home.opened_id() == job_id

    run(scenario())


def test_a_stranger_learns_nothing_from_a_coordinator_without_a_journal(home: JobHome) -> None:
    async def scenario() -> None:
        await train(home)
        deleted(home.journal)
        async with coordinator(home) as here:
            peer = await here.connect()
            peer.send(hello(token="wrong"))
            refused = await peer.hear_a(Rejected)
            assert not refused.lost
            assert refused.reason == "wrong token for this job"

    run(scenario())


def test_it_ends_when_no_node_has_asked_for_a_while(
    home: JobHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost, "ASKED_WITHIN_S", 0.2)

    async def scenario() -> None:
        await train(home)
        deleted(home.journal)
        async with coordinator(home) as here:
            peer = await here.connect()
            peer.send(hello())
            assert (await peer.hear_a(Rejected)).lost
            assert await asyncio.wait_for(here.task, LIMIT_S) == EXIT_FAILED

    run(scenario())


def test_a_journal_that_was_put_back_is_used_again(home: JobHome) -> None:
    async def scenario() -> None:
        job_id = await train(home)
        kept = content(home.journal)
        assert kept is not None
        deleted(home.journal)
        async with coordinator(home) as here:
            peer = await here.connect()
            peer.send(hello())
            assert (await peer.hear_a(Rejected)).lost
        home.journal.write_bytes(kept)
        async with coordinator(home) as here:
            _, welcome = await here.greet(job_id=job_id, round=RoundNumber(1), busy=True, stream=3)
            assert welcome.acked == 6

    run(scenario())


def test_a_job_that_never_opened_has_no_journal_to_miss(home: JobHome) -> None:
    async def scenario() -> None:
        for _ in range(2):
            async with coordinator(home) as here:
                await asyncio.sleep(0)
                assert not here.task.done()
        assert await train(home)

    run(scenario())


# ---- some of its rows are lost ----


def damaged_row(path: Path) -> None:
    execute(path, "UPDATE events SET event = 'nonsense' WHERE number = 4")


def missing_row(path: Path) -> None:
    execute(path, "DELETE FROM events WHERE number = 4")


def row_of_a_future_version(path: Path) -> None:
    execute(path, """UPDATE events SET event = '{"type":"NodeYawned"}' WHERE number = 4""")


@pytest.mark.parametrize(
    "damage", [damaged_row, missing_row, row_of_a_future_version], ids=lambda one: one.__name__
)
def test_a_journal_that_lost_an_event_is_used_and_the_round_is_given_up_once(
    damage: Callable[[Path], None], home: JobHome
) -> None:
    async def scenario() -> None:
        job_id = await train(home)
        damage(home.journal)
        again = {"job_id": job_id, "busy": True, "acked": 6}
        async with coordinator(home) as here:
            good, welcome = await here.greet(round=RoundNumber(1), stream=2, **again)
            assert welcome.acked == 6
            stop = await good.hear_a(StopWorkers)
            assert stop.round == 1
            ready = NodeReady(
                at=Time(1.0), node=GOOD, round=stop.round, store_port=1, slowest_stop_s=None
            )
            good.send(Sent(number=7, event=ready))
            assert (await good.hear_a(StartWorkers)).part.round == 2
            while (await good.hear_a(Ack)).number < 7:
                pass
        found = replay(home.journal)
        assert found is not None
        assert found.job.highest == 6, "the rest of it counts"
        assert "the journal lost an event" in found.job.incidents[0].signature
        async with coordinator(home) as here:
            await here.greet(round=RoundNumber(2), stream=3, **(again | {"acked": 7}))
        found = replay(home.journal)
        assert found is not None
        assert found.job.world is not None, "the same loss broke another round"
        assert found.job.world.round == 2

    run(scenario())


def test_a_journal_that_lost_its_end_shows_in_what_nodes_know(home: JobHome) -> None:
    async def scenario() -> None:
        job_id = await train(home)
        execute(home.journal, "DELETE FROM events WHERE number >= 6")
        async with coordinator(home) as here:
            good, welcome = await here.greet(
                job_id=job_id, round=RoundNumber(1), busy=True, acked=6, stream=2
            )
            missing = 6 - welcome.acked
            assert missing > 0
            stop = await good.hear_a(StopWorkers)
            assert f"{missing} events that the journal lost" in stop.why

    run(scenario())
