"""The agent's stream against a coordinator on a real socket that says only what a test wants."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.agent.lease import RoundLease
from holdfast.agent.stream import CoordinatorStream, NodeRefused
from holdfast.clock import JobClock
from holdfast.messages.actions import NodeAction, Prepare
from holdfast.messages.events import NodeWarm
from holdfast.messages.records import Terms
from holdfast.messages.units import NodeId, RoundNumber, Time
from holdfast.messages.wire import Ack, Beat, FromAgent, Hello, Lease, Rejected, Sent, Welcome
from holdfast.wire import framing
from holdfast.wire.ends import address_of

LIMIT_S = 50.0
BEAT_S = 0.02
NODE = NodeId("n")
WARM = NodeWarm(at=Time(1.0), node=NODE)


async def until(found: Callable[[], object], what: str) -> None:
    async def wait() -> None:
        while not found():
            await asyncio.sleep(0.002)

    try:
        await asyncio.wait_for(wait(), LIMIT_S)
    except asyncio.TimeoutError:
        pytest.fail(f"waited in vain for {what}")


class Caller:
    """One stream of the agent's, as the coordinator sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: framing.FrameDecoder[Any] = framing.FrameDecoder(FromAgent)  # type: ignore[arg-type]
        self._heard: list[Any] = []

    @property
    def address(self) -> str:
        return address_of(self._writer.get_extra_info("peername"))

    def say(self, *messages: msgspec.Struct) -> None:
        self._writer.write(b"".join(map(framing.encode, messages)))

    def welcome(self, job_id: str = "job", direct: bool = True, acked: int = 0) -> None:
        welcome = Welcome(
            job="j", job_id=job_id, now=Time(5.0), acked=acked, beat_s=BEAT_S, direct=direct
        )
        self.say(welcome)

    async def hear(self, kind: type) -> Any:
        """The next message of that type."""
        while True:
            for at, message in enumerate(self._heard):
                if isinstance(message, kind):
                    del self._heard[: at + 1]
                    return message
            data = await asyncio.wait_for(self._reader.read(1 << 16), LIMIT_S)
            assert data, f"the stream was closed before a {kind.__name__} came"
            self._heard += self._decoder.feed(data)

    async def lend(self, for_s: float) -> None:
        """Answer the next beat."""
        beat = await self.hear(Beat)
        self.say(Lease(beat=beat.number, round=RoundNumber(1), for_s=for_s, beat_s=BEAT_S))

    async def how_it_ends(self) -> str:
        try:
            while await asyncio.wait_for(self._reader.read(1 << 16), LIMIT_S):
                pass
        except ConnectionResetError:
            return "reset"
        return "closed"

    def close(self) -> None:
        self._writer.transport.abort()


@dataclass
class Ranks:
    round: RoundNumber = RoundNumber(1)
    busy: bool = True
    paused: bool = False

    def lent_until(self, until: float) -> None: ...

    def pause(self) -> None:
        self.paused = True

    def go_on(self) -> None:
        self.paused = False


@dataclass
class Stage:
    """A coordinator's listening socket and an agent's stream."""

    port: int
    server: asyncio.Server
    callers: asyncio.Queue[Caller]
    stream: CoordinatorStream
    acted: list[NodeAction]
    ranks: Ranks
    resumed: list[list[Any]]
    running: asyncio.Task[None] = field(init=False)

    async def call(self) -> tuple[Caller, Hello]:
        """The agent's next stream."""
        caller = await asyncio.wait_for(self.callers.get(), LIMIT_S)
        return caller, await caller.hear(Hello)

    def close_door(self) -> None:
        """Have the kernel refuse connections."""
        self.server.close()


@asynccontextmanager
async def stage(beat_s: float = BEAT_S) -> AsyncIterator[Stage]:
    callers: asyncio.Queue[Caller] = asyncio.Queue()
    every: list[Caller] = []

    async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        every.append(Caller(reader, writer))
        callers.put_nowait(every[-1])

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    orders = SimpleNamespace(
        node=NODE,
        token="t",
        terms=Terms(),
        host="127.0.0.1",
        port=port,
        settings=SimpleNamespace(tls=None),
        find_coordinator=lambda: None,
    )
    acted: list[NodeAction] = []
    resumed: list[list[Any]] = []
    ranks = Ranks()
    stream = CoordinatorStream(
        orders=cast(Any, orders),
        clock=JobClock(),
        state=lambda: (ranks.round, ranks.busy),
        act=acted.append,
        lease=RoundLease(lambda: ranks),
        resumed=resumed.append,
        _beat_s=beat_s,
    )
    here = Stage(port, server, callers, stream, acted, ranks, resumed)
    here.running = asyncio.ensure_future(stream.run(lambda: stream.send(WARM)))
    try:
        yield here
    finally:
        here.running.cancel()
        await asyncio.gather(here.running, return_exceptions=True)
        for caller in every:
            caller.close()
        server.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 4 * LIMIT_S))


