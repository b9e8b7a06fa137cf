"""The agent's stream to the coordinator.

Events are numbered and kept until the coordinator acknowledges that they are in its journal. When
the stream breaks the agent reconnects, with a backoff, for as long as it lives, and resends what
was not acknowledged; its workers train on meanwhile, for as long as `agent.lease` allows.

The stream belongs to one job. A coordinator that knows nothing of it (its journal is lost, or it has
another's) is not obeyed: the agent says so, trains on, and keeps looking for the right one.

A living agent never closes a stream, it resets it: so the coordinator can take a stream that was
closed as a proof that the agent has died.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast import __version__, kernel
from holdfast.agent.lease import RoundLease
from holdfast.agent.orders import AgentOrders
from holdfast.clock import JobClock
from holdfast.errors import WireError
from holdfast.messages.actions import NodeAction
from holdfast.messages.events import AnyEvent
from holdfast.messages.units import RoundNumber
from holdfast.messages.wire import (
    PROTOCOL,
    Ack,
    Beat,
    EvidenceTaken,
    FromCoordinator,
    Hello,
    Lease,
    Rejected,
    Sent,
    Welcome,
)
from holdfast.wire import framing
from holdfast.wire.ends import address_of, all_acknowledged, reset
from holdfast.wire.tls import client_context, explained

log = logging.getLogger("holdfast.agent")

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
FIRST_BEAT_S = 1.0
READ_BYTES = 1 << 16
CONNECT_LIMIT_S = 3.0


class NodeRefused(WireError):
    """The coordinator refuses this node; trying again is no use."""


class _OtherJob(WireError):
    """The coordinator serves another job than this node's."""


