"""Follows a job through its journal.

A viewer rebuilds the job by replaying its events through the core, as `holdfast status` does, and then
takes in what is added. It asks nothing of the coordinator and writes nothing: whether it is there, slow
or killed makes no difference to the job.

Where the events come from is an `EventSource`: the journal's file (`JournalFile`), or a coordinator on
another machine (`view.remote`). A source may turn into that of another job: a job of the same name was
started anew, and its journal took the place of the old one. Then everything begins again.

A journal is replayed from its first event, because a snapshot has no history. That of a large job takes
a while, so `catch_up` can be given a limit and called again; `behind` says whether there is more. What
was read of a long journal is kept in the job's home (`view.history.kept`), and the next viewer goes on
from there. Who cannot wait even so begins at the newest snapshot (`begin_late`): that has the job as it
is now, with its incidents and where all seconds went, and only lacks how it came to that.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.collecting import seldom_collecting
from holdfast.coordinator.journal import JournalReader, decoded
from holdfast.core import report
from holdfast.core.job import Job
from holdfast.core.replay import Entry, Following, JobSnapshot
from holdfast.errors import JobError, JournalError
from holdfast.jobhome import JobHome
from holdfast.messages.actions import AnyAction
from holdfast.messages.reports import DataAccount, GoodputReport, IncidentReport, StatusReport
from holdfast.messages.units import Seconds, Time
from holdfast.view.history import kept
from holdfast.view.history.history import JobHistory
from holdfast.view.history.kept import KeptHistory

LOOK_EVERY_S: Seconds = 0.05
"""How often the file is looked at. A look costs some microseconds."""
ALIVE_EVERY_S: Seconds = 0.5
TELL_EVERY_S: Seconds = 0.2
"""How often it is told how much of a long journal was taken in."""
BATCH = 500
"""Events that are read at once; SQLite holds no lock between two batches."""
KEPT_FROM = 20_000
"""Events from which on what was read is kept for the next viewer."""
KEEP_EVERY_S: Seconds = 60.0


class EventSource(Protocol):
    """Where the events of a job come from."""

    name: str

    def entries(self, after: int, limit: int) -> list[Entry]:
        """Return the next events after the one of that number; none if there are no more yet."""

    def replaced(self) -> bool:
        """Return whether this has become the source of another job since the last call."""

    def alive(self) -> bool:
        """Return whether a process runs the job."""

    def last(self) -> int:
        """Return the number of the newest event."""

    def snapshot(self) -> JobSnapshot | None:
        """Return the newest state that was written down, if any was."""

    async def changed(self) -> None:
        """Return when there may be something new."""

    def close(self) -> None: ...


class Follower:
    """A job as its journal describes it, kept up to date."""

    def __init__(self, source: EventSource) -> None:
        self.name = source.name
        self.source = source
        self.behind = True
        """Whether there are events that were not taken in yet."""
        self.changes = 0
        """Counts what was taken in: equal as long as nothing has changed."""
        self.restarts = 0
        """Counts how often everything began again: what was learnt before holds no more."""
        self._history: JobHistory | None = None
        self._following = Following(self._begin, self._hear)

    @classmethod
    def open(cls, home: JobHome, told: Callable[[float], None] = lambda share: None) -> Follower:
        """Follow the journal of a job of this machine, from its first event until now. What takes long
        is told from time to time: the share that was taken in."""
        follower = cls.resumed(home)
        try:
            follower.read_and_keep(home.history, told)
        except OSError:  # The next viewer has to read it again.
            follower.catch_up()
        if follower._history is None:
            raise JobError(f"job {home.name} has no events yet; try again in a moment")
        return follower

    @classmethod
    def resumed(cls, home: JobHome) -> Follower:
        """Follow such a journal from where an earlier viewer left off; nothing new is read yet."""
        follower = cls(JournalFile(home))
        if follower.unread >= KEPT_FROM:
            follower.go_on_from(kept.read(home.history))
        return follower

    @classmethod
    def from_now(cls, home: JobHome) -> Follower:
        """Follow a job of this machine whose past does not matter: of a long journal, as that of a job
        which was queued again, the newest snapshot and what came after it is read."""
        follower = cls(JournalFile(home))
        if follower.unread >= KEPT_FROM:
            follower.begin_late()
        return follower

    @classmethod
    def at_end(cls, home: JobHome) -> Follower:
        """Read the whole journal of a job that is over, though its launcher may still hold its lock;
        it has not opened if there are no events."""
        follower = cls(EndedJournal(home))
        follower.catch_up()
        return follower

    def close(self) -> None:
        self.source.close()

    # ---- where to begin ----

    def go_on_from(self, known: KeptHistory | None) -> bool:
        """Begin where another viewer left off; False if that was not of this journal."""
        if known is None or not self._is_of(known):
            return False
        self._history = known.history
        self._history.attach(known.snapshot.job)
        self._following.go_on_from(known.snapshot)
        return True

    def begin_late(self) -> bool:
        """Begin at the newest snapshot, without what was before it; False if there is none."""
        snapshot = self.source.snapshot()
        if snapshot is None:
            return False
        self._history = JobHistory.begun(snapshot.job, snapshot.at)
        self._following.go_on_from(snapshot)
        return True

    @seldom_collecting()
    def read_and_keep(self, path: Path, told: Callable[[float], None] = lambda share: None) -> None:
        """Read all that there is; what is much is kept, also on the way. An OSError if it cannot be."""
        taken, kept_at = self.taken, time.monotonic()
        while True:
            self.catch_up(TELL_EVERY_S)
            told(self.progress)
            late = not self.behind or time.monotonic() - kept_at > KEEP_EVERY_S
            if late and self.taken - taken >= KEPT_FROM:
                self._keep(path)
                taken, kept_at = self.taken, time.monotonic()
            if not self.behind:
                return

    def _keep(self, path: Path) -> None:
        snapshot = self._following.snapshot
        assert snapshot is not None
        kept.write(path, KeptHistory(self._entry(self.taken), snapshot, self.history))

    def _is_of(self, known: KeptHistory) -> bool:
        """Whether the newest event that was read is the same in this journal."""
        return known.newest is not None and known.newest == self._entry(known.snapshot.job.events)

    def _entry(self, number: int) -> Entry | None:
        found = self.source.entries(number - 1, 1)
        return found[0] if found else None

    # ---- keeping up ----

    def catch_up(self, limit_s: Seconds | None = None) -> bool:
        """Take in what was written since; True if there was anything. With a limit, stop after that
        time even if there is more."""
        if self.source.replaced():
            self._following.forget()
            self._history = None
            self.restarts += 1
        began, took = time.monotonic(), False
        while True:
            entries = self.source.entries(self.taken, BATCH)
            self.behind = bool(entries)
            if not entries:
                return took
            took = True
            if not self._following.take(entries):
                self.restarts += 1
            if self._history is not None:
                self._history.settle()
            self.changes += 1
            if limit_s is not None and time.monotonic() - began >= limit_s:
                return took

    async def follow(self) -> None:
        """Return when there may be something new; at once while there is more to take in."""
        if not self.behind:
            await self.source.changed()

    @property
    def unread(self) -> int:
        """Events that were not taken in yet."""
        return max(0, self.source.last() - self.taken)

    @property
    def progress(self) -> float:
        """Share of the journal that was taken in."""
        last = self.source.last()
        return min(1.0, self.taken / last) if last else 1.0

    @property
    def taken(self) -> int:
        """Number of the newest event that was taken in."""
        snapshot = self._following.snapshot
        return 0 if snapshot is None else snapshot.job.events

    def _begin(self, job: Job) -> None:
        self._history = JobHistory.begun(job, job.opened_at)

    def _hear(self, job: Job, entry: Entry, actions: list[AnyAction]) -> None:
        assert self._history is not None
        self._history.hear(job, entry, actions)

    # ---- what is known ----

    @property
    def opened(self) -> bool:
        """Whether the job has begun; nothing below may be asked before."""
        return self._following.snapshot is not None

    @property
    def job(self) -> Job:
        assert self._following.snapshot is not None, "the journal has no events yet"
        return self._following.snapshot.job

    @property
    def history(self) -> JobHistory:
        assert self._history is not None, "the journal has no events yet"
        return self._history

    @property
    def alive(self) -> bool:
        """Whether a process runs the job."""
        return self.source.alive()

    @property
    def now(self) -> Time:
        """The time up to which the job is known: now, if it lives, else that of its last event."""
        assert self._following.snapshot is not None
        at = self._following.snapshot.at
        return Time(max(time.time(), at)) if self.alive and not self.behind else at

    @property
    def known_until(self) -> Time:
        """Time of the newest event that was taken in."""
        assert self._following.snapshot is not None
        return self._following.snapshot.at

    def status(self) -> StatusReport:
        return report.status(self.job, self.now, self.alive)

    def goodput(self) -> GoodputReport:
        return report.goodput(self.job, self.now)

    def data(self) -> list[DataAccount]:
        return report.data(self.job)

    def incidents(self) -> list[IncidentReport]:
        return report.incidents(self.job)


class JournalFile:
    """The journal of a job of this machine."""

    def __init__(self, home: JobHome) -> None:
        self.name = home.name
        self._home = home
        self._reader: JournalReader | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of what is open."""
        self._writes = 0
        self._alive = home.alive()
        self._alive_at = time.monotonic()
        self._open()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def entries(self, after: int, limit: int) -> list[Entry]:
        if self._reader is None:
            return []
        rows = self._reader.rows(after, limit)
        return list(decoded(rows, after, str(self._home.journal)))

    def last(self) -> int:
        return 0 if self._reader is None else self._reader.last()

    def snapshot(self) -> JobSnapshot | None:
        return None if self._reader is None else self._reader.newest_snapshot()[0]

    def replaced(self) -> bool:
        """Open the journal that is there now, if it is another file than before or has begun."""
        known = self._file
        if self._reader is not None and not self._reader.empty and self._there() == known:
            return False
        if self._there() is None:
            return False  # What was read stays true; a job of the same name may come.
        self.close()
        self._open()
        return known is not None and self._file != known

    def alive(self) -> bool:
        now = time.monotonic()
        if now - self._alive_at >= ALIVE_EVERY_S:
            self._alive, self._alive_at = self._home.alive(), now
        return self._alive

    async def changed(self) -> None:
        alive = self._alive
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            there = self._there()
            if self._reader is None or self._reader.empty:
                new = there is not None
            else:
                writes = self._reader.writes()
                new = writes != self._writes or (there is not None and there != self._file)
                self._writes = writes
            if new or self.alive() != alive:
                return

    def _there(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._home.journal)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _open(self) -> None:
        self._file = self._there()
        if self._file is None:
            return
        try:
            self._reader = JournalReader(self._home.journal)
            self._writes = self._reader.writes()
        except JournalError:
            self._reader = None
            if self._there() is not None:
                raise


class EndedJournal(JournalFile):
    """The journal of a job that nothing is added to any more."""

    def alive(self) -> bool:
        return False
