"""Who may wait at the coordinator's door, and what a crowd there costs."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from serving import Served, hello, run, served, stepped

from holdfast.coordinator import complaints, door
from holdfast.coordinator.complaints import Complaints
from holdfast.messages.wire import Ack, Sent, Welcome


@contextmanager
def open_files(most: int) -> Iterator[None]:
    """Let this process open no more files than that."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


async def crowd(here: Served, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", here.port)))
        await asyncio.sleep(0)
    return made


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_silent_crowd_keeps_no_agent_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MOST_WAITING", 64)

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            silent = await crowd(here, 500)
            spare, _ = await here.greet("spare")
            good.send(Sent(number=2, event=stepped(5)))
            assert await good.hear_a(Ack) == Ack(number=2)
            assert here.coordinator._door.waiting <= 32, "one address has half of the places"
            spare.close()
            for one in silent:
                one.close()

    run(scenario())
    assert len(lines(caplog)) <= complaints.LINES_PER_PEER + 1, "the log is rationed"


def test_a_burst_of_agents_from_one_address_is_let_in_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            peers = await asyncio.gather(*(here.connect() for _ in range(200)))
            for number, peer in enumerate(peers):
                peer.send(hello(f"node-{number}"))
            for peer in peers:
                assert isinstance(await peer.hear(), Welcome)

    run(scenario())


def test_an_address_that_never_says_hello_is_turned_away_until_it_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "FAILURES", 8)
    monkeypatch.setattr(door, "FAILURES_PER_S", 0.0)

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            for _ in range(8):
                peer = await here.connect()
                peer.writer.write(b"GET / HTTP/1.1\r\n\r\n")
                assert await peer.is_cut_off()
            peer = await here.connect()
            peer.send(hello())
            assert await peer.hear() is None, "not even heard"
            monkeypatch.setattr(door, "FAILURES_PER_S", 1e6)
            _, welcome = await here.greet()
            assert welcome.job == "j"
            monkeypatch.setattr(door, "FAILURES_PER_S", 0.0)
            for _ in range(9):
                peer = await here.connect()
                peer.writer.write(b"GET / HTTP/1.1\r\n\r\n")
                assert await peer.is_cut_off()
            await here.greet("neighbour")  # A node has come from there: it is not turned away.

    run(scenario())


def test_without_descriptors_the_coordinator_pauses_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PAUSE_S", 0.01)

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            here.coordinator._door.most_waiting = 1000
            silent = [socket.socket() for _ in range(20)]
            with open_files(silent[-1].fileno() + 1):
                for one in silent:
                    one.connect(("127.0.0.1", here.port))
                for _ in range(50):
                    await asyncio.sleep(0.002)
                good.send(Sent(number=2, event=stepped(5)))
                assert await good.hear_a(Ack) == Ack(number=2)
            for one in silent:
                one.close()
            await here.greet("later")

    run(scenario())
    told = [line for line in lines(caplog) if "cannot accept" in line]
    assert 1 <= len(told) <= complaints.LINES_PER_PEER
    assert "ulimit -n" in told[0]


def test_complaints_are_rationed_for_each_peer_and_for_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    about = Complaints(lambda: now[0])
    for _ in range(1000):
        about.say("10.0.0.1", "it said no hello")
    assert len(lines(caplog)) == complaints.LINES_PER_PEER
    for number in range(1000):
        about.say(f"10.0.1.{number}", "it said no hello")
    assert len(lines(caplog)) == complaints.LINES_IN_ALL
    now[0] = complaints.WINDOW_S
    about.say("10.0.0.1", "it said no hello")
    assert lines(caplog)[-2:] == [
        "1970 more complaints about peers were left out in 10 s",
        "10.0.0.1: it said no hello",
    ]