# ---- the network ----

Opener = Callable[..., Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]]

ERRORS: list[OSError] = [
    *(
        OSError(number, "no way")
        for number in (
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ENETDOWN,
            errno.EHOSTDOWN,
            errno.EADDRNOTAVAIL,
            errno.ETIMEDOUT,
            errno.EMFILE,
            errno.EPERM,
        )
    ),
    socket.gaierror(socket.EAI_AGAIN, "no name server"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.errno))
def test_no_error_of_the_network_ends_the_search_for_the_coordinator(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = asyncio.open_connection, [3]

    async def opened(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return await real(*arguments, **more)

    monkeypatch.setattr(asyncio, "open_connection", opened)

    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await here.call()
            caller.welcome()
            await caller.hear(Sent)
            assert left[0] < 0
            assert not here.running.done()

    run(scenario())


@pytest.mark.parametrize("error", ERRORS[:3], ids=lambda error: str(error.errno))
def test_a_stream_that_breaks_in_any_way_is_opened_again(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, readers = asyncio.open_connection, list[asyncio.StreamReader]()

    async def opened(*arguments: Any, **more: Any) -> Any:
        reader, writer = await real(*arguments, **more)
        readers.append(reader)
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", opened)

    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await here.call()
            caller.welcome()
            await caller.hear(Sent)
            readers[-1].set_exception(error)
            again, hello = await here.call()
            assert hello.stream == 2
            again.welcome()
            assert (await again.hear(Sent)).event == WARM
            assert not here.running.done()

    run(scenario())


def test_a_hello_tells_which_stream_of_which_job_it_is_and_where_it_ends() -> None:
    async def scenario() -> None:
        async with stage() as here:
            first, hello = await here.call()
            assert (hello.job_id, hello.stream, hello.acked) == ("", 1, 0)
            assert hello.address == first.address
            first.welcome(job_id="mine")
            first.say(Ack(number=(await first.hear(Sent)).number))
            await until(here.stream.drained.is_set, "the event to be acknowledged")
            first.close()
            second, hello = await here.call()
            assert (hello.job_id, hello.stream, hello.acked) == ("mine", 2, 1)
            assert hello.address == second.address != first.address

    run(scenario())


# ---- another job's coordinator ----


def test_a_coordinator_of_another_job_is_not_obeyed_and_the_node_trains_on() -> None:
    async def scenario() -> None:
        async with stage() as here:
            first, _ = await here.call()
            first.welcome(job_id="mine")
            await first.hear(Sent)
            first.close()
            other, _ = await here.call()
            other.welcome(job_id="another", acked=1)
            other.say(Prepare(node=NODE))
            assert await other.how_it_ends() == "reset"
            await until(lambda: here.stream.orphaned, "the agent to see whose it is")
            assert "another job" in here.stream.orphaned
            assert not here.stream.connected
            assert here.acted == []
            assert not here.running.done()
            third, hello = await here.call()
            assert hello.job_id == "mine"
            third.welcome(job_id="mine")
            assert (await third.hear(Sent)).event == WARM, "it was lost to the other one"
            assert here.stream.orphaned == ""

    run(scenario())


def test_a_coordinator_that_lost_its_journal_is_not_obeyed_and_the_node_trains_on() -> None:
    async def scenario() -> None:
        async with stage() as here:
            first, _ = await here.call()
            first.welcome()
            await first.hear(Sent)
            first.close()
            for _ in range(2):
                lost, _ = await here.call()
                lost.say(Rejected(reason="the journal is lost", lost=True))
                assert await lost.how_it_ends() == "reset"
            assert here.stream.orphaned == "the journal is lost"
            assert not here.running.done()
            found, _ = await here.call()
            found.welcome()
            await found.hear(Sent)
            assert here.stream.orphaned == ""

    run(scenario())


def test_a_node_that_is_refused_ends() -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await here.call()
            caller.say(Rejected(reason="wrong token for this job"))
            with pytest.raises(NodeRefused, match="wrong token"):
                await asyncio.wait_for(here.running, LIMIT_S)

    run(scenario())


# ---- beats, and what renews the lease ----


def test_beats_are_sent_before_the_welcome() -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await here.call()
            numbers = [(await caller.hear(Beat)).number for _ in range(3)]
            assert numbers == [1, 2, 3]
            assert not here.stream.connected

    run(scenario())


async def lent(here: Stage, for_s: float, direct: bool = True) -> tuple[Caller, float]:
    """A stream with a lease, and when that is over."""
    caller, _ = await here.call()
    caller.welcome(direct=direct)
    await caller.hear(Sent)
    await caller.lend(for_s)
    await until(lambda: here.stream.lease.until < 1e12, "the lease")
    return caller, here.stream.lease.until


def test_an_answered_beat_renews_the_lease() -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, first = await lent(here, 5.0, direct=False)
            await caller.lend(5.0)
            await until(lambda: here.stream.lease.until > first, "a longer lease")

    run(scenario())


def test_the_kernels_acknowledgement_of_a_beat_renews_the_lease() -> None:
    """The coordinator stands: it reads nothing and answers nothing."""

    async def scenario() -> None:
        async with stage() as here:
            caller, first = await lent(here, 5.0)
            caller._writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: here.stream.lease.until > first + 3 * BEAT_S, "a longer lease")
            assert not here.ranks.paused

    run(scenario())


def test_a_new_stream_that_the_kernel_takes_and_nobody_reads_renews_the_lease() -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await lent(here, 5.0)
            caller.close()
            await here.call()
            first = here.stream.lease.until
            await until(lambda: here.stream.lease.until > first + 3 * BEAT_S, "a longer lease")
            assert not here.stream.connected

    run(scenario())


def test_a_refused_connection_renews_the_lease() -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, first = await lent(here, 5.0)
            here.close_door()
            caller.close()
            await until(lambda: here.stream.lease.until > first + 3 * BEAT_S, "a longer lease")
            assert not here.ranks.paused

    run(scenario())


def test_a_host_that_cannot_be_reached_does_not_renew_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cut(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EHOSTUNREACH, "no way")

    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await lent(here, 0.5)
            monkeypatch.setattr(asyncio, "open_connection", cut)
            caller.close()
            await until(lambda: not here.stream.connected, "the end of the stream")
            first = here.stream.lease.until
            await until(lambda: here.ranks.paused, "the end of the lease")
            assert here.stream.lease.until == first

    run(scenario())


def test_beats_that_another_host_acknowledges_do_not_renew_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = asyncio.open_connection

    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await lent(here, 0.5)
            with socket.create_server(("127.0.0.1", 0)) as other:

                async def cut(host: str, port: int, **more: Any) -> Any:
                    if port == here.port:
                        raise OSError(errno.EHOSTUNREACH, "no way")
                    return await real(host, port, **more)

                orders = cast(Any, here.stream.orders)
                orders.find_coordinator = other.getsockname
                monkeypatch.setattr(asyncio, "open_connection", cut)
                caller.close()
                await until(lambda: not here.stream.connected, "the end of the stream")
                first = here.stream.lease.until
                await until(lambda: here.ranks.paused, "the end of the lease")
                assert here.stream.lease.until == first

    run(scenario())


@pytest.mark.parametrize("how", ["stands", "refuses"])
def test_behind_a_proxy_nothing_but_an_answer_renews_the_lease(how: str) -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, first = await lent(here, 0.5, direct=False)
            if how == "refuses":
                here.close_door()
                caller.close()
            await until(lambda: here.ranks.paused, "the end of the lease")
            assert here.stream.lease.until == first

    run(scenario())


# ---- a living agent resets its streams ----


def test_an_agent_that_gives_a_stream_up_resets_it() -> None:
    """A stream that is closed proves a death; nothing unread may decide which of both it is."""

    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await here.call()
            caller.welcome()
            await caller.hear(Sent)
            await until(lambda: here.stream.connected, "the welcome")
            here.running.cancel()
            assert await caller.how_it_ends() == "reset"

    run(scenario())


def test_a_stream_that_fell_silent_is_reset_and_another_one_opened() -> None:
    async def scenario() -> None:
        async with stage() as here:
            caller, _ = await here.call()
            caller.welcome()
            await caller.hear(Sent)
            here.stream.fall_silent(0.05)
            assert not here.stream.connected
            assert await caller.how_it_ends() == "reset"
            _, hello = await here.call()
            assert hello.stream == 2

    run(scenario())
