"""The supplier: makes what a platform has what the coordinator wants, and tells what it sees.

It knows nothing of any platform; a `Platform` has four methods, and there is one for each engine. The
loop is level-triggered: whatever wakes it (a plan, the platform, the clock), it lists what is there,
tells the coordinator what has changed, asks for what is missing, and releases what nobody wants. So
nothing depends on having seen an event, and a supplier that is killed and started again goes on where
the other stopped.

    a request is made     if it is wanted, was never seen by anybody, and is not listed
    a request is released if it is listed, alive, and not wanted; only by a supplier that has been told
                          all that is wanted
    a request is gone     if it is wanted, was listed once and is not any more, or was made a while ago
                          and never listed; the coordinator is told so on each stream, because it may
                          not know that the request was ever there

The coordinator may be away: the supplier knocks until it is back. Meanwhile nothing is started or
stopped: nobody who could decide it is there.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from holdfast import __version__, kernel
from holdfast.errors import PlatformError, WireError
from holdfast.messages.supply import Cordon, NodeWish, RequestId, Sighting, SupplyPlan
from holdfast.messages.wire import (
    PROTOCOL,
    Rejected,
    RequestsDeclined,
    Sighted,
    SupplierHello,
    SupplierWelcome,
    ToSupplier,
)
from holdfast.wire import framing

log = logging.getLogger("holdfast.supplier")

CONNECT_LIMIT_S = 5.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
LIST_EVERY_S = 10.0
"""A platform that never says that something has changed is listed this often all the same."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
CANCEL_EVERY_S = 1.0
SIGHTINGS_A_FRAME = 2_000
UNLISTED_LIMIT_S = 60.0
"""How long a platform may take to list a request that it has taken."""
ALIVE = frozenset({"pending", "running"})


class Platform(Protocol):
    """What an engine has to be able to do. Requests are named by their ids, and making one that
    exists changes nothing. Each method may raise `PlatformError`."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def together(self) -> bool:
        """Whether its nodes are taken away together: one that is told to leave speaks for all."""

    async def list(self) -> Sequence[Sighting]:
        """List this job's requests that the platform knows, ended ones too while it has them."""

    async def ask(self, wishes: Sequence[NodeWish], avoid: Sequence[Cordon]) -> None:
        """Start nodes for these requests, on none of these hosts."""

    async def release(self, requests: Sequence[RequestId]) -> None:
        """Stop the nodes of these requests, politely; what is gone already is no error."""

    async def changed(self) -> None:
        """Return when something may have changed; one that cannot tell never returns."""


class Endpoint(NamedTuple):
    """Where the coordinator is, and how it is spoken to."""

    host: str
    port: int
    token: str
    tls: ssl.SSLContext | None = None


