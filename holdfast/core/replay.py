"""Feeds events to a job, live or from a journal, so that one bad event never ends it.

A handler that raises leaves the job half changed, so that job is thrown away and rebuilt from the
journal as it was before the event. The event is set aside: an `EventSetAside` is written down, which
opens an incident, and the event is given again after it, with all that had come behind it. When it
fails time and again it is dropped.

A replay skips what was set aside and reads what was given again, so it leads to the same job. An
event that fails only in a replay (the coordinator died before it could set it aside) is skipped too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from msgspec import Struct, field

from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.errors import JournalCorrupt
from holdfast.messages.actions import AnyAction
from holdfast.messages.events import AnyEvent, EventSetAside, JobOpened
from holdfast.messages.units import NodeId, Time

TRIES = 3
"""How often an event is given to the job before it is dropped."""
MAX_ERROR_CHARS = 1 << 16
"""An exception's text may contain a whole message; a journal must be able to read it back."""


class Entry(Struct, frozen=True):
    """One event as the core took it in: at that time, and from which node with which number."""

    at: Time
    event: AnyEvent
    node: NodeId | None = None
    node_number: int = 0


class JobSnapshot(Struct):
    """The job after the event of the number that `job.events` says."""

    job: Job
    at: Time
    acked: dict[NodeId, int] = field(default_factory=dict)
    """The last event taken in of each node."""


class Records(Protocol):
    """What a journal has to do for those who feed a job."""

    def append(self, entries: Sequence[Entry]) -> None: ...

    def read(self) -> tuple[JobSnapshot | None, Iterable[Entry]]:
        """Read the newest snapshot, made anew each time, and all entries after it."""


Hearer = Callable[[Job, Entry, list[AnyAction]], None]
Handle = Callable[[Job, AnyEvent, Time], list[AnyAction]]


class Intake:
    """Takes events in for a job, one by one."""

    def __init__(self, job: Job, records: Records, handle: Handle | None = None) -> None:
        """`handle` takes the place of the job's own, for tests that make it raise."""
        self.job = job
        self._records = records
        self._handle = handle or jobs.handle

    def take(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, list[AnyAction]]]:
        """Write events down, then let the job decide on each; what is to be done, event by event."""
        self._records.append(entries)
        queue = list(entries)
        tried: dict[int, int] = {}
        while queue:
            entry, number = queue[0], self.job.events + 1
            try:
                actions = self._handle(self.job, entry.event, entry.at)
            except Exception as error:  # An error of our own must not cost anybody the job.
                tried[id(entry)] = tried.get(id(entry), 0) + 1
                queue = self._set_aside(queue, number, error, tried[id(entry)] >= TRIES)
                continue
            del queue[0]
            yield entry, actions

    def _set_aside(
        self, queue: list[Entry], number: int, error: Exception, dropped: bool
    ) -> list[Entry]:
        """Undo what a failed event changed; what is to be taken in instead."""
        failed = queue[0]
        rebuilt = replay(self._records.read, before=number)
        assert rebuilt is not None
        self.job = rebuilt.job
        if isinstance(failed.event, EventSetAside):
            self.job.events = number
            return queue[1:]
        aside = EventSetAside(
            at=failed.at,
            number=number,
            last=number + len(queue) - 1,
            what=type(failed.event).__name__,
            node=getattr(failed.event, "node", None),
            error=f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS],
            traceback="".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:],
            dropped=dropped,
        )
        self.job.events = aside.last
        again = [Entry(failed.at, aside), *(queue[1:] if dropped else queue)]
        self._records.append(again)
        return again


def replay(
    read: Callable[[], tuple[JobSnapshot | None, Iterable[Entry]]],
    before: int | None = None,
    prepare: Callable[[Job], None] = lambda job: None,
    hear: Hearer | None = None,
) -> JobSnapshot | None:
    """Rebuild the job as it was before the event of that number, or after the last; None when there
    is none. `prepare` is called with the job as it is at the beginning, `hear` after each event."""
    bad: set[int] = set()
    while True:
        try:
            return _replay(*read(), before, bad, prepare, hear)
        except _Failed as failed:
            bad.add(failed.number)


class Following:
    """Rebuilds a job event by event, as its journal grows, without keeping the events.

    An event that sets others aside comes after them, when they have been given to the job already;
    then the job is to be rebuilt from the first event without them. That is as rare as the error which
    it stems from.
    """

    def __init__(self, prepare: Callable[[Job], None], hear: Hearer) -> None:
        self.snapshot: JobSnapshot | None = None
        self._prepare = prepare
        self._hear = hear
        self._skipped: set[int] = set()

    def forget(self) -> None:
        """Begin anew, with the first event of another journal."""
        self.snapshot = None
        self._skipped.clear()

    def go_on_from(self, snapshot: JobSnapshot) -> None:
        """Take in what comes after this state."""
        self.snapshot = snapshot

    def take(self, entries: Iterable[Entry]) -> bool:
        """Take the next events in; False if all events are to be given again, from the first one."""
        for entry in entries:
            if self.snapshot is None:
                self.snapshot = _opened(entry)
                self._prepare(self.snapshot.job)
                continue
            number = self.snapshot.job.events + 1
            again = _set_aside_by(entry) - self._skipped
            try:
                if not again:
                    _take(self.snapshot, entry, number, self._skipped, self._hear)
            except _Failed:
                again = {number}
            if again:
                self._skipped |= again
                self.snapshot = None
                return False
        return True


class _Failed(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _replay(
    snapshot: JobSnapshot | None,
    entries: Iterable[Entry],
    before: int | None,
    bad: set[int],
    prepare: Callable[[Job], None],
    hear: Hearer | None,
) -> JobSnapshot | None:
    entries = list(entries)
    skipped = set(bad)
    for entry in entries:
        skipped |= _set_aside_by(entry)
    if snapshot is not None:
        prepare(snapshot.job)
    for entry in entries:
        if snapshot is None:
            snapshot = _opened(entry)
            prepare(snapshot.job)
            continue
        number = snapshot.job.events + 1
        if number == before:
            break
        _take(snapshot, entry, number, skipped, hear)
    return snapshot


def _opened(entry: Entry) -> JobSnapshot:
    if not isinstance(entry.event, JobOpened):
        raise JournalCorrupt("the journal does not begin with the opening of a job")
    return JobSnapshot(jobs.opened(entry.event), entry.at)


def _set_aside_by(entry: Entry) -> set[int]:
    if not isinstance(entry.event, EventSetAside):
        return set()
    return set(range(entry.event.number, entry.event.last + 1))


def _take(
    snapshot: JobSnapshot, entry: Entry, number: int, skipped: set[int], hear: Hearer | None
) -> None:
    if number in skipped:
        snapshot.job.events = number
    else:
        _give(snapshot.job, entry, number, hear)
    snapshot.at = entry.at
    if entry.node is not None:
        snapshot.acked[entry.node] = entry.node_number


def _give(job: Job, entry: Entry, number: int, hear: Hearer | None) -> None:
    try:
        if hear is None:
            jobs.decide(job, entry.event, entry.at)
            return
        actions = jobs.handle(job, entry.event, entry.at)
    except Exception as error:  # It was set aside when it came, or would have been.
        raise _Failed(number) from error
    hear(job, entry, actions)
