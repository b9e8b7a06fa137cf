"""A page that knows only the newest part of a job says so, and never tells anything that is not so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

import pytest
from journals import home_with, keep_state, simulated, write
from serving_web import ServedPage, page, run

from holdfast.coordinator.journal import Journal, replay
from holdfast.jobhome import JobHome
from holdfast.messages.events import CoordinatorRestarted
from holdfast.view import follower as followers
from holdfast.view.web import watched


@pytest.fixture
def any_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page begins late with any journal; its reader has nothing to keep of a short one."""
    monkeypatch.setattr(watched, "KEPT_FROM", 1)


def damaged(home: JobHome, missing: int = 20_000) -> None:
    """Make so many events in the middle of a journal go missing; its newest snapshot stays."""
    with closing(sqlite3.connect(home.journal)) as journal, journal:
        journal.execute("UPDATE events SET number = -number - ? WHERE number > 500", (missing,))
        journal.execute("UPDATE events SET number = -number WHERE number < 0")
    entries = simulated()
    known = home_with(entries, "undamaged")
    snapshot = replay(known.journal)
    assert snapshot is not None
    snapshot.job.events = len(entries) + missing
    with closing(Journal(home.journal)) as journal_again:
        journal_again.write_snapshot(snapshot)


async def until_whole(web: ServedPage) -> list[tuple[str, Any]]:
    return await web.events(
        "/api/jobs/j/stream", lambda name, data: name == "now" and "past" not in data
    )


def test_a_past_that_cannot_be_read_is_told_and_the_job_is_shown_all_the_same() -> None:
    home = home_with(simulated())
    damaged(home)

    async def test() -> None:
        async with page() as web:
            heard = await web.events(
                "/api/jobs/j/stream",
                lambda name, data: name == "now" and "trouble" in data.get("past", {}),
            )
            now = heard[-1][1]
            assert "are missing" in now["past"]["trouble"]
            assert "trouble" not in now
            assert now["status"]["step"] > 0

    run(test)


@pytest.mark.usefixtures("any_is_much")
def test_a_journal_without_its_snapshots_is_read_from_its_first_event() -> None:
    home = home_with(simulated())
    with closing(sqlite3.connect(home.journal)) as journal, journal:
        journal.execute("DROP TABLE snapshots")

    async def test() -> None:
        async with page() as web:
            now = await web.get("/api/jobs/j/now")
            assert "past" not in now
            assert now["status"]["step"] > 0

    run(test)


@pytest.mark.usefixtures("any_is_much")
def test_every_answer_that_lacks_the_past_says_so() -> None:
    home = home_with(simulated()[:-20])
    keep_state(home)
    write(home, simulated()[-20:])
    paths = ("now", "timeline", "goodput", "checkpoints", "nodes", "speed", "loss", "incidents/1")

    async def test() -> None:
        async with page() as web:
            early = [await web.get(f"/api/jobs/j/{path}") for path in paths]
            since = early[0]["past"]["since"]
            assert since > early[0]["status"]["opened_at"]
            assert [one["past"]["since"] for one in early] == [since] * len(paths)
            await until_whole(web)
            for path in paths:
                assert "past" not in await web.get(f"/api/jobs/j/{path}")

    run(test)


@pytest.mark.usefixtures("any_is_much")
def test_coordinators_of_the_past_do_not_go_and_come_back() -> None:
    entries = simulated()
    assert any(isinstance(one.event, CoordinatorRestarted) for one in entries)
    keep_state(home_with(entries))

    async def test() -> None:
        async with page() as web:
            heard = await until_whole(web)
            assert any("past" in data for name, data in heard if name == "now")
            assert {"gone", "back"}.isdisjoint(name for name, _ in heard)

    run(test)


def cut_in_an_incident() -> tuple[int, int]:
    """Find an event after which an incident is open that ends later, and that incident's number."""
    home = home_with(simulated(), "cut")
    follower = followers.Follower.open(home)
    follower.close()
    entries = simulated()
    for one in follower.job.incidents:
        if one.closed_at is not None and one.closed_at > one.fault_at + 1.0:
            return sum(entry.at < one.closed_at for entry in entries), one.id
    raise AssertionError("no incident took a second")


@pytest.mark.usefixtures("any_is_much")
def test_the_end_of_an_incident_is_told_that_began_before_the_past_was_read() -> None:
    cut, number = cut_in_an_incident()
    home = home_with(simulated()[:cut])
    keep_state(home)
    added = False

    def ended(name: str, data: Any) -> bool:
        nonlocal added
        if not added and name == "now" and "past" not in data:
            added = True
            write(home, simulated()[cut:])
        return name == "incident" and bool(data["id"] == number) and not data["open"]

    async def test() -> None:
        async with page() as web:
            heard = await web.events("/api/jobs/j/stream", ended)
            assert heard[-1][0] == "incident"

    run(test)
