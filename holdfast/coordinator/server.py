"""One process per job that decides.

Streams come in, each from one agent. Their events go into one inbox; a single task takes out all that
are there, has them journaled in one transaction, hands each to the core, and sends the actions that
come out. So there is one order of events, it is the journal's, and nothing is acted upon that is not
written down. A deadline that the core asks for comes back to it as one more event.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from dataclasses import dataclass, field

from msgspec import Struct

from holdfast import framing
from holdfast.clock import JobClock
from holdfast.coordinator.journal import Entry, Journal, Snapshot
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.errors import WireError
from holdfast.messages.actions import CloseJob
from holdfast.messages.events import AnyEvent, NodeResumed, StreamEnded, Tick
from holdfast.messages.units import NodeId
from holdfast.messages.wire import (
    PROTOCOL,
    Ack,
    FromAgent,
    Hello,
    Refused,
    Sent,
    Welcome,
)

log = logging.getLogger("holdfast.coordinator")

HELLO_LIMIT_S = 5.0
LAST_LIMIT_S = 1.0
READ_BYTES = 1 << 16
MAX_UNSENT_BYTES = 4 << 20


class Arrival(Struct):
    """An event on its way to the core."""

    event: AnyEvent
    node: NodeId | None = None
    number: int = 0


@dataclass
class Stream:
    """One agent's connection."""

    node: NodeId
    writer: asyncio.StreamWriter

    def send(self, message: Struct) -> None:
        if self.writer.is_closing():
            return
        if self.writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("node %s does not read what it is sent; its stream is cut", self.node)
            self.writer.transport.abort()
            return
        self.writer.write(framing.encode(message))


@dataclass
class Coordinator:
    job: Job
    journal: Journal
    clock: JobClock
    token: str
    acked: dict[NodeId, int] = field(default_factory=dict)
    _streams: dict[NodeId, Stream] = field(default_factory=dict)
    _inbox: list[Arrival] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _talks: set[asyncio.Task[None]] = field(default_factory=set)
    _timer: asyncio.TimerHandle | None = None
    _journal_trouble: str | None = None

    async def serve(self, listener: socket.socket, restarted: AnyEvent | None) -> int:
        """Run the job to its end; `restarted` tells the core that it had a coordinator before."""
        if restarted is not None:
            self._post(Arrival(restarted))
        server = await asyncio.start_server(self._on_connection, sock=listener)
        async with server:
            return await self._decide()

    def _post(self, arrival: Arrival) -> None:
        self._inbox.append(arrival)
        self._arrived.set()

    # ---- deciding ----

    async def _decide(self) -> int:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._inbox = self._inbox, []
            code = self._take_in(self._new_ones(batch))
            await asyncio.sleep(0)
            if code is not None:
                await self._flush()
                return code

    def _new_ones(self, batch: list[Arrival]) -> list[Arrival]:
        """Drop what was sent again after a broken stream and is in the journal already."""
        fresh = []
        for arrival in batch:
            if arrival.node is not None:
                if arrival.number and arrival.number <= self.acked.get(arrival.node, 0):
                    continue
                if arrival.number:
                    self.acked[arrival.node] = arrival.number
            fresh.append(arrival)
        return fresh

    def _take_in(self, batch: list[Arrival]) -> int | None:
        now = self.clock.now()
        entries = [Entry(now, a.event, a.node if a.number else None, a.number) for a in batch]
        self._note_trouble(self.journal.append(entries))
        code = None
        for arrival in batch:
            for action in jobs.handle(self.job, arrival.event, now):
                if isinstance(action, CloseJob):
                    code = action.code
                elif action.node in self._streams:
                    self._streams[action.node].send(action)
        for node in {a.node for a in batch if a.node is not None and a.number}:
            if node in self._streams:
                self._streams[node].send(Ack(number=self.acked[node]))
        if self.journal.snapshot_due():
            self.journal.write_snapshot(Snapshot(self.job, now, self.acked))
        self._set_timer()
        return code

    def _note_trouble(self, trouble: str | None) -> None:
        if trouble != self._journal_trouble:
            if trouble is not None:
                log.error(
                    "the journal cannot be written (%s); training goes on without it", trouble
                )
            else:
                log.warning("the journal can be written again; nothing is missing from it")
        self._journal_trouble = trouble

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = jobs.deadline(self.job)
        if deadline is not None:
            delay = max(0.0, deadline - self.clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        self._post(Arrival(Tick(at=self.clock.now())))

    async def _flush(self) -> None:
        """Send what is still to be sent, and let every stream end in its own way."""
        for stream in self._streams.values():
            stream.writer.close()
        if self._talks:
            await asyncio.wait(self._talks, timeout=LAST_LIMIT_S)

    # ---- streams ----

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stream: Stream | None = None
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        try:
            decoder = framing.FrameDecoder[FromAgent](FromAgent)  # type: ignore[arg-type]
            greeting = self._greet(reader, writer, decoder)
            welcome = await asyncio.wait_for(greeting, HELLO_LIMIT_S)
            stream, rest = welcome
            await self._read(stream, reader, decoder, rest)
        except (WireError, asyncio.TimeoutError) as error:
            log.warning("%s: cut off: %s", writer.get_extra_info("peername"), error or "no hello")
        except ConnectionError:
            pass
        finally:
            if stream is not None and self._streams.get(stream.node) is stream:
                del self._streams[stream.node]
                self._post(Arrival(StreamEnded(at=self.clock.now(), node=stream.node), stream.node))
            writer.close()
            self._talks.discard(talk)

    async def _greet(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: framing.FrameDecoder[FromAgent],
    ) -> tuple[Stream, list[FromAgent]]:
        messages: list[FromAgent] = []
        while not messages:
            data = await reader.read(READ_BYTES)
            if not data:
                raise WireError("it closed before it said hello")
            messages = decoder.feed(data)
        hello = messages[0]
        self._check(hello, writer)
        assert isinstance(hello, Hello)
        older = self._streams.pop(hello.node, None)
        if older is not None:
            older.writer.transport.abort()
        stream = self._streams[hello.node] = Stream(hello.node, writer)
        now, acked = self.clock.now(), self.acked.get(hello.node, 0)
        stream.send(Welcome(job=self.job.name, now=now, acked=acked))
        if acked:
            resumed = NodeResumed(at=now, node=hello.node, round=hello.round, busy=hello.busy)
            self._post(Arrival(resumed, hello.node))
        return stream, messages[1:]

    def _check(self, hello: FromAgent, writer: asyncio.StreamWriter) -> None:
        reason = None
        if not isinstance(hello, Hello):
            reason = "the first message was no hello"
        elif not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            reason = "wrong token for this job"
        elif hello.protocol != PROTOCOL:
            reason = f"this coordinator speaks protocol {PROTOCOL}, not {hello.protocol}"
        if reason is not None:
            writer.write(framing.encode(Refused(reason=reason)))
            raise WireError(reason)

    async def _read(
        self,
        stream: Stream,
        reader: asyncio.StreamReader,
        decoder: framing.FrameDecoder[FromAgent],
        messages: list[FromAgent],
    ) -> None:
        while True:
            for message in messages:
                if not isinstance(message, Sent):
                    raise WireError(f"a {type(message).__name__} in the middle of a stream")
                if getattr(message.event, "node", None) != stream.node:
                    raise WireError(f"node {stream.node} spoke for another")
                self._post(Arrival(message.event, stream.node, message.number))
            data = await reader.read(READ_BYTES)
            if not data:
                return
            messages = decoder.feed(data)
