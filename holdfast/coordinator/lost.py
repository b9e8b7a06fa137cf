"""Serves in the place of a coordinator whose journal is lost.

Without its journal a coordinator does not know the job: which rounds there were, which checkpoints
count, what was decided. It must not open a new job under the same name while nodes still train in the
old one. So it decides nothing, and tells everybody who asks what is wrong and what can be done. Nodes
train on without it for as long as they can. It ends when nobody has asked for a while.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from dataclasses import dataclass, field
from typing import cast

from holdfast.coordinator.complaints import Complaints
from holdfast.coordinator.door import Door
from holdfast.coordinator.server import Coordinator
from holdfast.coordinator.stream import Stream
from holdfast.errors import JobUnknown
from holdfast.messages.wire import Hello, Rejected, Visit

log = logging.getLogger("holdfast.coordinator")

ASKED_WITHIN_S = 30.0
"""Agents knock about once a second: after this long without one, all of them are gone."""


class _Untold(Complaints):
    """Keeps quiet about peers: the reason for which all of them are refused was logged once."""

    def say(self, who: object, what: str) -> None:
        pass


@dataclass
class LostCoordinator:
    """Refuses every node and every question with one sentence."""

    reason: str
    token: str
    complaints: Complaints = field(default_factory=_Untold)
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _door: Door = field(init=False)

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        log.error("%s", self.reason)
        here = cast(Coordinator, self)  # As much of one as a stream needs that nobody gets past.
        self._door = Door(listener, tls, lambda caller: Stream(here, caller), self.complaints)
        self._door.open()
        try:
            while True:
                self._asked.clear()
                await asyncio.wait_for(self._asked.wait(), ASKED_WITHIN_S)
        except asyncio.TimeoutError:
            log.error("no node is left of the job whose journal was lost")
        finally:
            self._door.close()

    # ---- what a stream calls ----

    def refusal(self, hello: Hello) -> str:
        self._asked.set()
        raise JobUnknown(self.reason)

    def visited(self, stream: Stream, visit: Visit) -> None:
        stream.answer(Rejected(reason=self.reason, lost=True))

    def connected(self, stream: Stream) -> None:
        """Have nothing to tell a connection before it asks."""

    def disconnected(self, stream: Stream) -> None:
        self._door.gone(stream.caller)
