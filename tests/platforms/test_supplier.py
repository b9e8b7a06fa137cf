"""The supplier, against a real coordinator: plans are carried out once, and what it sees is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from machine import Machine, all_started, ended, until, wish
from serving import TOKEN, Served, run, served

from holdfast import proc
from holdfast.errors import PlatformError
from holdfast.messages.events import JobStopAsked, NodeJoined, ScaleAsked
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.supply import Cordon, NodeWish, RequestId, Sighting, SupplyPlan
from holdfast.messages.units import NodeId, Time
from holdfast.messages.wire import Sent, SupplierWelcome
from holdfast.platforms import supplier as supplying
from holdfast.platforms.local_node import started_at
from holdfast.platforms.supplier import Endpoint, Platform, Supplier
from holdfast.wire import framing


@asynccontextmanager
async def coordinating(folder: Path, **terms: int) -> AsyncIterator[Served]:
    """A coordinator of a job that has begun."""
    async with served(folder / "journal.db") as here:
        if here.coordinator.job is None:
            here.coordinator.open(Terms(**terms), here.coordinator.clock.now())
        yield here


@asynccontextmanager
async def supplying_from(
    here: Served, platform: Platform, token: str = TOKEN
) -> AsyncIterator[asyncio.Task[None]]:
    """A supplier that is killed at the end."""
    where = Endpoint("127.0.0.1", here.port, token)
    task = asyncio.ensure_future(Supplier(platform, lambda: where).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def statuses(here: Served) -> dict[str, str]:
    return {one.request: one.status for one in here.job.supply.positions.values()}


async def seen(here: Served, **wanted: str) -> None:
    """Wait until the core sees these requests so, and no others."""
    names = {name.removeprefix("r").replace("_", "-"): status for name, status in wanted.items()}
    await until(lambda: statuses(here) == names, f"{names}")


def kill(guard: int) -> None:
    for pid in [guard, *proc.descendants(guard)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def join(here: Served, request: str) -> None:
    """The node of a request joins."""
    name = f"h:{request}"
    peer, _ = await here.greet(name, terms=here.job.terms)
    spec = NodeSpec(host="node-0", address="127.0.0.1", slots=1, pid=1, request=request)
    event = NodeJoined(at=Time(1.0), node=NodeId(name), spec=spec, store_port=1)
    peer.send(Sent(number=1, event=event))
    peer.keep_beating()


class Catalogue:
    """A platform that only remembers what it was asked; it can be told to refuse."""

    name = "catalogue"
    together = False

    def __init__(self) -> None:
        self.made: dict[RequestId, str] = {}
        self.asked: list[RequestId] = []
        self.released: list[RequestId] = []
        self.avoided: list[str] = []
        self.refusals: list[Exception] = []
        self.lost: set[RequestId] = set()
        """What it takes and never makes."""
        self.news = asyncio.Event()

    async def list(self) -> Sequence[Sighting]:
        return [Sighting(request=name, status=status) for name, status in self.made.items()]  # type: ignore[arg-type]

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        self.avoided = [cordon.host for cordon in avoid]
        self._refuse()
        self.asked += [wish.id for wish in wishes]
        self.made.update((wish.id, "running") for wish in wishes if wish.id not in self.lost)

    async def release(self, requests: Sequence[RequestId]) -> None:
        self._refuse()
        self.released += requests
        for request in requests:
            self.made.pop(request, None)

    async def changed(self) -> None:
        await self.news.wait()
        self.news.clear()

    def change(self, request: RequestId, status: str | None) -> None:
        if status is None:
            del self.made[request]
        else:
            self.made[request] = status
        self.news.set()

    def _refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)


# ---- with processes ----


def test_a_plan_becomes_processes_and_they_are_told_to_the_coordinator(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            async with (
                coordinating(tmp_path, min_nodes=2, max_nodes=2, spares=1) as here,
                supplying_from(here, machine.platform()),
            ):
                await seen(here, r0_1="running", r1_1="running", r2_1="running")
                await all_started(machine, 3)
                hosts = {one.host for one in here.job.supply.positions.values()}
                assert hosts == {"node-0", "node-1", "node-2"}

    run(scenario())


def test_a_node_that_is_killed_is_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            async with (
                coordinating(tmp_path, min_nodes=2, max_nodes=2) as here,
                supplying_from(here, machine.platform()),
            ):
                await all_started(machine, 2)
                kill(machine.guard("1-1"))
                await seen(here, r0_1="running", r1_2="running")
                assert here.job.supply.positions[1].reason == "killed"

    run(scenario())


def test_a_supplier_that_is_killed_and_started_again_starts_nothing_twice_and_loses_nothing(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            async with coordinating(tmp_path, min_nodes=2, max_nodes=2) as here:
                for _ in range(3):
                    async with supplying_from(here, machine.platform()):
                        await seen(here, r0_1="running", r1_1="running")
                    await until(lambda: not here.job.supply.connected, "the loss of the supplier")
                await all_started(machine, 2)
                kill(machine.guard("0-1"))  # While no supplier is there to see it.
                async with supplying_from(here, machine.platform()):
                    await seen(here, r0_2="running", r1_1="running")
                await all_started(machine, 3)
                assert sorted(name for name, _, _ in machine.started()) == ["0-1", "0-2", "1-1"]

    run(scenario())


def test_a_coordinator_that_is_killed_and_started_again_wants_what_it_wanted(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            platform = machine.platform()
            ports: list[int] = []
            supplier = Supplier(platform, lambda: Endpoint("127.0.0.1", ports[-1], TOKEN))
            async with coordinating(tmp_path, min_nodes=2, max_nodes=2) as here:
                ports.append(here.port)
                supplied = asyncio.ensure_future(supplier.run())
                await seen(here, r0_1="running", r1_1="running")
                stream = here.coordinator.supplier._stream
            assert stream is not None
            stream.abort()
            async with coordinating(tmp_path) as here:
                ports.append(here.port)
                await until(lambda: here.job.supply.connected, "the supplier")
                kill(machine.guard("0-1"))
                await seen(here, r0_2="running", r1_1="running")
                await all_started(machine, 3)
            supplied.cancel()
            assert sorted(name for name, _, _ in machine.started()) == ["0-1", "0-2", "1-1"]

    run(scenario())


def test_what_is_too_much_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            async with (
                coordinating(tmp_path, min_nodes=1, max_nodes=3) as here,
                supplying_from(here, machine.platform()),
            ):
                await all_started(machine, 3)
                await join(here, "0-1")
                await until(lambda: here.job.supply.members, "the node to join")
                now = here.coordinator.clock.now()
                here.coordinator.supplier._post(ScaleAsked(at=now, min_nodes=1, max_nodes=1))
                await seen(here, r0_1="running")
                pids = {name: pid for name, _, pid in machine.started()}
                gone = [pids["1-1"], pids["2-1"]]
                await until(lambda: not any(map(started_at, gone)), "the others to end")
                assert started_at(pids["0-1"])

    run(scenario())


def test_the_supplier_ends_when_the_job_does_and_nothing_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            async with (
                coordinating(tmp_path, min_nodes=2, max_nodes=2) as here,
                supplying_from(here, machine.platform()) as supplied,
            ):
                await all_started(machine, 2)
                now = here.coordinator.clock.now()
                stop = JobStopAsked(at=now, reason="enough", code=75)
                here.coordinator.supplier._post(stop)
                await supplied
            pids = [pid for _, _, pid in machine.started()]
            await until(lambda: not any(map(started_at, pids)), "the nodes to end")

    run(scenario())


# ---- refusals, lists, streams ----


def test_a_supplier_that_is_told_of_the_end_before_all_that_is_wanted_leaves_nothing(
    tmp_path: Path,
) -> None:
    async def say_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framing.encode(SupplierWelcome(job="j", job_id="0")))
        writer.write(framing.encode(SupplyPlan(number=3, final=True)))
        await reader.read()
        writer.close()

    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            platform = machine.platform()
            await platform.ask([wish("0-1")], [])
            server = await asyncio.start_server(say_the_end, "127.0.0.1", 0)
            where = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], TOKEN)
            async with server:
                await Supplier(platform, lambda: where).run()
            await ended(platform, ["0-1"])

    run(scenario())


def test_a_supplier_that_was_away_when_the_job_ended_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            platform = machine.platform()
            await platform.ask([wish("0-1"), wish("1-1")], [])
            over = iter([False, True])
            await Supplier(platform, lambda: None, lambda: next(over)).run()
            await ended(platform, ["0-1", "1-1"])

    run(scenario())


@pytest.mark.parametrize("kind", [PlatformError, OSError])
def test_a_platform_that_refuses_for_now_is_asked_again_and_its_words_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    monkeypatch.setattr(supplying, "FIRST_RETRY_S", 0.05)

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform, refusals = Catalogue(), []
            here.coordinator.supplier._post, post = (
                lambda event: (refusals.append(here.job.supply.refusal), post(event)),
                here.coordinator.supplier._post,
            )
            platform.refusals = [kind("the quota is used up")] * 2
            async with supplying_from(here, platform):
                await seen(here, r0_1="running")
                assert platform.asked == ["0-1"]
                assert any("the quota is used up" in said for said in refusals)
                assert here.job.supply.refusal == ""

    run(scenario())


def test_a_platform_that_refuses_for_good_ends_the_job_with_its_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Catalogue()
            platform.refusals = [PlatformError("no such partition", ("0-1",), for_good=True)]
            async with supplying_from(here, platform) as supplied:
                await supplied
                result = here.job.result
                assert result is not None
                assert result.code == 93
                assert "no such partition" in result.reason

    run(scenario())


def test_a_last_release_that_fails_is_tried_again_before_the_supplier_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supplying, "FIRST_RETRY_S", 0.05)

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=2, max_nodes=2) as here:
            platform = Catalogue()
            async with supplying_from(here, platform) as supplied:
                await seen(here, r0_1="running", r1_1="running")
                platform.refusals = [PlatformError("busy")] * 2
                now = here.coordinator.clock.now()
                here.coordinator.supplier._post(JobStopAsked(at=now, reason="enough", code=75))
                await supplied
                assert not platform.made

    run(scenario())


def test_a_platform_that_breaks_breaks_the_supplier_and_is_not_passed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Catalogue()
            platform.refusals = [KeyError("an error of its own")]
            async with supplying_from(here, platform) as supplied:
                with pytest.raises(KeyError):
                    await supplied

    run(scenario())


def test_a_request_that_is_missing_from_a_whole_list_is_deleted_and_asked_for_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=2, max_nodes=2) as here:
            platform = Catalogue()
            async with supplying_from(here, platform):
                await seen(here, r0_1="running", r1_1="running")
            await until(lambda: not here.job.supply.connected, "the loss of the supplier")
            del platform.made["1-1"]
            async with supplying_from(here, platform):
                await seen(here, r0_1="running", r1_2="running")
                assert here.job.supply.positions[1].reason == "deleted"
            assert platform.asked == ["0-1", "1-1", "1-2"]

    run(scenario())


def test_a_request_that_disappears_while_it_is_watched_is_told_as_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Catalogue()
            async with supplying_from(here, platform):
                await seen(here, r0_1="running")
                platform.change("0-1", None)
                await seen(here, r0_2="running")
                assert here.job.supply.positions[0].reason == "deleted"

    run(scenario())


def test_a_request_that_came_and_went_between_two_streams_is_told_as_deleted(
    tmp_path: Path,
) -> None:
    """The coordinator never heard of it, so no list could show that it is gone."""

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Catalogue()
            here.coordinator.supplier.take, take = (
                lambda stream, message: None,
                here.coordinator.supplier.take,
            )
            async with supplying_from(here, platform):
                await until(lambda: platform.asked == ["0-1"], "the request")
                await until(lambda: platform.made, "the node")
                stream = here.coordinator.supplier._stream
                assert stream is not None
                here.coordinator.supplier.take = take
                platform.change("0-1", None)
                stream.abort()
                await seen(here, r0_2="running")
                assert here.job.supply.positions[0].reason == "deleted"

    run(scenario())


class Forgetful(Catalogue):
    """A platform that makes requests and fails before it says so."""

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        await super().ask(wishes, avoid)
        self.news.set()
        if len(self.asked) == 1:
            raise PlatformError("the connection was reset")


def test_a_request_that_was_seen_is_never_made_again_although_its_making_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supplying, "FIRST_RETRY_S", 0.05)

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Forgetful()
            async with supplying_from(here, platform):
                await seen(here, r0_1="running")
                platform.change("0-1", None)
                await seen(here, r0_2="running")
                assert platform.asked == ["0-1", "0-2"]

    run(scenario())


def test_a_request_that_is_never_listed_counts_as_gone_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supplying, "UNLISTED_LIMIT_S", 0.2)
    monkeypatch.setattr(supplying, "LIST_EVERY_S", 0.05)

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Catalogue()
            platform.lost = {"0-1"}
            async with supplying_from(here, platform):
                await seen(here, r0_2="running")
                assert platform.asked == ["0-1", "0-2"]

    run(scenario())


def test_what_nobody_wants_is_released_by_a_supplier_that_knows_all_that_is_wanted(
    tmp_path: Path,
) -> None:
    """A request of a coordinator whose last plan is not in its journal."""

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Catalogue()
            platform.made["7-1"] = "running"
            async with supplying_from(here, platform):
                await seen(here, r0_1="running")
                await until(lambda: platform.released == ["7-1"], "the release")

    run(scenario())


def test_a_plan_that_is_larger_than_a_message_is_carried_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both its requests and the sightings that answer it come in parts."""
    monkeypatch.setattr("holdfast.coordinator.supply.WISHES_A_FRAME", 30)
    monkeypatch.setattr(supplying, "SIGHTINGS_A_FRAME", 20)

    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=100) as here:
            platform = Catalogue()
            async with supplying_from(here, platform):
                await until(lambda: list(statuses(here).values()) == ["running"] * 100, "all")
            await until(lambda: not here.job.supply.connected, "the loss of the supplier")
            async with supplying_from(here, platform):
                await until(lambda: here.job.supply.connected, "the next supplier")
                platform.change("99-1", "failed")
                await until(lambda: "99-2" in statuses(here), "the news")
            assert len(platform.asked) == len(set(platform.asked)) == 101
            assert not platform.released

    run(scenario())