@dataclass
class CoordinatorStream:
    orders: AgentOrders
    clock: JobClock
    state: Callable[[], tuple[RoundNumber, bool]]
    """Returns the round and whether there are workers, to announce on a new stream."""
    act: Callable[[NodeAction], None]
    lease: RoundLease
    resumed: Callable[[list[AnyEvent]], None] = lambda sent: None
    """Called on each new stream, with the events that were just resent on it."""
    _unacked: deque[Sent] = field(default_factory=deque)
    _number: int = 0
    _writer: asyncio.StreamWriter | None = None
    _beat: asyncio.TimerHandle | None = None
    _beats: int = 0
    _streams: int = 0
    _beat_s: float = FIRST_BEAT_S
    _acked_number: int = 0
    """The newest event that is known to be in the journal."""
    _job_id: str = ""
    """Id of this node's job, from the first welcome on."""
    _reached: tuple[str, int] | None = None
    """Where the last welcome came from."""
    _direct: bool = False
    """Whether the last stream led to the coordinator itself, and not to a proxy."""
    orphaned: str = ""
    """Why the coordinator that answers is not this job's; empty if it is."""
    _lost_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When the last stream was lost."""
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.host, self.port = self.orders.host, self.orders.port
        self._tls = client_context(self.orders.settings.tls)

    def send(self, event: AnyEvent) -> None:
        """Send an event, again after a broken stream until it is acknowledged."""
        self._number += 1
        sent = Sent(number=self._number, event=event)
        self._unacked.append(sent)
        self.drained.clear()
        if self._writer is not None:
            self._writer.write(framing.encode(sent))

    def tell(self, message: EvidenceTaken) -> None:
        """Send a message once; it is lost if there is no stream."""
        if self._writer is not None:
            self._writer.write(framing.encode(message))

    def fall_silent(self, seconds: float) -> None:
        """Behave as if the cable were pulled: neither send nor read, and do not close the stream.
        After that time it is reset, and another one opened."""
        if self._writer is None:
            return
        transport = self._writer.transport
        self._lost()
        self.lease.stream_lost()
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, reset, transport)

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def lost_for_s(self) -> float:
        """Return for how long there has been no stream."""
        return 0.0 if self.connected else asyncio.get_running_loop().time() - self._lost_at

    async def run(self, welcomed: Callable[[], None]) -> None:
        """Keep a stream open until cancelled. `welcomed` is called once, after the first welcome."""
        pause = FIRST_PAUSE_S
        while True:
            connected = await self._connect()
            if connected is not None:
                began = asyncio.get_running_loop().time()
                reader, writer = connected
                try:
                    await self._converse(reader, writer, welcomed)
                    if self.connected:
                        pause = FIRST_PAUSE_S  # Without a welcome it is not knocked at faster.
                except ssl.SSLError as error:
                    self._refuse_without_tls(error)
                except OSError:
                    pass  # Closed by the other side, or no way to it: a cable, a route, an interface.
                except _OtherJob as error:
                    self._orphan(str(error))
                    self._host_reached(began)  # And this job's coordinator does not run there.
                finally:
                    self._lost()
                    self.lease.stream_lost()
                    reset(writer.transport)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _orphan(self, why: str) -> None:
        if why != self.orphaned:
            log.error("%s; this node trains on as long as it can, and no fault is repaired", why)
        self.orphaned = why

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        began = asyncio.get_running_loop().time()
        try:
            connecting = asyncio.open_connection(self.host, self.port, ssl=self._tls)
            reader, writer = await asyncio.wait_for(connecting, CONNECT_LIMIT_S)
            kernel.keep_alive(writer.get_extra_info("socket"))
            return reader, writer
        except ssl.SSLError as error:
            self._refuse_without_tls(error)
            return None
        except (OSError, asyncio.TimeoutError) as error:
            if isinstance(error, ConnectionRefusedError):
                self._host_reached(began)
            self.host, self.port = self._next_address()
            return None

    def _next_address(self) -> tuple[str, int]:
        """Return where to try next: where the coordinator was, was said to be, or says it is now.

        The address in job.json may be of use on the coordinator's machine only.
        """
        known = [
            self._reached,
            (self.orders.host, self.orders.port),
            self.orders.find_coordinator(),
        ]
        addresses = list(dict.fromkeys(address for address in known if address is not None))
        here = (self.host, self.port)
        return addresses[(addresses.index(here) + 1) % len(addresses) if here in addresses else 0]

    def _refuse_without_tls(self, error: ssl.SSLError) -> None:
        """Raise NodeRefused, unless there was a stream before, or trying again may help."""
        interrupted = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if not interrupted and self._number == 0:
            raise NodeRefused(f"{self.host}:{self.port}: {explained(error)}") from None

    def _host_reached(self, at: float) -> None:
        """Note that a host answered, whatever its process does, if it is the coordinator's."""
        if self._direct and (self.host, self.port) == self._reached:
            self.lease.host_reached(at)

    def _lost(self) -> None:
        if self._writer is not None:
            self._lost_at = asyncio.get_running_loop().time()
        self._writer = None
        if self._beat is not None:
            self._beat.cancel()

    async def _converse(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcomed: Callable[[], None],
    ) -> None:
        round, busy = self.state()
        self._streams += 1
        hello = Hello(
            protocol=PROTOCOL,
            token=self.orders.token,
            node=self.orders.node,
            round=round,
            busy=busy,
            terms=self.orders.terms,
            version=__version__,
            job_id=self._job_id,
            acked=self._acked_number,
            stream=self._streams,
            address=address_of(writer.get_extra_info("sockname")),
        )
        writer.write(framing.encode(hello))
        self._keep_beating(writer, None)
        decoder = framing.FrameDecoder[FromCoordinator](FromCoordinator)  # type: ignore[arg-type]
        while data := await reader.read(READ_BYTES):
            for message in decoder.feed(data):
                if isinstance(message, Welcome):
                    self._welcomed(message, writer)
                    if self._number == 0:
                        welcomed()
                elif isinstance(message, Rejected):
                    raise (_OtherJob if message.lost else NodeRefused)(message.reason)
                elif isinstance(message, Lease):
                    self._beat_s = message.beat_s
                    self.lease.answered(message)
                elif isinstance(message, Ack):
                    self._acked(message.number)
                else:
                    self.act(message)

    def _welcomed(self, welcome: Welcome, writer: asyncio.StreamWriter) -> None:
        if self._job_id not in ("", welcome.job_id):
            raise _OtherJob(
                f"the coordinator at {self.host}:{self.port} serves another job"
                f" (id {welcome.job_id}, not {self._job_id})"
            )
        self._job_id, self._direct, self.orphaned = welcome.job_id, welcome.direct, ""
        self._beat_s, self._reached = welcome.beat_s, (self.host, self.port)
        self.clock.adopt(welcome.now, asyncio.get_running_loop().time())
        kernel.keep_alive(writer.get_extra_info("socket"), welcome.beat_s)
        self._resume(welcome, writer)

    def _resume(self, welcome: Welcome, writer: asyncio.StreamWriter) -> None:
        self._acked(welcome.acked)
        self._writer = writer
        for sent in self._unacked:
            writer.write(framing.encode(sent))
        self.resumed([sent.event for sent in self._unacked])

    def _keep_beating(self, writer: asyncio.StreamWriter, last_at: float | None) -> None:
        """Beat now and from now on, even before the welcome: the kernel's acknowledgement counts."""
        loop = asyncio.get_running_loop()
        now, unsent = loop.time(), writer.transport.get_write_buffer_size()
        connection = writer.get_extra_info("socket")
        if last_at is not None and not unsent and all_acknowledged(connection):
            self._host_reached(last_at)
        self._beats += 1
        self.lease.beat_sent(self._beats)
        writer.write(framing.encode(Beat(number=self._beats)))
        self._beat = loop.call_at(now + self._beat_s, self._keep_beating, writer, now)

    def _acked(self, number: int) -> None:
        self._acked_number = max(number, self._acked_number)
        while self._unacked and self._unacked[0].number <= number:
            self._unacked.popleft()
        if not self._unacked:
            self.drained.set()
