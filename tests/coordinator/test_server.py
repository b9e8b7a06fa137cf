"""The coordinator on a real socket: what strangers do to it (nothing), and what agents can rely on."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serving import LIMIT_S, Peer, Served, hello, joined, run, served, stepped

from holdfast import tasks
from holdfast.clock import JobClock
from holdfast.coordinator import stream as streams
from holdfast.coordinator.journal import replay
from holdfast.core import leases, report
from holdfast.core.job import Job
from holdfast.core.leases import Leases
from holdfast.core.ranks.events import RanksMachine
from holdfast.core.replay import TRIES
from holdfast.messages.actions import Answered, Finish, StartWorkers, StopWorkers
from holdfast.messages.chaos import Trap
from holdfast.messages.checkpoints import ImageId, SnapshotId
from holdfast.messages.events import (
    AnyEvent,
    Asked,
    FaultTold,
    HealthFound,
    ImagesHeld,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    NodeWarm,
    StoredFound,
    StreamEnded,
    Tick,
    WorkerExited,
)
from holdfast.messages.health import HealthResult
from holdfast.messages.records import RankProgress, Terms
from holdfast.messages.requests import CountKeys
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import Ack, Beat, Lease, Rejected, Sent, Welcome
from holdfast.wire import framing
from holdfast.wire.ends import reset

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
    assert "not in that round" in (await peer.hear_a(Rejected)).reason
    assert await peer.is_cut_off()


async def leaving_without_having_joined(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    event = NodeLeaving(at=Time(1), node=NodeId("evil"), reason="x", code=1)
    peer.send(Sent(number=1, event=event))
    assert await peer.hear_a(Ack) == Ack(number=1)


async def joined_as_a_spare(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    peer.send(Sent(number=1, event=joined("evil")))
    assert await peer.hear_a(Ack) == Ack(number=1)


async def a_fact_that_is_no_number(here: Served, peer: Peer) -> None:
    await joined_as_a_spare(here, peer)
    result = HealthResult("mine", "warn", "it is ill", 1.0, {"share": float("nan")})
    event = HealthFound(at=Time(1.0), node=NodeId("evil"), results=(result,))
    peer.send(Sent(number=2, event=event))
    assert await peer.hear_a(Ack) == Ack(number=2)  # Dropped, and its node stays.
    peer.send(Sent(number=3, event=NodeWarm(at=Time(1.0), node=NodeId("evil"))))
    assert await peer.hear_a(Ack) == Ack(number=3)
    await left_again(peer, 4)


async def an_image_of_a_rank_beyond_the_world(here: Served, peer: Peer) -> None:
    await joined_as_a_spare(here, peer)
    image = ImageId(SnapshotId("main", StepNumber(9), RoundNumber(1)), Rank(5), 1)
    event = ImagesHeld(at=Time(1.0), node=NodeId("evil"), images=(image,))
    peer.send(Sent(number=2, event=event))
    assert await peer.hear_a(Ack) == Ack(number=2)
    await left_again(peer, 3)


async def a_round_that_was_never_issued(here: Served, peer: Peer) -> None:
    await joined_as_a_spare(here, peer)
    event = StoredFound(
        at=Time(1.0), node=NodeId("evil"), round=RoundNumber(7), checkpointer="main"
    )
    peer.send(Sent(number=2, event=event))
    assert "never issued" in (await peer.hear_a(Rejected)).reason
    assert await peer.is_cut_off()
    await until_forgotten(here)


async def a_time_in_the_future(here: Served, peer: Peer) -> None:
    await joined_as_a_spare(here, peer)
    event = NodeWarm(at=Time(1e11), node=NodeId("evil"))
    peer.send(Sent(number=2, event=event))
    assert await peer.hear_a(Ack) == Ack(number=2)
    await left_again(peer, 3)


async def a_hello_of_a_far_round(here: Served, peer: Peer) -> None:
    await joined_as_a_spare(here, peer)
    peer.close()
    again = await here.connect()
    again.send(hello("evil", round=RoundNumber(1 << 53), busy=True))
    assert "this job is in round 1" in (await again.hear_a(Rejected)).reason
    assert await again.is_cut_off()
    await until_forgotten(here)


async def an_event_of_a_newer_version(here: Served, peer: Peer) -> None:
    peer.send(hello("evil"))
    await peer.hear_a(Welcome)
    newer = {"type": "Sent", "number": 1, "event": {"type": "NodeYawned", "node": "evil"}}
    body = msgspec.msgpack.encode(newer)
    peer.writer.write(len(body).to_bytes(4, "big") + body)
    refused = await peer.hear_a(Rejected)
    assert "NodeYawned" in refused.reason
    assert "same version" in refused.reason
    assert await peer.is_cut_off()


async def a_fault_that_nobody_asked_for(here: Served, peer: Peer) -> None:
    await joined_as_a_spare(here, peer)
    trap = Trap(
        injection=1, occurrence=1, kind="kill-coordinator", node=NodeId("evil"), rank=Rank(0)
    )
    event = FaultTold(
        at=Time(1.0), node=NodeId("evil"), round=RoundNumber(1), trap=trap, outcome="done"
    )
    peer.send(Sent(number=2, event=event))
    assert await peer.hear_a(Ack) == Ack(number=2)
    await left_again(peer, 3)


async def left_again(peer: Peer, number: int) -> None:
    left = NodeLeft(at=Time(1.0), node=NodeId("evil"), round=RoundNumber(0))
    peer.send(Sent(number=number, event=left))
    while (await peer.hear_a(Ack)).number < number:
        pass


async def until_forgotten(here: Served) -> None:
    """Wait until a node that was cut off is given up."""
    while here.job.membership.has(NodeId("evil")):
        await asyncio.sleep(0.01)


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
    a_fact_that_is_no_number,
    an_image_of_a_rank_beyond_the_world,
    a_round_that_was_never_issued,
    a_time_in_the_future,
    a_hello_of_a_far_round,
    an_event_of_a_newer_version,
    a_fault_that_nobody_asked_for,
]


def known(job: Job) -> Any:
    """All that the job knows, but for how many events it has heard and refused, and how many nodes
    have joined and gone."""
    found = msgspec.json.decode(msgspec.json.encode(job))
    for machine in found["machines"]:
        for name in ("refused", "joins", "last_join_at", "longest_gap_s"):
            machine.pop(name, None)
        if isinstance(machine.get("struck"), dict):
            machine["struck"] = {
                cause: nodes for cause, nodes in machine["struck"].items() if nodes
            }
    return found | {"events": 0, "refused": {}}


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda each: each.__name__)
def test_a_stranger_harms_neither_the_job_nor_its_agents(
    stranger: Stranger, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            good.keep_beating()
            before = known(here.job)
            await stranger(here, await here.connect())
            assert known(here.job) == before
            good.send(Sent(number=2, event=stepped(5)))
            await good.hear_a(Ack)
            assert here.job.highest == 5
            died = WorkerExited(
                at=Time(1.0),
                node=NodeId("good"),
                round=RoundNumber(1),
                rank=Rank(0),
                signal=9,
                progress=RankProgress(rank=Rank(0)),
            )
            good.send(Sent(number=3, event=died))
            stop = await good.hear_a(StopWorkers)
            ready = NodeReady(
                at=Time(1.0),
                node=NodeId("good"),
                round=stop.round,
                store_port=1,
                slowest_stop_s=None,
            )
            good.send(Sent(number=4, event=ready))
            assert (await good.hear_a(StartWorkers)).part.round == 2
            assert here.job.recovery.failures == 0
            assert not here.serving.done()
            again = replay(tmp_path / "journal.db")
            assert again is not None
            assert msgspec.json.encode(again.job) == msgspec.json.encode(here.job)

    run(scenario())


def test_refused_events_are_counted_in_the_journal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            for number in (2, 3, 4):
                event = NodeWarm(at=Time(1e11), node=NodeId("good"))
                good.send(Sent(number=number, event=event))
            assert (await good.hear_a(Ack)).number >= 2
            while not here.job.recovery.refused:
                await asyncio.sleep(0.01)
            assert here.job.recovery.refused == {"NodeWarm: its time is in the future": 3}
            status = report.status(here.job, Time(2.0), alive=True)
            assert status.refused["NodeWarm: its time is in the future"] == 3

    run(scenario())


def test_a_watch_that_raises_is_an_incident_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(leases, "LOOK_EVERY_S", 0.001)
    calls = [0]

    def look(self: Leases, *_: object) -> list[NodeId]:
        calls[0] += 1
        if calls[0] == 20:
            raise ZeroDivisionError("a bug of ours")
        return []

    monkeypatch.setattr(Leases, "look", look)

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.join()
            while not here.job.recovery.failed_tasks or calls[0] < 40:
                await asyncio.sleep(0.001)
            assert here.job.recovery.failed_tasks == {"watch for silent nodes": 1}
            (incident,) = here.job.incidents
            assert incident.kind == "internal"
            assert "ZeroDivisionError" in incident.signature
            status = report.status(here.job, Time(2.0), alive=True)
            assert status.failed_tasks == {"watch for silent nodes": 1}
            assert here.job.state.name == "running"

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
            assert await asyncio.wait_for(asyncio.shield(here.serving), LIMIT_S) == 75

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
            newer, _ = await here.greet(round=RoundNumber(1), busy=True, stream=2)
            assert await older.is_cut_off()
            newer.send(Sent(number=2, event=stepped(5)))
            assert await newer.hear_a(Ack) == Ack(number=2)
            assert here.job.membership.absent == {}

    run(scenario())


def test_a_request_that_came_together_with_a_new_stream_is_answered(tmp_path: Path) -> None:
    """The agent sends it again, which is no news, and does not ask again."""

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            older, newer = await here.join(), await here.connect()
            asked = Asked(
                at=Time(JobClock().now()),
                node=NodeId("good"),
                round=RoundNumber(1),
                rank=Rank(0),
                channel=0,
                number=1,
                request=CountKeys(),
            )
            older.send(Sent(number=2, event=asked))
            newer.send(hello(round=RoundNumber(1), busy=True, stream=2))
            assert (await newer.hear_a(Welcome)).acked == 1
            newer.send(Sent(number=2, event=asked))
            assert (await newer.hear_a(Answered)).number == 1

    run(scenario())


def test_an_agent_that_missed_its_start_is_told_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            good.close()
            again, _ = await here.greet(round=RoundNumber(0))
            assert (await again.hear_a(StartWorkers)).part.round == 1

    run(scenario())


def test_a_node_whose_stream_is_closed_is_given_up_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join(direct=True)
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
                await asyncio.wait_for(asyncio.shield(here.serving), LIMIT_S)

    run(scenario())


# ---- leases ----

TWO = Terms(min_nodes=1, max_nodes=2)


def journaled(path: Path, kind: str) -> list[str]:
    """The events of that type in the journal."""
    with closing(sqlite3.connect(path)) as db:
        return [event for (event,) in db.execute("SELECT event FROM events") if kind in event]


async def pair(here: Served, **more: Any) -> tuple[Peer, Peer]:
    """Two nodes in the first round."""
    peers = []
    for name in ("one", "two"):
        peer, _ = await here.greet(name, terms=TWO, direct=True, **more)
        peer.send(Sent(number=1, event=joined(name)))
        peers.append(peer)
    for peer in peers:
        await peer.hear_a(StartWorkers)
    return peers[0], peers[1]


def silent_since(here: Served, node: str, seconds: float) -> None:
    """Have a node be silent for so long already."""
    heard = here.coordinator._leases.heard
    heard[NodeId(node)] = asyncio.get_running_loop().time() - seconds


def look(here: Served) -> None:
    """Look for silent nodes now."""
    here.coordinator._give_up_silent(here.job, asyncio.get_running_loop().time())


def test_a_beat_is_answered_with_a_lease_on_the_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            one, _ = await pair(here)
            for number in (7, 8):
                one.send(Beat(number=number))
                for_s = leases.lease_s(here.job.membership.silence_s)
                assert await one.hear_a(Lease) == Lease(
                    beat=number, round=RoundNumber(1), for_s=for_s, beat_s=1.0
                )
            spare, _ = await here.greet("spare", terms=TWO)
            spare.send(Beat(number=1))
            assert (await spare.hear_a(Lease)).round == 0

    run(scenario())


def test_in_a_job_of_one_node_leases_never_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            good.send(Beat(number=1))
            assert await good.hear_a(Lease) == Lease(
                beat=1, round=RoundNumber(1), for_s=0.0, beat_s=1.0
            )

    run(scenario())


def test_a_job_of_one_node_and_a_spare_has_leases_that_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good, _ = await here.greet(terms=Terms(max_nodes=1, spares=1))
            good.send(Beat(number=1))
            assert (await good.hear_a(Lease)).for_s > 0.0

    run(scenario())


def test_an_agent_that_dies_closes_its_stream_and_is_given_up_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            one, two = await pair(here)
            two.writer.write_eof()
            stop = await one.hear_a(StopWorkers)
            assert stop.round == 1
            assert not here.job.membership.has(NodeId("two"))
            (ended,) = journaled(tmp_path / "journal.db", "LeaseEnded")
            assert "its agent died" in ended

    run(scenario())


def test_a_stream_that_a_proxy_closed_proves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            await pair(here)
            other, _ = await here.greet("two", terms=TWO, stream=2, round=RoundNumber(1), busy=True)
            other.writer.write_eof()
            while NodeId("two") not in here.job.membership.absent:
                await asyncio.sleep(0.01)
            assert NodeId("two") in here.job.membership.placed

    run(scenario())


def test_a_node_whose_stream_was_reset_is_absent_and_given_up_after_the_silence(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            one, two = await pair(here)
            reset(two.writer.transport)
            while NodeId("two") not in here.job.membership.absent:
                await asyncio.sleep(0.01)
            silent_since(here, "two", here.job.membership.silence_s - 0.4)
            look(here)
            await asyncio.sleep(0)
            assert NodeId("two") in here.job.membership.placed
            one.send(Beat(number=1))
            await one.hear_a(Lease)
            silent_since(here, "two", here.job.membership.silence_s + 0.1)
            look(here)
            assert (await one.hear_a(StopWorkers)).round == 1
            assert not here.job.membership.has(NodeId("two"))

    run(scenario())


def test_a_node_that_comes_back_within_the_silence_is_where_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            _, two = await pair(here)
            reset(two.writer.transport)
            while NodeId("two") not in here.job.membership.absent:
                await asyncio.sleep(0.01)
            back, _ = await here.greet("two", terms=TWO, stream=2, round=RoundNumber(1), busy=True)
            back.send(Beat(number=1))
            assert (await back.hear_a(Lease)).round == 1
            assert here.job.membership.absent == {}
            assert here.job.incidents == []

    run(scenario())


def test_a_node_that_was_given_up_gets_no_lease_in_the_same_turn(tmp_path: Path) -> None:
    """Its beat may lie behind the look in one turn of the event loop."""

    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            await pair(here)
            stream, said = here.coordinator._streams[NodeId("two")], list[Any]()
            stream.send = said.append  # type: ignore[method-assign]
            here.coordinator.beaten(stream, Beat(number=1))
            silent_since(here, "two", here.job.membership.silence_s + 0.1)
            look(here)
            here.coordinator.beaten(stream, Beat(number=2))
            assert [lease.round for lease in said] == [1, 0]
            assert NodeId("two") in here.job.membership.placed, "the core has not decided yet"
            while here.job.membership.has(NodeId("two")):
                await asyncio.sleep(0)

    run(scenario())


def test_a_silent_node_that_is_connected_is_cut_off_and_fenced_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            _, two = await pair(here)
            silent_since(here, "two", here.job.membership.silence_s + 0.1)
            look(here)
            assert await two.is_cut_off()
            back, _ = await here.greet("two", terms=TWO, stream=2, round=RoundNumber(1), busy=True)
            finish = await back.hear_a(Finish)
            assert finish.rejoin
            assert finish.grace_s == 0.0

    run(scenario())


def test_a_longer_silence_is_in_the_journal_before_a_longer_lease_is_promised(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            await pair(here)
            before = here.job.membership.silence_s
            stream, said = here.coordinator._streams[NodeId("two")], list[Any]()
            stream.send = said.append  # type: ignore[method-assign]
            silent_since(here, "two", before - 0.1)
            here.coordinator.heard(stream)
            here.coordinator.beaten(stream, Beat(number=1))
            assert journaled(tmp_path / "journal.db", "SilenceRaised") == []
            while not journaled(tmp_path / "journal.db", "SilenceRaised"):
                await asyncio.sleep(0)
            here.coordinator.beaten(stream, Beat(number=2))
            first, second = (one.for_s for one in said if isinstance(one, Lease))
            assert first == leases.lease_s(before)
            assert second == leases.lease_s(here.job.membership.silence_s) > first
            again = replay(tmp_path / "journal.db")
            assert again is not None
            assert again.job.membership.silence_s == here.job.membership.silence_s

    run(scenario())


# ---- who is who ----


@pytest.mark.parametrize("stream", [1, 2])
def test_another_process_with_the_id_of_a_connected_node_is_refused(
    stream: int, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good, _ = await here.greet(stream=2)
            good.send(Sent(number=1, event=joined()))
            await good.hear_a(StartWorkers)
            copy = await here.connect()
            copy.send(hello(stream=stream))
            refused = await copy.hear_a(Rejected)
            assert "another process that is connected has this id" in refused.reason
            assert not refused.lost
            good.send(Sent(number=2, event=stepped(5)))
            while (await good.hear_a(Ack)).number < 2:
                pass
            assert here.job.highest == 5

    run(scenario())


def test_a_node_of_another_job_is_told_that_its_job_is_not_known_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            _, welcome = await here.greet()
            stranger = await here.connect()
            stranger.send(hello("other", job_id="deadbeef", round=RoundNumber(3), busy=True))
            refused = await stranger.hear_a(Rejected)
            assert refused.lost
            assert "knows nothing of the job that other trains in (id deadbeef, round 3)" in (
                refused.reason
            )
            assert await stranger.is_cut_off()
            back, again = await here.greet(job_id=welcome.job_id, stream=2)
            assert again.job_id == welcome.job_id
            back.close()

    run(scenario())


def test_a_coordinator_without_a_job_opens_none_for_a_node_that_trains_in_one(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            stranger = await here.connect()
            stranger.send(hello("other", job_id="deadbeef", round=RoundNumber(3), busy=True))
            assert (await stranger.hear_a(Rejected)).lost
            assert here.coordinator.job is None
            assert replay(tmp_path / "journal.db") is None

    run(scenario())


def test_the_id_of_a_job_is_drawn_when_it_opens_and_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        noted: list[str] = []
        async with served(tmp_path / "journal.db") as here:
            here.coordinator.note_opened = noted.append
            await here.join()
            assert noted == [here.job.id]
        async with served(tmp_path / "other.db") as other:
            await other.join()
            assert other.job.id != noted[0]
        async with served(tmp_path / "journal.db") as here:
            assert (await here.greet(round=RoundNumber(1), busy=True))[1].job_id == noted[0]

    run(scenario())


def test_events_that_a_node_was_told_are_written_and_are_not_there_are_missed(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with served(tmp_path / "journal.db") as here:
            good = await here.join()
            good.close()
            back, _ = await here.greet(stream=2, acked=4, round=RoundNumber(1), busy=True)
            stop = await back.hear_a(StopWorkers)
            assert stop.round == 1
            assert "3 events that the journal lost" in stop.why

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
