"""What happened, written down before anybody acts on it.

One SQLite file in WAL mode: every event with its time, as JSON that anyone can query, and now and
then the whole state, so that a replay need not start at the beginning. All events that are at hand
are written in one transaction. A `kill -9` of the coordinator loses nothing that was acted upon; the
end of a file torn by a power cut is repaired by SQLite itself.

The state is not stored but derived: replaying the events through the core gives the same job again,
because the core has no other input.

A row that is missing, damaged, or of a version that this one does not know is read as `EventLost`, and
all others count. A journal that is gone, empty or no journal at all is not made up for: see
`coordinator.lost`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.core import replay as replaying
from holdfast.core.job import Job
from holdfast.core.ledger.books import Ledger
from holdfast.core.replay import Entry, JobSnapshot
from holdfast.core.story import Recorder
from holdfast.errors import JournalCorrupt, JournalError
from holdfast.messages.events import AnyEvent, EventLost
from holdfast.messages.reports import Booking
from holdfast.messages.units import NodeId, Time
from holdfast.messages.wire import JournalRow

VERSION = 6
SNAPSHOT_EVERY = 2000
SNAPSHOT_BYTES = 4 << 20
MISSING_AT_MOST = 10_000
"""Missing events in a row with which a journal can still be read."""

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY, at REAL NOT NULL,
    node TEXT, node_number INTEGER, event TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS snapshots (number INTEGER PRIMARY KEY, state TEXT NOT NULL) STRICT;
PRAGMA user_version={VERSION};
COMMIT;
"""

_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(AnyEvent)


_snapshot_decoder = msgspec.json.Decoder(JobSnapshot)


