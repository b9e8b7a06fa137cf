"""The page and a coordinator that lives: actions are journalled with who asked, and rows travel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import TOKEN, Served, served, stepped
from serving_web import ServedPage, page, run

from holdfast.coordinator.journal import JournalReader
from holdfast.errors import JobError
from holdfast.jobhome import JobFile, create
from holdfast.messages.events import (
    AnyEvent,
    FaultAsked,
    JobStopAsked,
    NodeExcludeAsked,
    ScaleAsked,
)
from holdfast.messages.wire import AskEvents, EventsTold, Sent
from holdfast.view.follower import Follower
from holdfast.view.remote import RemoteJournal
from holdfast.view.web.watched import WatchedJob
from holdfast.wire.visitors import Coordinates, ask_at

LIMIT_S = 60.0


@asynccontextmanager
async def living(may_act: bool = True) -> AsyncIterator[tuple[Served, ServedPage, Any]]:
    """A coordinator with a node in its first round, and a page that shows the job."""
    home = create("j", "train.py")
    async with served(home.journal) as here:
        home.write_job_file(JobFile(job="j", host="127.0.0.1", port=here.port, token=TOKEN, pid=1))
        peer = await here.join()
        peer.keep_beating()
        peer.send(Sent(number=2, event=stepped(3)))
        async with page(may_act=may_act) as web:
            yield here, web, peer
        peer.close()


async def act(web: ServedPage, action: str, **given: Any) -> Any:
    sent = {"x-holdfast": "1", "origin": web.base}
    body = {"confirm": "j", **given}
    return await web.client.post(f"/api/jobs/j/actions/{action}", headers=sent, json=body)


def journalled(path: Path, kind: type[AnyEvent]) -> list[Any]:
    with JournalReader(path) as reader:
        return [e.event for e in reader.entries(0) if isinstance(e.event, kind)]


async def until_journalled(path: Path, kind: type[AnyEvent]) -> Any:
    while not (found := journalled(path, kind)):
        await asyncio.sleep(0.02)
    return found[0]


@pytest.mark.parametrize(
    ("action", "given", "kind"),
    [
        ("stop", {"reason": "enough"}, JobStopAsked),
        ("scale", {"min_nodes": 1, "max_nodes": 2}, ScaleAsked),
        ("exclude", {"node": "good", "reason": "it smells"}, NodeExcludeAsked),
        ("fault", {"fault": "kill", "rank": 0}, FaultAsked),
    ],
)
def test_an_action_reaches_the_core_with_the_name_of_who_asked(
    action: str, given: dict[str, Any], kind: type[AnyEvent]
) -> None:
    async def test() -> None:
        async with living() as (here, web, _):
            answer = await act(web, action, **given)
            assert answer.status_code == 200, answer.text
            assert answer.json()["line"]
            event = await until_journalled(here.coordinator.journal.path, kind)
            assert "(page, 127.0.0.1)" in event.by

    run(test)


def test_an_excluded_node_is_sent_away_and_its_host_not_let_in_again() -> None:
    async def test() -> None:
        async with living() as (here, web, _):
            await act(web, "exclude", node="good", reason="it smells")
            await until_journalled(here.coordinator.journal.path, NodeExcludeAsked)
            assert "it smells" in here.job.membership.excluded["h"]
            told = await act(web, "exclude", node="nobody")
            assert told.status_code == 404
            assert "no node nobody" in told.json()["error"]

    run(test)


def test_save_now_says_if_there_is_nothing_to_save() -> None:
    async def test() -> None:
        async with living() as (_, web, __):
            answer = await act(web, "save")
            assert answer.status_code == 404
            assert "newer than what storage has" in answer.json()["error"]

    run(test)


def test_an_action_has_to_name_the_job_and_to_make_sense() -> None:
    async def test() -> None:
        async with living() as (here, web, _):
            for action, given in (
                ("stop", {"confirm": "other"}),
                ("scale", {"min_nodes": "many"}),
                ("fault", {"fault": "nonsense"}),
                ("fault", {}),
                ("exclude", {}),
            ):
                answer = await act(web, action, **given)
                assert answer.status_code == 400, (action, answer.text)
                assert answer.json()["error"]
            assert (await act(web, "dance")).status_code == 404
            assert not journalled(here.coordinator.journal.path, JobStopAsked)

    run(test)


# ---- a job on another machine ----


def coordinates(here: Served, token: str = TOKEN) -> Coordinates:
    return Coordinates("j", "127.0.0.1", here.port, token)


def test_a_job_is_followed_from_another_machine(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path / "journal.db") as here:
            peer = await here.join()
            source = await asyncio.to_thread(RemoteJournal, coordinates(here))
            follower = Follower(source)
            try:
                follower.catch_up()
                assert follower.job.membership.round == 1
                for step in range(1, 4):
                    peer.send(Sent(number=1 + step, event=stepped(step)))
                    while follower.job.highest < step:
                        await asyncio.wait_for(follower.follow(), LIMIT_S)
                        follower.catch_up()
                assert follower.alive
            finally:
                follower.close()

    run(test)


def test_a_remote_coordinator_that_goes_is_noticed_with_a_sentence(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.join()
            source = await asyncio.to_thread(RemoteJournal, coordinates(here))
        follower = Follower(source)
        follower.catch_up()
        while follower.alive:
            await asyncio.wait_for(follower.follow(), LIMIT_S)
            follower.catch_up()
        assert source.trouble is not None
        assert "no answer" in source.trouble
        follower.close()

    run(test)


def test_that_a_coordinator_went_is_news_though_nobody_waited_for_it_then(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.join()
            source = await asyncio.to_thread(RemoteJournal, coordinates(here))
            follower = Follower(source)
            follower.catch_up()
        while source.alive():
            await asyncio.sleep(0.01)
        await asyncio.wait_for(follower.follow(), LIMIT_S)
        follower.close()

    run(test)


def test_a_wrong_token_is_told_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.join()
            with pytest.raises(JobError):
                await asyncio.to_thread(RemoteJournal, coordinates(here, "wrong"))

    run(test)


def test_the_page_shows_a_job_of_another_machine(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path / "journal.db") as here:
            await here.join()
            where = coordinates(here)
            source = await asyncio.to_thread(RemoteJournal, where)
            async with page(remote=lambda: WatchedJob(source, None, lambda: where)) as web:
                name = source.name
                (job,) = await web.get("/api/jobs")
                assert job["job"] == name
                now = await web.get(f"/api/jobs/{name}/now")
                assert now["status"]["round"] == 1
                assert now["alive"]

    run(test)


def test_rows_come_in_bounded_pieces_and_a_question_waits_for_news(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path / "journal.db") as here:
            peer = await here.join()
            where = coordinates(here)
            first = await asyncio.to_thread(ask_at, where, AskEvents(after=0), EventsTold)
            assert [row.number for row in first.rows] == list(range(1, first.last + 1))
            question = AskEvents(after=first.last, job_id=first.job_id)
            waiting = asyncio.create_task(asyncio.to_thread(ask_at, where, question, EventsTold))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            peer.send(Sent(number=2, event=stepped(1)))
            told = await asyncio.wait_for(waiting, LIMIT_S)
            assert [row.number for row in told.rows] == [first.last + 1]
            other = AskEvents(after=first.last, job_id="another")
            again = await asyncio.to_thread(ask_at, where, other, EventsTold)
            assert again.after == 0
            assert again.rows[0].number == 1

    run(test)