def test_hosts_that_are_cordoned_are_told_with_the_next_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Machine(tmp_path) as machine:
            async with coordinating(tmp_path, min_nodes=2, max_nodes=2) as here:
                broken = '[ "$HOLDFAST_REQUEST" = 1-1 ] && exit 201; exec sleep 1000'
                async with supplying_from(here, machine.platform(broken)):
                    await seen(here, r0_1="running", r1_2="running")
                    assert "node-1" in here.job.supply.cordoned
                    assert here.job.supply.positions[1].host == "node-2"

    run(scenario())


class Deaf:
    """The writing end of a stream that nobody reads."""

    def write(self, data: bytes) -> None: ...


def test_a_final_plan_that_is_the_first_of_its_stream_releases_what_is_there() -> None:
    """The supplier came in the moment in which the job ended: nobody tells it more than that."""

    async def scenario() -> None:
        platform = Catalogue()
        platform.made["0-1"] = "running"
        supplier = Supplier(platform, lambda: None)
        supplier._take([SupplyPlan(number=1, final=True)])
        await supplier._reconcile(Deaf())  # type: ignore[arg-type]
        assert platform.released == ["0-1"]

    run(scenario())


def test_a_newer_supplier_takes_the_place_of_one_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            silent = await here.connect()
            silent.send(
                supplying.SupplierHello(
                    protocol=supplying.PROTOCOL,
                    token=TOKEN,
                    platform="silent",
                    version=supplying.__version__,
                )
            )
            await until(lambda: here.job.supply.platform == "silent", "the silent one")
            platform = Catalogue()
            async with supplying_from(here, platform):
                await seen(here, r0_1="running")
                assert here.job.supply.platform == "catalogue"

    run(scenario())


