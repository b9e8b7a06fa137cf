"""Knows what failed in the other jobs of this home, to say where a fault was seen before.

Journals are read in a thread, the newest first, each once for each state of its file; how many, for how
long and how often is bounded. Nobody waits for it: what is not read yet is not known yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Final, NamedTuple

from holdfast.coordinator.journal import JournalReader
from holdfast.core.replay import Entry, JobSnapshot, replay
from holdfast.errors import HoldfastError
from holdfast.jobhome import JobHome, homes
from holdfast.messages.records import Incident
from holdfast.messages.units import Seconds, Time
from holdfast.view.web.answers import alike
from holdfast.view.web.listing import Stamp, journal_stamp

MOST_JOBS: Final = 100
"""Jobs whose journals are read: the newest."""
MOST_INCIDENTS: Final = 2000
"""Incidents that are kept of each: the newest."""
MOST_SHOWN: Final = 10
JOB_S: Final[Seconds] = 1.0
"""Time that the events of one journal may take; what comes after them is left out."""
ALL_S: Final[Seconds] = 10.0
"""Time that all journals may take at once; the others are read the next time."""
AGAIN_S: Final[Seconds] = 30.0
"""Journals that have changed are read again at most this often."""


class SeenIncident(NamedTuple):
    """An incident of another job."""

    job: str
    id: int
    at: Time


class ReadJournal(NamedTuple):
    """What was read of one journal."""

    stamp: Stamp
    """State that the journal was in."""
    incidents: dict[str, list[SeenIncident]]
    """By what failed."""


class SeenElsewhere:
    """Incidents of all jobs of this home, by what failed."""

    def __init__(self) -> None:
        self._known: dict[str, ReadJournal] = {}
        self._read_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stop = Event()

    def before(self, job: str, incident: Incident) -> list[SeenIncident] | None:
        """The latest incidents of other jobs like this one, before it; None if none was read yet."""
        self._keep_up()
        if self._read_at is None:
            return None
        found = [
            one
            for name, journal in self._known.items()
            if name != job
            for one in journal.incidents.get(alike(incident), [])
            if one.at < incident.fault_at
        ]
        return sorted(found, key=lambda one: -one.at)[:MOST_SHOWN]

    def close(self) -> None:
        self._stop.set()

    def _keep_up(self) -> None:
        """Begin to read what has changed, unless that was done a moment ago or goes on."""
        due = self._read_at is None or time.monotonic() - self._read_at > AGAIN_S
        if due and (self._reading is None or self._reading.done()):
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        self._known = await asyncio.to_thread(self._read_all, dict(self._known))
        self._read_at = time.monotonic()

    def _read_all(self, known: dict[str, ReadJournal]) -> dict[str, ReadJournal]:
        there = [(journal_stamp(home), home) for home in homes() if home.journal.exists()]
        chosen = sorted(there, key=lambda one: -one[0].written_at_ns)[:MOST_JOBS]
        found = {home.name: known[home.name] for _, home in chosen if home.name in known}
        deadline = time.monotonic() + ALL_S
        for stamp, home in chosen:
            if self._stop.is_set() or time.monotonic() > deadline:
                break
            if home.name not in found or found[home.name].stamp != stamp:
                found[home.name] = ReadJournal(stamp, self._incidents(home))
        return found

    def _incidents(self, home: JobHome) -> dict[str, list[SeenIncident]]:
        try:
            snapshot = self._replayed(home.journal)
        except HoldfastError:  # The list of jobs says what is wrong with it.
            return {}
        found: dict[str, list[SeenIncident]] = {}
        if snapshot is not None:
            for one in snapshot.job.incidents[-MOST_INCIDENTS:]:
                seen = SeenIncident(home.name, one.id, one.fault_at)
                found.setdefault(alike(one), []).append(seen)
        return found

    def _replayed(self, journal: Path) -> JobSnapshot | None:
        with JournalReader(journal) as reader:
            deadline = time.monotonic() + JOB_S

            def read() -> tuple[JobSnapshot | None, Iterator[Entry]]:
                snapshot, entries = reader.since_snapshot()
                return snapshot, self._limited(entries, deadline)

            return replay(read)

    def _limited(self, entries: Iterator[Entry], deadline: float) -> Iterator[Entry]:
        for entry in entries:
            if self._stop.is_set() or time.monotonic() > deadline:
                return
            yield entry
