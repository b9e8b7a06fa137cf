"""Keeps a follower for each job that somebody looks at.

A job is opened when it is first asked for and closed when nobody has asked for a while. One task a job
takes in what is new, in slices, so that the replay of a large journal does not keep others waiting.
Whoever wants to hear of changes waits for the next one (`changed`).

A journal of which much is unread is shown from its newest snapshot at once, and read in the background
by a process of its own (`past`). When that is through, a follower of the whole takes the place of the
first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import HoldfastError, JobError
from holdfast.jobhome import JobHome, find
from holdfast.messages.units import Seconds
from holdfast.view.follower import KEPT_FROM, EventSource, Follower, JournalFile
from holdfast.view.history import kept
from holdfast.view.web import answers
from holdfast.view.web.past import read_past
from holdfast.wire.tls import TlsFiles
from holdfast.wire.visitors import Coordinates, coordinates

log = logging.getLogger("holdfast.web")

SLICE_S: Final[Seconds] = 0.03
"""How long a catch-up may keep others waiting."""
IDLE_S: Final[Seconds] = 300.0
"""A job that nobody has asked for in this time is closed."""
LOST_RANKS_PER_S: Final = 1000
AGAIN_S: Final[Seconds] = 1.0
"""Pause before a journal that could not be read is read again."""


class WatchedJob:
    """A job that somebody looks at."""

    def __init__(
        self,
        source: EventSource,
        home: JobHome | None,
        coordinates: Callable[[], Coordinates],
    ) -> None:
        self.follower = Follower(source)
        self.home = home
        """Its home, if it is of this machine."""
        self.coordinates = coordinates
        """Where its coordinator can be asked; raises JobError if it does not run."""
        self.trouble: str | None = None
        """Why its journal cannot be read; None if it can."""
        self.used_at = time.monotonic()
        self.lookers = 0
        """Streams that are open."""
        self.leaving = False
        """Whether its streams are to end."""
        self.version = 0
        """Counts changes of any kind."""
        self.past_read: float | None = None
        """Share of the journal that was read, while the follower only knows what is new."""
        self._past_trouble: str | None = None
        """Why the rest of it cannot be read."""
        self._now: tuple[int, dict[str, Any]] | None = None
        self._lost: tuple[float, float | None] | None = None
        self._changed = asyncio.Event()
        self._tasks = [asyncio.get_running_loop().create_task(self._keep_up())]

    @property
    def name(self) -> str:
        return self.follower.name

    def leave(self) -> None:
        """Let its streams end."""
        self.leaving = True
        self._tell()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.follower.close()

    async def opened(self) -> None:
        """Wait until the journal was read to its end, or for a while if it is long."""
        deadline = time.monotonic() + 2.0
        while not self.follower.opened or self.follower.behind:
            if self.trouble is not None or time.monotonic() > deadline:
                break
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed(self.version), 0.2)
        if not self.follower.opened:
            raise JobError(
                self.trouble or f"job {self.name} has no events yet; try again in a moment"
            )

    def told_now(self) -> dict[str, Any]:
        """Where the job stands, made once for each change."""
        if self._now is None or self._now[0] != self.version:
            told = answers.now(self.follower, self._lost_today())
            self._now = (self.version, self.marked(told))
        return self._now[1]

    def marked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Say in an answer from when on the follower knows the job, unless it knows all of it."""
        since = self.follower.history.since
        if self.past_read is None or since <= self.follower.job.opened_at:
            return answer
        past: dict[str, Any] = {"since": since, "read": self.past_read}
        if self._past_trouble is not None:
            past["trouble"] = self._past_trouble
        return {**answer, "past": past}

    def _lost_today(self) -> float | None:
        """What was lost today; it is added up the more seldom the more ranks there are."""
        now, every_s = time.monotonic(), self.follower.history.timeline.ranks / LOST_RANKS_PER_S
        if self._lost is None or now - self._lost[0] > every_s:
            self._lost = (now, answers.lost_today(self.follower))
        return self._lost[1]

    # ---- reading ----

    async def changed(self, since: int) -> int:
        """Wait for a version other than that; return it."""
        while self.version == since:
            await self._changed.wait()
        return self.version

    async def _keep_up(self) -> None:
        await self._begin()
        alive = self.follower.alive
        while True:
            behind = self.follower.behind
            try:
                news = self.follower.catch_up(SLICE_S)
                trouble = None
            except HoldfastError as error:  # A damaged journal: the page says so, and others go on.
                news, trouble = False, str(error)
            news = news or behind != self.follower.behind
            if news or trouble != self.trouble or self.follower.alive != alive:
                alive, self.trouble = self.follower.alive, trouble
                self._tell()
            if trouble is not None:
                await asyncio.sleep(AGAIN_S)
            elif self.follower.behind:
                await asyncio.sleep(0)
            else:
                with suppress(HoldfastError):  # The next catch-up says what it is.
                    await self.follower.follow()

    async def _begin(self) -> None:
        """Begin with what another viewer has read; with the newest snapshot if much is still unread."""
        with suppress(HoldfastError):  # The first catch-up says what it is.
            if self.home is None or self.follower.unread < KEPT_FROM:
                return
            self.follower.go_on_from(await asyncio.to_thread(kept.read, self.home.history))
            if self.follower.unread >= KEPT_FROM and self.follower.begin_late():
                self.past_read = 0.0
                reading = asyncio.get_running_loop().create_task(self._read_past(self.home))
                self._tasks.append(reading)

    async def _read_past(self, home: JobHome) -> None:
        """Get a follower that knows the whole journal, and go on with that."""
        try:
            whole = await self._whole(home)
        except HoldfastError as error:  # Too damaged to be read; the newest is shown all the same.
            self._past_trouble = str(error)
            self._tell()
            return
        whole.restarts = self.follower.restarts + 1
        late, self.follower = self.follower, whole
        late.close()
        self.past_read = self._lost = None
        self._tell()

    async def _whole(self, home: JobHome) -> Follower:
        whole = Follower(JournalFile(home))
        try:
            try:
                await read_past(home, self._note_read)
                whole.go_on_from(await asyncio.to_thread(kept.read, home.history))
            except (OSError, HoldfastError) as error:
                log.warning("job %s is read by the server itself: %s", self.name, error)
            while whole.behind:
                whole.catch_up(SLICE_S)
                self._note_read(whole.progress)
                await asyncio.sleep(0)
        except BaseException:
            whole.close()
            raise
        return whole

    def _note_read(self, share: float) -> None:
        if self.past_read is None or abs(share - self.past_read) >= 0.005:
            self.past_read = share
            self._tell()

    def _tell(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()


class WatchedJobs:
    """All jobs that somebody looks at."""

    def __init__(self, tls: TlsFiles | None, remote: WatchedJob | None = None) -> None:
        self._tls = tls
        self._jobs: dict[str, WatchedJob] = {}
        self._remote = remote

    def __contains__(self, name: str) -> bool:
        return name in self._jobs

    @property
    def remote(self) -> WatchedJob | None:
        """The one job on another machine, if this server shows that."""
        return self._remote

    async def get(self, name: str) -> WatchedJob:
        """Find a job by its name; it is opened if it is not open. An unknown one is a JobError."""
        job = self._jobs.get(name) or self._open(name)
        job.used_at = time.monotonic()
        await job.opened()
        return job

    def _open(self, name: str) -> WatchedJob:
        if self._remote is not None:
            if name != self._remote.name:
                raise JobError(f"no job {name} here; this page shows job {self._remote.name} alone")
            self._jobs[name] = self._remote
            return self._remote
        home = find(name)
        job = WatchedJob(JournalFile(home), home, lambda: coordinates(home, self._tls))
        self._jobs[name] = job
        return job

    async def close_unused(self) -> None:
        """Close jobs that nobody has asked for in a while; runs until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 10)
            for name, job in list(self._jobs.items()):
                unused = not job.lookers and time.monotonic() - job.used_at > IDLE_S
                if unused and job is not self._remote:
                    del self._jobs[name]
                    job.close()

    def leave(self) -> None:
        """Let all streams end: the server is about to."""
        for job in self._jobs.values():
            job.leave()

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()
        self._jobs.clear()
