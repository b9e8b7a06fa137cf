"""One connection to the coordinator: from a stranger's first byte to a node's last.

Nobody is believed before the hello is checked, within a few seconds. Every frame has a size limit that
is checked before anything is kept. A peer that breaks a rule is told so and cut off, with one line in
the log and no effect on the job; a node that is told so does not come back. `admission` says what
becomes of an event that does not decode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec import Struct

from holdfast.coordinator import admission, greeting
from holdfast.coordinator.door import HELLO_LIMIT_S, Caller
from holdfast.errors import BadFrame, JobUnknown, WireError
from holdfast.messages.units import NodeId, RoundNumber
from holdfast.messages.wire import (
    Beat,
    EvidenceTaken,
    FromAgent,
    FromSupplier,
    Hello,
    Rejected,
    Sent,
    SupplierHello,
    Visit,
)
from holdfast.wire import framing
from holdfast.wire.ends import address_of

if TYPE_CHECKING:
    from holdfast.coordinator.server import Coordinator

log = logging.getLogger("holdfast.coordinator")

HELLO_BYTES = 1 << 14
"""All that a stranger may make us keep."""
MAX_UNSENT_BYTES = 4 << 20
FAREWELL_S = 1.0
"""How long a peer that was refused has to read why."""


Spoken = FromAgent | FromSupplier


class Unreadable(NamedTuple):
    """A frame that is not a message."""

    body: bytes
    error: BadFrame


class Stream(asyncio.Protocol):
    """A node's stream, once it has said who it is."""

    transport: asyncio.Transport

    def __init__(self, coordinator: Coordinator, caller: Caller) -> None:
        self.node: NodeId | None = None
        self.round = RoundNumber(0)
        """The round that its hello named."""
        self.number = 0
        """Which of its streams the agent says it is."""
        self.direct = False
        """Whether the other end is the agent's own socket, and not a proxy's."""
        self.closed_by_peer = False
        """Whether the other end was closed, as the kernel does it for a process that ends."""
        self.caller = caller
        self._cut = False
        self._coordinator = coordinator
        self._loop = asyncio.get_running_loop()
        self.supplies = False
        """Whether it is a supplier's."""
        self._decoder = framing.FrameDecoder[Spoken | Unreadable](
            Spoken,  # type: ignore[arg-type]
            HELLO_BYTES,
            Unreadable,
        )
        self._patience: asyncio.TimerHandle | None = None
        self._refused = False

    def send(self, message: Struct) -> None:
        if self.transport.is_closing() or self._refused:
            return
        if self.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.cut_off("it does not read what it is sent")
            return
        self.transport.write(framing.encode(message))

    def answer(self, message: Struct) -> None:
        """Answer a visitor, who then goes."""
        self.send(message)
        self.transport.close()

    def cut_off(self, why: str) -> None:
        """Close the connection at once; an agent would come back."""
        self._complain(f"cut off: {why}")
        self.abort()

    def abort(self) -> None:
        self._cut = True
        self.transport.abort()

    @property
    def remote(self) -> bool:
        """Whether the other end is on another host."""
        peer, here = (self.transport.get_extra_info(name) for name in ("peername", "sockname"))
        return bool(peer and here) and peer[0] != here[0]

    def refuse(self, why: str, lost: bool = False) -> None:
        """Tell the peer why it is not wanted, and close the connection; an agent ends then, unless
        it is told that its job is lost to us."""
        if self._refused:
            return
        self._complain(f"refused: {why}")
        self.send(Rejected(reason=why, lost=lost))
        self._refused = True
        self._wait(FAREWELL_S, self.abort)
        if self.node is not None and self.transport.can_write_eof():
            self.transport.write_eof()  # After a close, what it still sends would cost it our words.
        else:
            self.transport.close()

    def _complain(self, what: str) -> None:
        self._coordinator.complaints.say(self.node or self.caller.address, what)

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.caller.stranger = self
        self._coordinator.connected(self)
        self._wait(HELLO_LIMIT_S, lambda: self.cut_off("it said no hello"))

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.node is not None:
            self._coordinator.heard(self)
        try:
            for message in self._decoder.feed(data):
                self._take(message)
                if self._refused:
                    return
        except WireError as error:
            self.refuse(str(error), lost=isinstance(error, JobUnknown))

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        self.closed_by_peer = error is None and not self._cut and not self._refused
        self._coordinator.disconnected(self)

    def _wait(self, seconds: float, act: Callable[[], None]) -> None:
        self._stop_waiting()
        self._patience = self._loop.call_later(seconds, act)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    # ---- what is said ----

    def _take(self, message: Spoken | Unreadable) -> None:
        if self.supplies:
            self._take_from_supplier(message)
        elif self.node is None:
            self._greet(message)
        elif isinstance(message, Sent):
            forged = admission.forgery(self.node, message.event)
            if forged is not None:
                raise WireError(forged)
            self._coordinator.arrived(self, message)
        elif isinstance(message, Unreadable):
            unfit = admission.unreadable(message.body, message.error)
            self._coordinator.arrived_unfit(self, unfit)
        elif isinstance(message, EvidenceTaken):
            self._coordinator.examinations.add(self.node, message)
        elif isinstance(message, Beat):
            self._coordinator.beaten(self, message)
        else:
            raise WireError("it said hello twice")

    def _take_from_supplier(self, message: Spoken | Unreadable) -> None:
        if isinstance(message, Unreadable):
            raise message.error
        if not isinstance(message, FromSupplier):
            raise WireError("it is a supplier, and spoke as a node")
        self._coordinator.supplier.take(self, message)

    def _greet(self, hello: Spoken | Unreadable) -> None:
        if isinstance(hello, Unreadable):
            raise greeting.unreadable(hello.body, hello.error, self._coordinator.token)
        if not isinstance(hello, Hello | Visit | SupplierHello):
            raise WireError("the first message was no hello")
        greeting.check_caller(hello, self._coordinator.token)
        if isinstance(hello, Visit):
            self._stop_waiting()
            self._coordinator.visited(self, hello)
            return
        if isinstance(hello, SupplierHello):
            self._coordinator.supplier.greeted(self, hello)
            self._coordinator.let_in(self)
            self._stop_waiting()
            self._decoder.max_bytes = framing.MAX_FRAME_BYTES
            self.supplies = True
            return
        refusal = self._coordinator.refusal(hello)
        if refusal is not None:
            raise WireError(f"node {hello.node}: {refusal}")
        self._stop_waiting()
        self._decoder.max_bytes = framing.MAX_FRAME_BYTES
        self.node, self.round, self.number = hello.node, hello.round, hello.stream
        self.direct = hello.address == address_of(self.transport.get_extra_info("peername"))
        self._coordinator.greeted(self, hello)
