"""The journal: what was written leads to the same job again, and damage is said aloud."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.coordinator import journal as journals
from holdfast.coordinator.journal import Journal, replay, replay_spans
from holdfast.core import job as jobs
from holdfast.core.job import Job
from holdfast.core.ledger.books import Ledger
from holdfast.core.replay import Entry, JobSnapshot
from holdfast.errors import JournalCorrupt, JournalError
from holdfast.messages.events import (
    AnyEvent,
    JobOpened,
    NodeJoined,
    NodeReady,
    Progress,
    WorkerExited,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, RankProgress, Terms
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

NODE = NodeId("n")


def events(rounds: int = 5) -> Iterator[AnyEvent]:
    """A job that loses a rank again and again."""
    at = 1000.0
    yield JobOpened(at=Time(at), job="j", terms=Terms())
    spec = NodeSpec(host="h", address="a", slots=2, pid=1)
    yield NodeJoined(at=Time(at + 1), node=NODE, spec=spec, store_port=1)
    for number in range(1, rounds + 1):
        at, round = at + 10, RoundNumber(number)
        for rank in (Rank(0), Rank(1)):
            yield WorkerStarted(
                at=Time(at + 1 / 3), node=NODE, round=round, rank=rank, pid=9, warm=True
            )
        told = tuple(
            RankProgress(
                rank=rank,
                step=StepNumber(number * 7),
                steps=7,
                first_at=Time(at + 1),
                last_at=Time(at + 7.1),
            )
            for rank in (Rank(0), Rank(1))
        )
        yield Progress(at=Time(at + 8), node=NODE, round=round, ranks=told)
        yield WorkerExited(
            at=Time(at + 9), node=NODE, round=round, rank=Rank(1), signal=9, progress=told[1]
        )
        yield NodeReady(
            at=Time(at + 9.5), node=NODE, round=round, store_port=2, slowest_stop_s=None
        )


def entries(rounds: int = 5) -> list[Entry]:
    return [Entry(Time(e.at + 0.01), e, NODE, i) for i, e in enumerate(events(rounds))]


def live(some: list[Entry]) -> Job:
    opened = some[0].event
    assert isinstance(opened, JobOpened)
    job = jobs.opened(opened)
    for entry in some[1:]:
        jobs.handle(job, entry.event, entry.at)
    return job


def same(one: Job, other: Job) -> bool:
    return msgspec.json.encode(one) == msgspec.json.encode(other)


def replayed(path: Path) -> JobSnapshot:
    snapshot = replay(path)
    assert snapshot is not None
    return snapshot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    made = Journal(path)
    yield made
    made.close()


def damage(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


def test_a_replay_leads_to_the_very_job_that_was_live(journal: Journal, path: Path) -> None:
    written = entries()
    for entry in written:
        journal.append([entry])
        assert journal.trouble is None
    found = replayed(path)
    assert same(found.job, live(written))
    assert found.at == written[-1].at
    assert found.acked == {NODE: len(written) - 1}


def test_events_written_at_once_are_the_same_as_one_by_one(journal: Journal, path: Path) -> None:
    written = entries()
    journal.append(written)
    assert same(replayed(path).job, live(written))


def test_a_journal_opened_again_is_written_on(path: Path) -> None:
    written = entries()
    for part in (written[:6], written[6:]):
        journal = Journal(path)
        journal.append(part)
        journal.close()
    assert same(replayed(path).job, live(written))


def test_an_empty_journal_holds_no_job(journal: Journal, path: Path) -> None:
    assert replay(path) is None


def test_a_journal_whose_writer_was_killed_while_making_it_holds_no_job(path: Path) -> None:
    path.touch()
    assert replay(path) is None
    sqlite3.connect(path).execute("PRAGMA journal_mode=WAL")
    assert replay(path) is None


def test_a_snapshot_shortens_the_replay_and_leads_to_the_same_job(
    journal: Journal, path: Path
) -> None:
    written = entries()
    half = len(written) // 2
    journal.append(written[:half])
    journal.write_snapshot(
        JobSnapshot(live(written[:half]), written[half - 1].at, {NODE: half - 1})
    )
    journal.append(written[half:])
    assert same(replayed(path).job, live(written))
    # What the snapshot stands for is not read again.
    damage(path, "UPDATE events SET event = 'x' WHERE number = 2")
    found = replayed(path)
    assert same(found.job, live(written))
    assert found.acked == {NODE: len(written) - 1}


def test_a_snapshot_is_due_after_so_many_events(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SNAPSHOT_EVERY", 10)
    written = entries()
    journal.append(written[:9])
    assert not journal.snapshot_due()
    journal.append(written[9:10])
    assert journal.snapshot_due()
    journal.write_snapshot(JobSnapshot(live(written[:10]), written[9].at, {}))
    assert not journal.snapshot_due()


def test_only_the_newest_snapshot_is_kept(journal: Journal, path: Path) -> None:
    written = entries()
    for end in (5, 10, 15):
        journal.append(written[end - 5 : end])
        journal.write_snapshot(JobSnapshot(live(written[:end]), written[end - 1].at, {}))
    db = sqlite3.connect(path)
    assert db.execute("SELECT number FROM snapshots").fetchall() == [(15,)]
    db.close()


def test_a_damaged_snapshot_costs_time_and_nothing_else(journal: Journal, path: Path) -> None:
    written = entries()
    journal.append(written)
    journal.write_snapshot(JobSnapshot(live(written), written[-1].at, {}))
    damage(path, "UPDATE snapshots SET state = '{'")
    assert same(replayed(path).job, live(written))


def test_spans_come_from_the_first_event_on_even_with_a_snapshot(
    journal: Journal, path: Path
) -> None:
    written = entries()
    journal.append(written)
    journal.write_snapshot(JobSnapshot(live(written), written[-1].at, {}))
    snapshot, spans = replay_spans(path)
    assert snapshot is not None
    booked = sum(span.end - span.begin for span in spans)
    assert booked == pytest.approx(sum(snapshot.job.of(Ledger).seconds.values()))


# ---- damage ----


@pytest.mark.parametrize("text", ["{", "{}", '{"type":"NoSuchEvent"}', ""])
def test_a_damaged_event_is_named_and_all_others_count(
    journal: Journal, path: Path, text: str
) -> None:
    journal.append(entries())
    damage(path, f"UPDATE events SET event = '{text}' WHERE number = 5")
    snapshot, lost = journals.reopen(path)
    assert snapshot is not None
    assert lost == 1
    assert (snapshot.job.events, snapshot.job.highest) == (len(entries()), 35)
    assert [found for found in internal(snapshot.job) if "event 5 is damaged" in found]
    assert snapshot.acked == {NODE: len(entries()) - 1}


def test_missing_events_are_named_and_all_others_count(journal: Journal, path: Path) -> None:
    journal.append(entries())
    damage(path, "DELETE FROM events WHERE number IN (9, 10)")
    snapshot, lost = journals.reopen(path)
    assert snapshot is not None
    assert lost == 2
    assert (snapshot.job.events, snapshot.job.highest) == (len(entries()), 35)
    assert internal(snapshot.job) == [
        "the journal lost an event: event 9 is missing",
        "the journal lost an event: event 10 is missing",
    ]


def test_a_snapshot_that_cannot_be_read_costs_only_time(journal: Journal, path: Path) -> None:
    written = entries()
    journal.append(written)
    journal.write_snapshot(JobSnapshot(live(written), written[-1].at, {}))
    damage(path, "UPDATE snapshots SET state = '{'")
    snapshot, lost = journals.reopen(path)
    assert snapshot is not None
    assert lost == 0
    assert msgspec.json.encode(snapshot.job) == msgspec.json.encode(live(written))


def test_a_journal_with_a_gap_that_no_job_can_have_is_refused(journal: Journal, path: Path) -> None:
    journal.append(entries())
    damage(path, f"UPDATE events SET number = number + {journals.MISSING_AT_MOST} WHERE number > 7")
    damage(path, "DELETE FROM events WHERE number = 7")
    with pytest.raises(JournalCorrupt, match="events 7 to 10007 are missing"):
        replay(path)


def internal(job: Job) -> list[str]:
    return [incident.signature for incident in job.incidents if incident.kind == "internal"]


def test_a_journal_that_does_not_begin_with_a_job_is_refused(journal: Journal, path: Path) -> None:
    journal.append(entries()[1:])
    with pytest.raises(JournalCorrupt, match="does not begin"):
        replay(path)


def test_a_file_that_is_no_journal_is_refused_by_name(path: Path) -> None:
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(JournalError, match=r"journal\.db"):
        replay(path)
    with pytest.raises(JournalError, match=r"journal\.db"):
        Journal(path)


def test_a_journal_of_another_version_is_refused(journal: Journal, path: Path) -> None:
    damage(path, "PRAGMA user_version=99")
    with pytest.raises(JournalError, match="version"):
        replay(path)


def test_a_journal_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        replay(tmp_path / "none.db")
    with pytest.raises(JournalError):
        Journal(tmp_path / "no" / "such" / "place.db")


@pytest.mark.parametrize("odd", ["a b", "a#b", "a?mode=rw", "100%", "ünï"])
def test_a_home_may_have_any_name(tmp_path: Path, odd: str) -> None:
    home = tmp_path / odd
    home.mkdir()
    journal = Journal(home / "journal.db")
    journal.append(entries())
    assert replay(home / "journal.db") is not None
    journal.close()


# ---- a full disk ----


def limit_pages(journal: Journal, more: int) -> None:
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages + more}")


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(
    journal: Journal, path: Path
) -> None:
    written = entries(60)
    journal.append(written[:5])
    assert journal.trouble is None
    limit_pages(journal, 1)
    for entry in written[5:]:
        journal.append([entry])
    assert "full" in str(journal.trouble)
    assert not journal.snapshot_due()
    assert len(replayed(path).job.incidents) < 60
    limit_pages(journal, 10000)
    journal.append([])
    assert journal.trouble is None
    assert same(replayed(path).job, live(written))


def test_a_snapshot_that_does_not_fit_is_left_out(journal: Journal, path: Path) -> None:
    written = entries(60)
    journal.append(written)
    limit_pages(journal, 0)
    journal.write_snapshot(JobSnapshot(live(written), written[-1].at, {}))
    assert same(replayed(path).job, live(written))


def test_a_journal_that_somebody_locks_keeps_its_events_for_later(
    journal: Journal, path: Path
) -> None:
    written = entries()
    journal.append(written[:3])
    journal._db.execute("PRAGMA busy_timeout=1")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.append(written[3:8])
    assert "locked" in str(journal.trouble)
    other.execute("ROLLBACK")
    other.close()
    journal.append(written[8:])
    assert journal.trouble is None
    assert same(replayed(path).job, live(written))


# ---- others ----


def test_a_reader_sees_whole_batches_while_a_writer_writes(journal: Journal, path: Path) -> None:
    written = entries(150)
    journal.append(written[:1])
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            found = replayed(path)
            seen.append(found.acked.get(NODE, 0))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(1, len(written), 5):
            journal.append(written[i : i + 5])
            assert journal.trouble is None
    finally:
        stop.set()
        reader.join()
    assert seen == sorted(seen)
    assert all(number % 5 == 0 or number == len(written) - 1 for number in seen)


def test_what_a_killed_writer_had_appended_is_all_there(path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_journal import Journal, entries
journal = Journal(Path({str(path)!r}))
for entry in entries():
    journal.append([entry])
    assert journal.trouble is None
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], timeout=200, check=False)
    assert same(replayed(path).job, live(entries()))


def test_a_journal_torn_at_its_end_is_whole_up_to_some_event_and_can_be_written_on(
    journal: Journal, path: Path, tmp_path: Path
) -> None:
    written = entries()
    for entry in written:
        journal.append([entry])
        assert journal.trouble is None
    log = path.with_name(path.name + "-wal").read_bytes()
    lengths = set()
    for cut in range(0, len(log) + 1, max(1, len(log) // 40)):
        torn = tmp_path / f"torn-{cut}.db"
        torn.write_bytes(path.read_bytes())
        torn.with_name(torn.name + "-wal").write_bytes(log[:cut])
        after = Journal(torn)
        assert after.append([]) is None
        kept = after.numbered
        lengths.add(kept)
        if kept:
            assert same(replayed(torn).job, live(written[:kept]))
            if kept < len(written):
                assert after.append([written[kept]]) is None
                assert same(replayed(torn).job, live(written[: kept + 1]))
        after.close()
    assert len(lengths) > 5, "the cuts did not fall between events"
