"""Tells open pages what changes, as server-sent events.

    now        where the job stands; at most four a second, and only when something changed. Of the map,
               only what differs from the last `now` of the same stream
    incident   an incident that began or ended, at once
    gone       the job's coordinator is not there any more
    back       it is there again
    here       nothing else was told for a while: the way is not cut

A connection can end without either side being told, so a page that hears nothing at all for longer
takes it to be cut. A page that comes back after a broken connection gets everything anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from holdfast.messages.units import Seconds
from holdfast.view.web import answers
from holdfast.view.web.watched import WatchedJob

NOW_EVERY_S: Final[Seconds] = 0.25
SILENT_S: Final[Seconds] = 4.0
"""After this time without another event `here` is sent."""


def stream(job: WatchedJob, request: Request) -> Response:
    """Answer with a stream that ends with the page, with its secret, or with the server."""
    return StreamingResponse(
        _told(job, request.scope["admitted"]),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _told(job: WatchedJob, admitted: Callable[[], bool]) -> AsyncIterator[bytes]:
    job.lookers += 1
    try:
        news = News(job)
        version, told_at = -1, 0.0
        while admitted() and not job.leaving:
            for event in news.at_once():
                yield event
            pause = told_at + NOW_EVERY_S - time.monotonic()
            if version != job.version and pause <= 0:
                version, told_at = job.version, time.monotonic()
                yield news.now()
            limit = max(0.0, pause) if version != job.version else SILENT_S
            try:
                seen = job.version
                await asyncio.wait_for(job.changed(seen), limit)
            except asyncio.TimeoutError:
                if limit == SILENT_S:
                    yield _event("here", {})
    finally:
        job.lookers -= 1
        job.used_at = time.monotonic()


class News:
    """What one stream has told, and so what is new to it."""

    def __init__(self, job: WatchedJob) -> None:
        self._job = job
        self._restarts = job.follower.restarts
        self._known = len(job.follower.job.incidents)
        self._open = {one.id for one in job.follower.job.incidents if one.closed_at is None}
        self._alive = job.follower.alive
        self._coordinators: int | None = None
        """Coordinators that the job has had; None while the journal is being read."""
        self._map: dict[str, Any] = {}

    def at_once(self) -> list[bytes]:
        """Events that do not wait."""
        follower = self._job.follower
        if not follower.opened:
            return []
        if follower.restarts != self._restarts:  # Another job of the name, or the same, replayed.
            self._restarts, self._map, self._coordinators = follower.restarts, {}, None
            self._known = min(self._known, len(follower.job.incidents))
        found = self._coordinator()
        incidents = follower.job.incidents
        if follower.behind:
            return found
        fresh = incidents[self._known :]
        closed = [
            incidents[number - 1]
            for number in sorted(self._open)
            if number <= self._known and incidents[number - 1].closed_at is not None
        ]
        self._known = len(incidents)
        self._open |= {one.id for one in fresh}
        for one in [*closed, *fresh]:
            found.append(_event("incident", answers.short(follower.job, one)))
            if one.closed_at is not None:
                self._open.discard(one.id)
        return found

    def _coordinator(self) -> list[bytes]:
        """Tell whether the coordinator went or came back; one that was restarted did both."""
        follower, found, restarted = self._job.follower, [], False
        if not follower.behind:
            known, self._coordinators = self._coordinators, follower.history.coordinators
            restarted = known not in (None, self._coordinators)
        at = {"at": follower.now}
        if (restarted and self._alive) or (self._alive and not follower.alive):
            found.append(_event("gone", at))
        if (restarted and follower.alive) or (follower.alive and not self._alive):
            found.append(_event("back", at))
        self._alive = follower.alive
        return found

    def now(self) -> bytes:
        """Where the job stands, without what this stream was told of the map before."""
        if not self._job.follower.opened:
            return b": nothing yet\n\n"
        told = self._job.told_now()
        whole = told["map"]
        told = {**told, "map": {k: v for k, v in whole.items() if self._map.get(k) != v}}
        self._map = whole
        if self._job.trouble is not None:
            told["trouble"] = self._job.trouble
        return _event("now", told)


def _event(name: str, content: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
