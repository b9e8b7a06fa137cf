"""The coordinator's side of a supplier's stream: plans go out, sightings come in as events.

There is one supplier at a time; a newer stream takes the place of an older one, which may be a dead
connection. Nothing depends on it: while no supplier is there, plans go nowhere, and the next one is
told all that is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast import __version__
from holdfast.errors import WireError
from holdfast.messages.events import (
    AnyEvent,
    NodesSighted,
    RequestsRefused,
    SupplierJoined,
    SupplierLeft,
)
from holdfast.messages.supply import Sighting, SupplyPlan
from holdfast.messages.units import Time
from holdfast.messages.wire import (
    FromSupplier,
    RequestsDeclined,
    Sighted,
    SupplierHello,
    SupplierWelcome,
)

if TYPE_CHECKING:
    from holdfast.coordinator.stream import Stream
    from holdfast.core.job import Job

WISHES_A_FRAME = 4_000
"""A frame has a size limit, and a plan may have any number of requests."""


class SupplierStream:
    """The stream of the supplier that is there now, if there is one."""

    def __init__(
        self,
        job: Callable[[], Job | None],
        post: Callable[[AnyEvent], None],
        now: Callable[[], Time],
    ) -> None:
        self._job, self._post, self._now = job, post, now
        self._stream: Stream | None = None
        self._parts: list[Sighting] = []
        """Sightings of a list that is not complete."""

    def greeted(self, stream: Stream, hello: SupplierHello) -> None:
        """Let a supplier in; the one before it is cut off."""
        job = self._job()
        if hello.version != __version__:
            raise WireError(
                f"the coordinator is of holdfast {__version__}, the supplier of {hello.version};"
                " run the same version everywhere"
            )
        if job is None:
            raise WireError("the job has not begun: its terms are not known; try again in a moment")
        before, self._stream = self._stream, stream
        self._parts = []
        if before is not None:
            before.abort()
        stream.send(SupplierWelcome(job=job.name, job_id=job.id))
        joined = SupplierJoined(at=self._now(), platform=hello.platform, together=hello.together)
        self._post(joined)

    def take(self, stream: Stream, message: FromSupplier) -> None:
        """Take in what a supplier says; words of one that was replaced are dropped."""
        if stream is not self._stream:
            return
        if isinstance(message, Sighted):
            self._parts += message.sightings
            if message.more:
                return
            sightings, self._parts = tuple(self._parts), []
            self._post(NodesSighted(at=self._now(), sightings=sightings, whole=message.whole))
        elif isinstance(message, RequestsDeclined):
            refused = RequestsRefused(
                at=self._now(),
                requests=message.requests,
                why=message.why,
                for_good=message.for_good,
            )
            self._post(refused)
        else:
            raise WireError("it said hello twice")

    def disconnected(self, stream: Stream) -> None:
        if stream is self._stream:
            self._stream = None
            self._post(SupplierLeft(at=self._now()))

    def send(self, plan: SupplyPlan) -> None:
        """Tell the supplier what to do, if it is there; else it hears of it when it comes."""
        if self._stream is not None:
            for part in parts(plan):
                self._stream.send(part)

    def close(self) -> None:
        """Let the stream end once all is sent."""
        if self._stream is not None:
            self._stream.transport.close()


def parts(plan: SupplyPlan) -> Iterator[SupplyPlan]:
    """Cut a plan into as many messages as its size needs."""
    ask, released = plan.ask, plan.release
    rest = max(len(ask), len(released))
    for start in range(0, max(1, rest), WISHES_A_FRAME):
        stop = start + WISHES_A_FRAME
        yield replace(plan, ask=ask[start:stop], release=released[start:stop], more=stop < rest)