class Uncancellable(Catalogue):
    """A platform that swallows cancellations, as `asyncio.wait_for` may do before Python 3.12."""

    slow = False
    listing = swallowed = 0

    async def list(self) -> Sequence[Sighting]:
        self.listing += 1
        try:
            await asyncio.sleep(60.0 if self.slow else 0.0)
        except asyncio.CancelledError:
            self.swallowed += 1
        return await super().list()


def test_what_a_supplier_did_for_a_stream_ends_with_it_although_a_platform_swallows_that(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            platform = Uncancellable()
            async with supplying_from(here, platform):
                await seen(here, r0_1="running")
                stream, listed = here.coordinator.supplier._stream, platform.listing
                assert stream is not None
                platform.slow = True
                platform.news.set()
                await until(lambda: platform.listing > listed, "the platform to be listed")
                platform.slow = False
                stream.abort()
                await until(lambda: platform.swallowed, "that to be cancelled")
                await until(lambda: here.job.supply.connected, "another stream")
                platform.change("0-1", "deleted")
                await seen(here, r0_2="running")

    run(scenario())


def test_a_supplier_with_a_wrong_token_gets_nothing_and_keeps_knocking(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path, min_nodes=1, max_nodes=1) as here:
            token, platform = ["guess"], Catalogue()
            supplier = Supplier(platform, lambda: Endpoint("127.0.0.1", here.port, token[0]))
            knocks = 0

            def find() -> Endpoint:
                nonlocal knocks
                knocks += 1
                return Endpoint("127.0.0.1", here.port, token[0])

            supplier._find = find
            supplied = asyncio.ensure_future(supplier.run())
            await until(lambda: knocks > 2, "more than one try")
            assert not platform.asked
            token[0] = TOKEN
            await seen(here, r0_1="running")
            supplied.cancel()

    run(scenario())
