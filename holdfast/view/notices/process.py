"""Runs the sender of notices: a process beside the launcher that hosts the coordinator.

It follows the journal, so a coordinator that is killed, and one that has ended, changes nothing for it:
what there is to tell is in the file. It ends by itself when the job has ended and the last notice is
delivered or its time is up; the launcher waits for that (`launch/beside.py`). If the launcher is killed
it lives just long enough to tell that the job is lost.

What was told is noted in the job's home. A sender that was killed and started again, or the sender of
a job that was queued again, goes on from there; only what was being delivered is lost with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence

import msgspec

from holdfast import kernel
from holdfast.jobhome import JobHome, write_privately
from holdfast.messages.units import Seconds, Time
from holdfast.view.follower import Follower, JournalFile
from holdfast.view.notices.delivery import NoticeRoute
from holdfast.view.notices.news import IncidentNews, NoticesTold
from holdfast.view.notices.notice import Notice, of_incidents, of_the_end
from holdfast.view.notices.targets import target_of

LOOK_EVERY_S: Seconds = 30.0
NICENESS = 10


def run_notices(
    home: JobHome, targets: Sequence[str], launcher_pid: int, last_word_s: Seconds
) -> int:
    """Send notices of a job until it is over, and for this long after that."""
    kernel.name_process("holdfast-notes")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    home.leave()
    os.nice(NICENESS)
    asyncio.run(Sender(home, targets, last_word_s).run(launcher_pid))
    os._exit(0)  # A target that still hangs must not keep the process.


class Sender:
    """Follows one job, and tells its targets."""

    def __init__(self, home: JobHome, targets: Sequence[str], last_word_s: Seconds) -> None:
        self._home = home
        self._follower = Follower(JournalFile(home))
        self._news = IncidentNews(_noted(home))
        self._deliveries = [NoticeRoute(target_of(text)) for text in targets]
        self._last_word_s = last_word_s
        self._over = asyncio.Event()
        """Set when the launcher says that the job is over, or is gone."""

    async def run(self, launcher_pid: int) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        kernel.unblock_signals()
        watched = _watch(launcher_pid)
        if watched is None:
            self._over.set()
        else:
            loop.add_reader(watched, self._over.set)
        while not self._over.is_set():
            self._follower.catch_up()
            if self._follower.opened:
                if self._follower.status().state == "ended":
                    break
                self._tell_incidents()
            await self._something_new()
        if watched is not None:
            loop.remove_reader(watched)
        self._follower.catch_up()
        if self._follower.opened:
            self._tell_end()

    async def _something_new(self) -> None:
        """Wait for an event, for the time of the next notice, or for the end."""
        until = self._next_at()
        limit_s = LOOK_EVERY_S if until is None else max(0.05, until - time.time())
        waits = [
            asyncio.ensure_future(self._follower.follow()),
            asyncio.ensure_future(self._over.wait()),
        ]
        await asyncio.wait(
            waits, timeout=min(limit_s, LOOK_EVERY_S), return_when=asyncio.FIRST_COMPLETED
        )
        for one in waits:
            one.cancel()

    def _next_at(self) -> Time | None:
        if not self._follower.opened:
            return None
        return self._news.next_at(self._follower.incidents(), Time(time.time()))

    def _tell_incidents(self) -> None:
        incidents, now = self._follower.incidents(), Time(time.time())
        new = self._news.due(incidents, now)
        if not new:
            return
        status, goodput = self._follower.status(), self._follower.goodput()
        self._send(of_incidents(status, goodput, new, len(incidents), socket.gethostname(), now))
        self._news.tell(new, incidents)
        _note(self._home, self._news.told)

    def _tell_end(self) -> None:
        """Send the last notice, and give it the time that there is."""
        incidents, now = self._follower.incidents(), Time(time.time())
        new = self._news.untold(incidents, now, all=True)
        status, goodput = self._follower.status(), self._follower.goodput()
        self._send(of_the_end(status, goodput, new, len(incidents), socket.gethostname(), now))
        deadline = time.monotonic() + self._last_word_s
        for delivery in self._deliveries:
            delivery.finish(deadline)
        for delivery in self._deliveries:
            delivery.join()
        self._news.tell(new, incidents)
        _note(self._home, self._news.told)

    def _send(self, notice: Notice) -> None:
        for delivery in self._deliveries:
            delivery.put(notice)


def _watch(launcher_pid: int) -> int | None:
    """Return a descriptor that is readable once the launcher is gone; None if it is already."""
    try:
        fd = os.pidfd_open(launcher_pid)
    except OSError:
        return None
    if os.getppid() != launcher_pid:
        os.close(fd)
        return None
    return fd


def _noted(home: JobHome) -> NoticesTold:
    try:
        return msgspec.json.decode(home.notices.read_bytes(), type=NoticesTold)
    except (OSError, msgspec.MsgspecError):
        return NoticesTold()


def _note(home: JobHome, told: NoticesTold) -> None:
    try:
        write_privately(home.notices, msgspec.json.encode(told))
    except OSError:
        pass  # A full disk: a notice may come twice.