class Journal:
    """The coordinator's own handle: the only writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            last = self._db.execute("SELECT max(number) FROM events").fetchone()[0]
        except sqlite3.Error as error:
            raise JournalError(f"{path}: cannot be opened as a journal: {error}") from None
        self.numbered: int = last or 0
        """How many events are in it."""
        self.trouble: str | None = None
        """Why the newest events could not be written."""
        self._backlog: list[Entry] = []
        self._since_snapshot = 0
        self._bytes_since_snapshot = 0
        self._state_bytes = 0

    def append(self, entries: Sequence[Entry]) -> None:
        """Write events in one transaction, or say in `trouble` why that was not possible.

        What could not be written (a full disk) is kept and written with the next events: training
        goes on, and only a coordinator that dies before the disk has room again forgets it.
        """
        pending = self._backlog + list(entries)
        rows = [
            (self.numbered + i, e.at, e.node, e.node_number, _encoder.encode(e.event).decode())
            for i, e in enumerate(pending, start=1)
        ]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._backlog = pending
            self.trouble = str(error)
            return
        self._backlog, self.trouble = [], None
        self.numbered += len(rows)
        self._since_snapshot += len(rows)
        self._bytes_since_snapshot += sum(len(event) for *_, event in rows)

    def read(self) -> tuple[JobSnapshot | None, list[Entry]]:
        """Read the newest snapshot, and what came after it, written or not."""
        with JournalReader(self.path) as reader:
            snapshot, after = reader.newest_snapshot()
            return snapshot, [*reader.entries(after), *self._backlog]

    def snapshot_due(self) -> bool:
        long = self._since_snapshot >= max(SNAPSHOT_EVERY, self._state_bytes // 200)
        large = self._bytes_since_snapshot >= max(SNAPSHOT_BYTES, 4 * self._state_bytes)
        return (long or large) and not self._backlog

    def write_snapshot(self, snapshot: JobSnapshot) -> None:
        """Keep the state after the last event; older snapshots go."""
        state = _encoder.encode(snapshot).decode()
        self._since_snapshot = self._bytes_since_snapshot = 0
        self._state_bytes = len(state)  # A large one is written again only after much has happened.
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR REPLACE INTO snapshots VALUES (?, ?)", (self.numbered, state)
            )
            self._db.execute("DELETE FROM snapshots WHERE number < ?", (self.numbered,))
            self._db.execute("COMMIT")
        except sqlite3.Error:
            # A snapshot only makes the next replay shorter; the events are all there.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def close(self) -> None:
        self._db.close()


def replay(path: Path) -> JobSnapshot | None:
    """Replay the journal from its newest snapshot; None when it holds no job."""
    return reopen(path)[0]


def reopen(path: Path) -> tuple[JobSnapshot | None, int]:
    """Replay the journal; also return how many events of those it read are lost."""
    with JournalReader(path) as reader:
        snapshot = replaying.replay(reader.since_snapshot)
        return snapshot, reader.lost


def replay_spans(path: Path) -> tuple[JobSnapshot | None, list[Booking]]:
    """Replay the journal from its first event, and collect every booking of the ledger."""
    spans: list[Booking] = []

    def keep_spans(job: Job) -> None:
        spans.clear()
        job.of(Ledger).spans = spans

    with JournalReader(path) as reader:
        return replaying.replay(reader.from_the_start, prepare=keep_spans), spans


def replay_story(path: Path, recorder: Recorder) -> JobSnapshot | None:
    """Replay the journal from its first event, and record each event with its actions."""
    with JournalReader(path) as reader:
        return replaying.replay(reader.from_the_start, prepare=recorder.begin, hear=recorder.hear)


class JournalReader:
    """A read-only handle on a journal that a running coordinator may be writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lost = 0
        """Events that the last reading did not find."""
        try:
            self._db = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)
        except sqlite3.Error as error:
            raise JournalError(f"{path}: cannot be read: {error}") from None
        (version,) = next(self._select("PRAGMA user_version"))
        self._empty: bool = version == 0  # Its writer has just begun, or was killed before it had.
        if version not in (0, VERSION):
            raise JournalError(
                f"{path}: written as version {version} of the journal; this holdfast reads {VERSION}"
            )

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def newest_snapshot(self) -> tuple[JobSnapshot | None, int]:
        if self._empty:
            return None, 0
        rows = self._select("SELECT number, state FROM snapshots ORDER BY number DESC LIMIT 1")
        for number, state in rows:
            try:
                return _snapshot_decoder.decode(state), number
            except msgspec.DecodeError:
                return None, 0
        return None, 0

    def since_snapshot(self) -> tuple[JobSnapshot | None, Iterator[Entry]]:
        snapshot, after = self.newest_snapshot()
        return snapshot, self.entries(after)

    def from_the_start(self) -> tuple[None, Iterator[Entry]]:
        return None, self.entries(0)

    @property
    def empty(self) -> bool:
        """Whether no journal had been begun in the file when it was opened."""
        return self._empty

    def writes(self) -> int:
        """Return a number that changes whenever another process has written to the journal."""
        ((version,),) = self._select("PRAGMA data_version")
        return int(version)

    def last(self) -> int:
        """Return the number of the newest event."""
        if self._empty:
            return 0
        ((last,),) = self._select("SELECT max(number) FROM events")
        return last or 0

    def rows(self, after: int, limit: int) -> list[JournalRow]:
        """Read so many rows at most, as they were written; none is locked meanwhile or afterwards."""
        if self._empty:
            return []
        return [JournalRow(*row) for row in self._rows(after, limit)]

    def entries(self, after: int) -> Iterator[Entry]:
        if self._empty:
            return
        self.lost = 0
        for entry in decoded(
            (JournalRow(*row) for row in self._rows(after)), after, str(self._path)
        ):
            self.lost += isinstance(entry.event, EventLost)
            yield entry

    def _rows(self, after: int, limit: int = -1) -> Iterator[Any]:
        """Read the rows in order; where pages of the file are damaged, those that can be read."""
        columns, number, found = "number, at, node, node_number, event", after, 0
        try:
            query = f"SELECT {columns} FROM events WHERE number > ? ORDER BY 1 LIMIT ?"
            for row in self._select(query, after, limit):
                number, found = row[0], found + 1
                yield row
            return
        except JournalCorrupt:
            ((last,),) = self._select("SELECT max(number) FROM events")
        while number < (last or 0) and found != limit:
            number += 1
            try:
                for row in self._select(f"SELECT {columns} FROM events WHERE number = ?", number):
                    found += 1
                    yield row
            except JournalCorrupt:  # Its page: the number is missing then.
                continue

    def _select(self, query: str, *values: int) -> Iterator[Any]:
        try:
            # `yield from` would touch the cursor when the generator is dropped, after the close.
            for row in self._db.execute(query, values):  # noqa: UP028
                yield row
        except sqlite3.DatabaseError as error:
            raise JournalCorrupt(f"{self._path}: {error}") from None


def decoded(rows: Iterable[JournalRow], after: int, where: str) -> Iterator[Entry]:
    """Decode rows that follow the event of a number; what is missing or damaged is an `EventLost`.

    One that is missing has the time of the next that is there, whichever row the reading began at."""
    expected = after + 1
    for number, at, node, node_number, event in rows:
        if number - expected > MISSING_AT_MOST:
            raise JournalCorrupt(f"{where}: events {expected} to {number - 1} are missing")
        while expected < number:
            yield _lost(at, f"event {expected} is missing")
            expected += 1
        expected = number + 1
        try:
            yield Entry(Time(at), _event_decoder.decode(event), node, node_number or 0)
        except msgspec.DecodeError as error:
            yield _lost(at, f"event {number} is damaged: {error}", node, node_number)


def _lost(
    at: float, error: str, node: NodeId | None = None, node_number: int | None = None
) -> Entry:
    return Entry(Time(at), EventLost(at=Time(at), error=error), node, node_number or 0)