class Supplier:
    """One platform and one job, until the job is over."""

    def __init__(
        self,
        platform: Platform,
        find: Callable[[], Endpoint | None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`find` says where the coordinator is now; None if nobody knows. `is_over` says whether the
        job has ended, for a supplier that was away when the coordinator said so and went."""
        self.platform = platform
        self.refusal = ""
        """Why the coordinator does not let it in; empty if it does, or cannot be reached."""
        self._find, self._is_over = find, is_over
        self._wanted: dict[RequestId, NodeWish] = {}
        self._avoid: tuple[Cordon, ...] = ()
        self._told = False
        """Whether all that is wanted is known, on this stream."""
        self._final = False
        self._asked: dict[RequestId, float] = {}
        """When this supplier made each request; they are not made again."""
        self._seen: set[RequestId] = set()
        """Requests that were listed; they are not made again."""
        self._sent: Mapping[RequestId, Sighting] | None = None
        """What the coordinator was told of each request, on this stream; None before the first."""
        self._wake = asyncio.Event()
        self._retry_s = 0.0

    async def run(self) -> None:
        """Supply nodes until the coordinator says that the job is over."""
        await _first_of(self._serve_always(), self._watch())

    async def _serve_always(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._final:
            if await self._serve():
                pause = FIRST_PAUSE_S
            if not self._final and self._is_over():
                await self._end_rest()
            elif not self._final:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _end_rest(self) -> None:
        """Release all nodes of a job that has ended."""
        while not self._final:
            self._wake.clear()
            try:
                listed = await self.platform.list()
                alive = [one.request for one in listed if one.status in ALIVE]
                if alive:
                    await self.platform.release(alive)
                self._final = True
            except PlatformError as error:
                log.warning("%s: %s; trying again", self.platform.name, error)
                await self._sleep()

    async def _watch(self) -> None:
        """Wake the loop when the platform says that something has changed."""
        while True:
            try:
                await self.platform.changed()
            except PlatformError as error:
                log.warning("%s: %s; trying again", self.platform.name, error)
                await asyncio.sleep(LIST_EVERY_S)
            self._wake.set()

    # ---- one stream ----

    async def _serve(self) -> bool:
        """Serve one stream to its end; False if there was none."""
        where = self._find()
        if where is None:
            return False
        try:
            connecting = asyncio.open_connection(where.host, where.port, ssl=where.tls)
            reader, writer = await asyncio.wait_for(connecting, CONNECT_LIMIT_S)
        except (OSError, asyncio.TimeoutError):
            return False
        kernel.keep_alive(writer.get_extra_info("socket"))
        self._told, self._sent = False, None
        hello = SupplierHello(
            protocol=PROTOCOL,
            token=where.token,
            platform=self.platform.name,
            version=__version__,
            together=self.platform.together,
        )
        writer.write(framing.encode(hello))
        try:
            await _first_of(self._read(reader), self._reconcile_always(writer))
            return True
        except (OSError, WireError) as error:
            log.info("the coordinator's stream broke: %s", error)
            self.refusal = str(error) if isinstance(error, WireError) else ""
            return False
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take in plans until the stream ends; after a final one nothing is read any more."""
        decoder = framing.FrameDecoder[ToSupplier](ToSupplier)  # type: ignore[arg-type]
        parts: list[SupplyPlan] = []
        while not self._final:
            data = await reader.read(1 << 16)
            if not data:
                return
            for message in decoder.feed(data):
                if isinstance(message, Rejected):
                    raise WireError(message.reason)
                if isinstance(message, SupplierWelcome):
                    self.refusal = ""
                    log.info("supplying job %s with nodes of %s", message.job, self.platform.name)
                    continue
                parts.append(message)
                if not message.more:
                    self._take(parts)
                    parts = []
        await asyncio.Event().wait()  # Until what is final is carried out.

    def _take(self, parts: Sequence[SupplyPlan]) -> None:
        """Take in one plan, which may have come in several messages."""
        if parts[0].whole:
            self._wanted, self._told = {}, True
        for part in parts:
            self._wanted.update((wish.id, wish) for wish in part.ask)
            for request in part.release:
                self._wanted.pop(request, None)
        self._avoid, self._final = parts[-1].avoid, parts[-1].final
        if self._final:  # It may be the only plan of a stream that began as the job ended.
            self._wanted, self._told = {}, True
        self._wake.set()

    # ---- the comparison ----

    async def _reconcile_always(self, writer: asyncio.StreamWriter) -> None:
        """Compare whenever there may be a difference, until a final plan is carried out."""
        while True:
            self._wake.clear()
            final = self._final
            try:
                await self._reconcile(writer)
                self._retry_s = 0.0
                if final:
                    return
            except PlatformError as error:
                self._decline(writer, error)
            except OSError as error:  # The platform's own: writing to the stream raises none.
                self._decline(writer, PlatformError(f"it failed: {error}"))
            await self._sleep()

    async def _sleep(self) -> None:
        limit_s = self._retry_s or LIST_EVERY_S
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([waking], timeout=limit_s)
        finally:
            waking.cancel()

    async def _reconcile(self, writer: asyncio.StreamWriter) -> None:
        listed = await self._list()
        self._tell(writer, listed)
        if not self._told:
            return
        alive = [name for name, one in listed.items() if one.status in ALIVE]
        unwanted = [name for name in alive if name not in self._wanted]
        if unwanted:
            await self.platform.release(unwanted)
        missing = [
            wish
            for name, wish in self._wanted.items()
            if name not in self._seen and name not in self._asked and not wish.seen
        ]
        if missing:
            await self.platform.ask(missing, self._avoid)
            self._note_asked(wish.id for wish in missing)
        if missing or unwanted:
            self._tell(writer, await self._list())

    async def _list(self) -> Mapping[RequestId, Sighting]:
        """List what is there, and what is wanted and not there any more."""
        listed = {one.request: one for one in await self.platform.list()}
        self._seen.update(listed)
        latest = asyncio.get_running_loop().time() - UNLISTED_LIMIT_S
        for name in self._wanted if self._told else ():
            gone = name in self._seen or self._asked.get(name, latest) < latest
            if name not in listed and gone:
                listed[name] = Sighting(request=name, status="deleted")
        return listed

    def _note_asked(self, requests: Iterable[RequestId]) -> None:
        self._asked.update(dict.fromkeys(requests, asyncio.get_running_loop().time()))

    def _tell(self, writer: asyncio.StreamWriter, listed: Mapping[RequestId, Sighting]) -> None:
        """Tell the coordinator what it does not know; all of it at first."""
        first, known = self._sent is None, self._sent or {}
        news = [one for name, one in listed.items() if known.get(name) != one]
        gone = [name for name in known if name not in listed]
        news += [Sighting(request=name, status="deleted") for name in gone]
        self._sent = listed
        if not news and not first:
            return
        for start in range(0, max(1, len(news)), SIGHTINGS_A_FRAME):
            stop = start + SIGHTINGS_A_FRAME
            part = tuple(news[start:stop])
            sighted = Sighted(sightings=part, whole=first, more=stop < len(news))
            writer.write(framing.encode(sighted))

    def _decline(self, writer: asyncio.StreamWriter, error: PlatformError) -> None:
        self._retry_s = min(LONGEST_RETRY_S, 2 * self._retry_s or FIRST_RETRY_S)
        log.warning("%s: %s", self.platform.name, error)
        declined = RequestsDeclined(
            requests=tuple(error.requests), why=str(error), for_good=error.for_good
        )
        self._note_asked(error.requests if error.for_good else ())
        writer.write(framing.encode(declined))


async def _first_of(*parts: Coroutine[None, None, None]) -> None:
    """Run these side by side until one of them ends, in whatever way; then end the others."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        # Before Python 3.12, `asyncio.wait_for` may swallow a cancellation. What goes on after the
        # end of its stream would take news for told that nobody heard.
        while left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=CANCEL_EVERY_S)
