"""A follower knows what the journal says, however and whenever that was written."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from journals import home_with, simulated, write

from holdfast.coordinator.journal import Journal, replay
from holdfast.core import report
from holdfast.core.replay import Entry
from holdfast.errors import JobError
from holdfast.jobhome import JobHome, create
from holdfast.messages.events import EventSetAside, Tick
from holdfast.messages.units import Time
from holdfast.view.follower import BATCH, Follower

LIMIT_S = 60.0


def compare(follower: Follower, home: JobHome) -> None:
    """Compare all reports with those of a replay."""
    snapshot = replay(home.journal)
    assert snapshot is not None
    at, job = snapshot.at, snapshot.job
    assert report.status(follower.job, at, False) == report.status(job, at, False)
    assert report.goodput(follower.job, at) == report.goodput(job, at)
    assert follower.incidents() == report.incidents(job)
    assert follower.data() == report.data(job)


def test_it_says_what_a_replay_says() -> None:
    home = home_with(simulated())
    follower = Follower.open(home)
    assert follower.name == "j"
    assert follower.incidents()
    compare(follower, home)
    assert not follower.catch_up()
    follower.close()


def test_it_takes_in_what_is_written_in_pieces() -> None:
    entries = simulated()
    home = home_with(entries[:50])
    follower = Follower.open(home)
    for first in range(50, len(entries), 97):
        write(home, entries[first : first + 97])
        assert follower.catch_up()
    compare(follower, home)
    follower.close()


@pytest.mark.parametrize("lost", [300, BATCH + 1, 2 * BATCH + 1])
def test_an_event_that_is_missing_is_told_as_a_replay_tells_it(lost: int) -> None:
    """Also where the events that are read at once begin with it."""
    home = home_with(simulated())
    with closing(sqlite3.connect(home.journal)) as journal, journal:
        journal.execute("DELETE FROM events WHERE number = ?", (lost,))
    follower = Follower.open(home)
    assert f"event {lost} is missing" in " ".join(one.line for one in follower.incidents())
    assert min(one.at for one in follower.incidents()) >= follower.job.opened_at
    compare(follower, home)
    follower.close()


def test_damage_longer_than_what_is_read_at_once_is_not_taken_for_the_end() -> None:
    home = home_with(simulated())
    with closing(sqlite3.connect(home.journal)) as journal:
        ((size_bytes,),) = journal.execute("PRAGMA page_size")
    pages = home.journal.stat().st_size // size_bytes
    with home.journal.open("r+b") as file:
        file.seek(pages // 4 * size_bytes)
        file.write(b"\xff" * (pages // 2 * size_bytes))
    follower = Follower.open(home)
    assert follower.taken == len(simulated())
    assert follower.unread == 0
    compare(follower, home)
    follower.close()


def test_a_limit_stops_it_and_it_goes_on() -> None:
    home = home_with(simulated())
    follower = Follower.open(home)
    piecewise = Follower(follower.source)
    rounds = 0
    while piecewise.behind:
        piecewise.catch_up(limit_s=0.0)
        rounds += 1
    assert rounds > 2
    assert piecewise.progress == 1.0
    compare(piecewise, home)
    follower.close()


def test_it_notices_what_another_writes() -> None:
    entries = simulated()
    home = home_with(entries[:50])
    follower = Follower.open(home)

    async def follow() -> None:
        following = asyncio.create_task(follower.follow())
        await asyncio.sleep(0.25)
        assert not following.done(), "nothing was written"
        write(home, entries[50:60])
        await asyncio.wait_for(following, LIMIT_S)
        assert follower.catch_up()

    asyncio.run(follow())
    compare(follower, home)
    follower.close()


def test_it_notices_that_the_job_is_run_no_more(tmp_path: Path) -> None:
    home = home_with(simulated()[:50])
    follower = Follower.open(home)
    assert follower.alive, "the test holds its lock"

    async def follow() -> None:
        following = asyncio.create_task(follower.follow())
        (home.path / "lock").unlink()
        await asyncio.wait_for(following, LIMIT_S)

    asyncio.run(follow())
    assert not follower.alive
    assert follower.status().state == "lost"
    follower.close()


def test_a_journal_that_is_replaced_is_followed_from_its_begin() -> None:
    entries, others = simulated(), simulated(seed=2)
    home = home_with(entries)
    follower = Follower.open(home)
    home.path.rename(home.path.with_name("old"))
    other = create("j", "train.py")
    restarts = follower.restarts
    assert not follower.catch_up(), "what was read stays true until there is another journal"
    write(other, others)
    assert follower.catch_up()
    assert follower.restarts > restarts
    compare(follower, other)
    follower.close()


def test_events_that_were_set_aside_later_are_taken_back() -> None:
    entries = simulated()
    home = home_with(entries[:100])
    follower = Follower.open(home)
    last = entries[100]
    number = 101
    aside = EventSetAside(
        at=last.at, number=number, last=number, what="x", error="e", traceback="", dropped=False
    )
    write(home, (last,))
    follower.catch_up()
    restarts = follower.restarts
    write(home, (Entry(last.at, aside), last))
    follower.catch_up()
    assert follower.restarts == restarts + 1
    compare(follower, home)
    follower.close()


def test_a_job_without_events_says_so() -> None:
    home = create("j", "train.py")
    with pytest.raises(JobError, match="no events yet"):
        Follower.open(home)
    Journal(home.journal).close()
    with pytest.raises(JobError, match="no events yet"):
        Follower.open(home)


def test_a_missing_row_is_counted_as_lost_and_the_rest_is_followed() -> None:
    entries = simulated()
    home = home_with(entries)
    journal = Journal(home.journal)
    journal._db.execute("DELETE FROM events WHERE number = 60")
    journal._db.execute("UPDATE events SET event = '{' WHERE number = 70")
    journal.close()
    follower = Follower.open(home)
    compare(follower, home)
    write(home, (Entry(entries[-1].at, Tick(at=Time(entries[-1].at))),))
    assert follower.catch_up()
    follower.close()


def test_a_follower_writes_nothing() -> None:
    home = home_with(simulated())
    copy = home.path.with_name("copy")
    shutil.copytree(home.path, copy)
    follower = Follower.open(home)
    follower.catch_up()
    follower.close()
    for path in copy.iterdir():
        if path.is_file():
            assert path.read_bytes() == (home.path / path.name).read_bytes(), path.name
