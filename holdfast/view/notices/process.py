"""Runs the sender of notices: a process beside the one that hosts the coordinator.

It follows the journal, so a coordinator that is killed, and one that has ended, changes nothing for it:
what there is to tell is in the file. It ends by itself when the job has ended and the last notice is
delivered or its time is up; its parent waits for that (`launch/beside.py`). If the parent is killed it
lives just long enough to tell that the job is lost.

What each target was told is noted in the job's home when the target has answered. A sender that was
killed and started again, or the sender of a job that was queued again, goes on from there: a notice
that was on its way is sent again, so a target hears of everything at least once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast import kernel
from holdfast.jobhome import JobHome
from holdfast.messages.units import Seconds, Time
from holdfast.view.follower import Follower
from holdfast.view.notices import news
from holdfast.view.notices.delivery import NoticeRoute
from holdfast.view.notices.memory import NoticesMemory
from holdfast.view.notices.notice import JobSeen
from holdfast.view.notices.targets import target_of

LOOK_EVERY_S: Seconds = 30.0
GATHER_S: Seconds = 0.2
"""How long events are gathered before they are looked at, while the job runs."""
SHORTEST_WAIT_S: Seconds = 0.05
NICENESS = 10


def run_notices(
    home: JobHome, targets: Sequence[str], parent_pid: int, last_word_s: Seconds
) -> int:
    """Send notices of a job until it is over, and for this long after that."""
    kernel.name_process("holdfast-notes")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    home.leave()
    os.nice(NICENESS)
    asyncio.run(Sender(home, targets, last_word_s).run(parent_pid))
    os._exit(0)  # A target that still hangs must not keep the process.


class Sender:
    """Follows one job, and tells its targets."""

    def __init__(self, home: JobHome, targets: Sequence[str], last_word_s: Seconds) -> None:
        self._home = home
        self._targets = tuple(dict.fromkeys(targets))
        self._follower = Follower.from_now(home)
        self._job: str | None = None
        """Id of the job, once it has begun."""
        self._routes: list[NoticeRoute] = []
        self._bringing: dict[NoticeRoute, asyncio.Task[None]] = {}
        self._last_word_s = last_word_s
        self._ran = False
        """Whether the job was seen before its end: the end of the run before is no news."""
        self._over = asyncio.Event()
        """Set when the parent says that the job is over, or is gone."""
        self._deadline: float | None = None
        """When the last word must have been said, once the job is over."""

    async def run(self, parent_pid: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        kernel.unblock_signals()
        watched = _watch(parent_pid)
        if watched is None:
            self._over.set()
        else:
            loop.add_reader(watched, self._over.set)
        while self._look():
            await self._something_new()
            if self._over.is_set() and watched is not None:
                loop.remove_reader(watched)
                watched = None
        for route in self._routes:
            route.target.abort()

    def _look(self) -> bool:
        """Send what there is to tell; return whether there may be more to come."""
        self._follower.catch_up()
        if self._follower.opened:
            job = self._follower.job
            if self._job is None:
                self._begin(job.id)
            if job.id != self._job:
                return False  # Another job has taken the name of this one, which is lost.
            ended = job.state.name == "ended"
            self._ran = self._ran or not ended
            if self._deadline is None and (self._over.is_set() or (ended and self._ran)):
                self._deadline = time.monotonic() + self._last_word_s
            self._tell(job.requeues + 1)
        elif self._over.is_set():
            return False
        said = self._deadline is not None and all(route.through for route in self._routes)
        return not said and (self._deadline is None or time.monotonic() < self._deadline)

    def _begin(self, job: str) -> None:
        self._job = job
        memory = NoticesMemory(self._home, job)
        self._routes = [
            NoticeRoute(target_of(text), memory.of(text), partial(memory.note, text))
            for text in self._targets
        ]

    def _tell(self, run: int) -> None:
        """Offer the job to all routes on which no notice is under way."""
        self._bringing = {route: task for route, task in self._bringing.items() if not task.done()}
        free = [route for route in self._routes if route not in self._bringing]
        incidents, now = self._follower.incidents(), Time(time.time())
        over = self._deadline is not None
        if not over and not any(news.due(route.told, incidents, now) for route in free):
            return
        status, goodput = self._follower.status(), self._follower.goodput()
        seen = JobSeen(status, goodput, incidents, socket.gethostname(), now)
        for route in free:
            if (offered := route.offer(seen, run, self._deadline)) is not None:
                self._bringing[route] = asyncio.create_task(route.bring(*offered))

    # ---- waiting ----

    async def _something_new(self) -> None:
        """Wait for an event, an answer, the time of the next notice or try, or the end."""
        limit_s = self._next_s()
        own: set[asyncio.Task[Any]] = {asyncio.create_task(asyncio.sleep(limit_s))}
        if self._deadline is None:
            over = asyncio.create_task(self._over.wait())
            await asyncio.wait({over}, timeout=GATHER_S)
            own |= {over, asyncio.create_task(self._follower.follow())}
        waits = own | {*self._bringing.values()}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in own:
            one.cancel()

    def _next_s(self) -> Seconds:
        """Return how long there will be nothing to do if nothing happens."""
        monotonic, now = time.monotonic(), Time(time.time())
        waits_s = [LOOK_EVERY_S]
        if self._deadline is not None:
            waits_s.append(self._deadline - monotonic)
        for route in self._routes:
            if route in self._bringing:
                continue
            if (again := route.next_try(self._deadline) - monotonic) > 0:
                waits_s.append(again)
            elif (at := news.next_at(route.told, self._follower.incidents(), now)) is not None:
                waits_s.append(at - now)
        return max(SHORTEST_WAIT_S, min(waits_s))


def _watch(parent_pid: int) -> int | None:
    """Return a descriptor that is readable once the parent is gone; None if it is already."""
    try:
        fd = os.pidfd_open(parent_pid)
    except OSError:
        return None
    if os.getppid() != parent_pid:
        os.close(fd)
        return None
    return fd
