"""The agent's stream to the coordinator.

Events are numbered and kept until the coordinator acknowledges that they are in its journal. When
the stream breaks the agent reconnects, with a backoff, for as long as it lives, and resends what
was not acknowledged; its workers train on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast import __version__, kernel
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
    Rejected,
    Sent,
    Welcome,
)
from holdfast.wire import framing
from holdfast.wire.tls import client_context

log = logging.getLogger("holdfast.agent")

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
READ_BYTES = 1 << 16
CONNECT_LIMIT_S = 3.0


class NodeRefused(WireError):
    """The coordinator refuses this node; trying again is no use."""


@dataclass
class CoordinatorStream:
    orders: AgentOrders
    clock: JobClock
    state: Callable[[], tuple[RoundNumber, bool]]
    """Returns the round and whether there are workers, to announce on a new stream."""
    act: Callable[[NodeAction], None]
    resumed: Callable[[list[AnyEvent]], None] = lambda sent: None
    """Called on each new stream, with the events that were just resent on it."""
    _unacked: deque[Sent] = field(default_factory=deque)
    _number: int = 0
    _writer: asyncio.StreamWriter | None = None
    _beat: asyncio.TimerHandle | None = None
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
        After that time it is aborted, and another one opened."""
        if self._writer is None:
            return
        transport = self._writer.transport
        self._lost()
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        asyncio.get_running_loop().call_later(seconds, transport.abort)

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
                reader, writer = connected
                try:
                    await self._converse(reader, writer, welcomed)
                    if (
                        self.connected
                    ):  # One that closes without a welcome is not knocked at faster.
                        pause = FIRST_PAUSE_S
                except (ConnectionError, TimeoutError):
                    pass  # Closed by the other side or by the kernel's keep-alive.
                finally:
                    self._lost()
                    writer.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        try:
            connecting = asyncio.open_connection(self.host, self.port, ssl=self._tls)
            reader, writer = await asyncio.wait_for(connecting, CONNECT_LIMIT_S)
            kernel.keep_alive(writer.get_extra_info("socket"))
            return reader, writer
        except ssl.SSLError as error:
            raise NodeRefused(f"no TLS connection to {self.host}:{self.port}: {error}") from None
        except (OSError, asyncio.TimeoutError):
            self.host, self.port = self.orders.find_coordinator() or (self.host, self.port)
            return None

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
        hello = Hello(
            protocol=PROTOCOL,
            token=self.orders.token,
            node=self.orders.node,
            round=round,
            busy=busy,
            terms=self.orders.terms,
            version=__version__,
        )
        writer.write(framing.encode(hello))
        decoder = framing.FrameDecoder[FromCoordinator](FromCoordinator)  # type: ignore[arg-type]
        while data := await reader.read(READ_BYTES):
            for message in decoder.feed(data):
                if isinstance(message, Welcome):
                    self.clock.adopt(message.now, asyncio.get_running_loop().time())
                    self._resume(message, writer)
                    self._keep_beating(writer, message.beat_s)
                    kernel.keep_alive(writer.get_extra_info("socket"), message.beat_s)
                    if self._number == 0:
                        welcomed()
                elif isinstance(message, Rejected):
                    raise NodeRefused(message.reason)
                elif isinstance(message, Ack):
                    self._acked(message.number)
                else:
                    self.act(message)

    def _resume(self, welcome: Welcome, writer: asyncio.StreamWriter) -> None:
        self._acked(welcome.acked)
        self._writer = writer
        for sent in self._unacked:
            writer.write(framing.encode(sent))
        self.resumed([sent.event for sent in self._unacked])

    def _keep_beating(self, writer: asyncio.StreamWriter, every_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._beat = loop.call_later(every_s, self._keep_beating, writer, every_s)
        writer.write(framing.encode(Beat()))

    def _acked(self, number: int) -> None:
        while self._unacked and self._unacked[0].number <= number:
            self._unacked.popleft()
        if not self._unacked:
            self.drained.set()
