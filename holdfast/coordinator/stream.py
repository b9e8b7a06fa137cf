"""One connection to the coordinator: from a stranger's first byte to a node's last.

Nobody is believed before the hello is checked: the token, the protocol, within a few seconds. Every
frame has a size limit that is checked before anything is kept. A peer that breaks a rule, or does not
read what it is sent, is cut off with one line in the log and no effect on the job.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from holdfast.errors import JobUnknown, WireError, WrongProtocol, WrongToken
from holdfast.messages.units import NodeId
from holdfast.messages.wire import (
    PROTOCOL,
    Beat,
    EvidenceTaken,
    FromAgent,
    Hello,
    Rejected,
    Sent,
    Visit,
)
from holdfast.wire import framing
from holdfast.wire.ends import address_of

if TYPE_CHECKING:
    from holdfast.coordinator.server import Coordinator

log = logging.getLogger("holdfast.coordinator")

HELLO_LIMIT_S = 5.0
HELLO_BYTES = 1 << 14
"""All that a stranger may make us keep."""
MAX_UNSENT_BYTES = 4 << 20


class Stream(asyncio.Protocol):
    """A node's stream, once it has said who it is."""

    transport: asyncio.Transport

    def __init__(self, coordinator: Coordinator) -> None:
        self.node: NodeId | None = None
        self.number = 0
        """Which of its streams the agent says it is."""
        self.direct = False
        """Whether the other end is the agent's own socket, and not a proxy's."""
        self.closed_by_peer = False
        """Whether the other end was closed, as the kernel does it for a process that ends."""
        self._cut = False
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self._decoder = framing.FrameDecoder[FromAgent](FromAgent, HELLO_BYTES)  # type: ignore[arg-type]
        self._patience: asyncio.TimerHandle | None = None

    def send(self, message: Struct) -> None:
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.cut_off("it does not read what it is sent")
            return
        self.transport.write(framing.encode(message))

    def cut_off(self, why: str) -> None:
        who = self.node or self.transport.get_extra_info("peername")
        log.warning("%s: cut off: %s", who, why)
        self.abort()

    def abort(self) -> None:
        self._cut = True
        self.transport.abort()

    @property
    def remote(self) -> bool:
        """Whether the other end is on another host."""
        peer, here = (self.transport.get_extra_info(name) for name in ("peername", "sockname"))
        return bool(peer and here) and peer[0] != here[0]

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._coordinator.connected(self)
        self._patience = self._loop.call_later(HELLO_LIMIT_S, self.cut_off, "it said no hello")

    def data_received(self, data: bytes) -> None:
        if self.node is not None:
            self._coordinator.heard(self)
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except WireError as error:
            if self.node is None:
                self.send(Rejected(reason=str(error), lost=isinstance(error, JobUnknown)))
            self.cut_off(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self.closed_by_peer = error is None and not self._cut
        self._coordinator.disconnected(self)

    # ---- what is said ----

    def _take(self, message: FromAgent) -> None:
        if self.node is None:
            self._greet(message)
        elif isinstance(message, Sent):
            if getattr(message.event, "node", None) != self.node:
                raise WireError(f"node {self.node} spoke for another")
            self._coordinator.arrived(self.node, message)
        elif isinstance(message, EvidenceTaken):
            self._coordinator.examinations.add(self.node, message)
        elif isinstance(message, Beat):
            self._coordinator.beaten(self, message)
        else:
            raise WireError("it said hello twice")

    def _greet(self, hello: FromAgent) -> None:
        if not isinstance(hello, Hello | Visit):
            raise WireError("the first message was no hello")
        if not hmac.compare_digest(hello.token.encode(), self._coordinator.token.encode()):
            raise WrongToken("wrong token for this job")
        if hello.protocol != PROTOCOL:
            raise WrongProtocol(
                f"this coordinator speaks protocol {PROTOCOL}, not {hello.protocol}"
            )
        if self._patience is not None:
            self._patience.cancel()
        if isinstance(hello, Visit):
            self._coordinator.visited(self, hello)
            return
        self._decoder.max_bytes = framing.MAX_FRAME_BYTES
        self.number = hello.stream
        self.direct = hello.address == address_of(self.transport.get_extra_info("peername"))
        self._coordinator.greeted(self, hello)
        self.node = hello.node
