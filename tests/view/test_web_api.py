"""The API of `holdfast web` says what the command line says, of the whole job and of pieces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from journals import home_with, simulated, unfinished, write
from serving_web import ServedPage, page, run

from holdfast.config.values import Price
from holdfast.coordinator.journal import replay
from holdfast.core import report
from holdfast.jobhome import JobHome
from holdfast.view.web import answers, elsewhere
from holdfast.view.web.elsewhere import SeenElsewhere


@pytest.fixture
def home() -> JobHome:
    """A job that has ended without a word: nothing holds its lock."""
    home = home_with(unfinished())
    (home.path / "lock").unlink()
    return home


def test_now_is_the_status_and_a_map_with_a_letter_for_each_rank(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            now = await web.get("/api/jobs/j/now")
            snapshot = replay(home.journal)
            assert snapshot is not None
            status = report.status(snapshot.job, snapshot.at, alive=False)
            assert now["status"]["step"] == status.step
            assert now["status"]["state"] == status.state
            assert "nodes" not in now["status"]
            assert len(now["map"]["ranks"]) == len(snapshot.job.ranks)
            assert [row[0] for row in now["map"]["nodes"]] == [one.node for one in status.nodes]
            assert now["goodput"]["goodput"] == report.goodput(snapshot.job, snapshot.at).goodput
            assert "loading" not in now

    run(test)


def test_the_list_has_all_jobs_the_newest_first_and_damaged_ones_with_a_sentence(
    home: JobHome,
) -> None:
    home_with(simulated(seed=2), name="other")
    damaged = home_with(simulated(seed=2)[:20], name="damaged")
    damaged.journal.write_bytes(b"no journal at all" * 1000)

    async def test() -> None:
        async with page() as web:
            jobs = {one["job"]: one for one in await web.get("/api/jobs")}
            assert jobs.keys() == {"j", "other", "damaged"}
            assert jobs["j"]["goodput"] > 0
            assert jobs["j"]["incidents"] > 0
            assert jobs["damaged"]["state"] == "unreadable"
            assert "not a database" in jobs["damaged"]["reason"]
            answer = await web.client.get("/api/jobs/damaged/now")
            assert answer.status_code in (404, 503)
            assert "not a database" in answer.json()["error"]
            assert (await web.get("/api/jobs/j/now"))["status"]["job"]

    run(test)


def test_a_page_knows_the_price_that_was_given(home: JobHome) -> None:
    async def test() -> None:
        async with page(price=Price(2.1, "EUR")) as web:
            assert (await web.get("/api/session"))["price"] == {"amount": 2.1, "unit": "EUR"}
        async with page() as web:
            assert (await web.get("/api/session"))["price"] is None

    run(test)


def test_the_timeline_is_reduced_to_the_width_and_exact_when_zoomed(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            whole = await web.get("/api/jobs/j/timeline", width=20)
            assert whole["lanes"]
            assert all(len(lane["spans"]) <= 21 for lane in whole["lanes"])
            mixed = [s for lane in whole["lanes"] for s in lane["spans"] if isinstance(s[2], dict)]
            assert mixed, "at this width spans have to be merged"
            assert all(sum(span[2].values()) == pytest.approx(1.0, abs=0.01) for span in mixed)
            assert whole["incidents"]
            first = whole["incidents"][0][1]
            near = await web.get(
                "/api/jobs/j/timeline",
                **{"from": first - 0.5, "to": first + 0.5, "width": 1000, "count": 2},
            )
            assert len(near["lanes"]) == 2
            for lane in near["lanes"]:
                assert all(isinstance(span[2], str) for span in lane["spans"])
            by_node = await web.get("/api/jobs/j/timeline", fold="node", width=50)
            assert sum(lane["ranks"] for lane in by_node["lanes"]) == whole["ranks"]

    run(test)


def test_goodput_over_time_adds_up_and_torchrun_is_never_better(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            told = await web.get("/api/jobs/j/goodput", buckets=30)
            assert len(told["buckets"]) == 30
            productive = sum(bucket[2].get("productive", 0.0) for bucket in told["buckets"])
            assert productive == pytest.approx(told["total"]["productive"], rel=1e-3)
            assert told["torchrun"]["goodput"] <= told["goodput"]
            assert "bench/recovery.py" in told["torchrun"]["assumption"]

    run(test)


def test_incidents_come_in_pages_and_one_has_its_story(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            newest = await web.get("/api/jobs/j/incidents", limit=2)
            ids = [one["id"] for one in newest["incidents"]]
            assert ids == [newest["total"], newest["total"] - 1]
            older = await web.get("/api/jobs/j/incidents", limit=2, before=ids[-1])
            assert [one["id"] for one in older["incidents"]] == [ids[-1] - 1, ids[-1] - 2]
            one = await web.get("/api/jobs/j/incidents/1")
            assert one["incident"]["id"] == 1
            assert one["story"][0]["kind"] == "event"
            missing = await web.client.get("/api/jobs/j/incidents/100000")
            assert missing.status_code == 404

    run(test)


def test_an_incident_names_earlier_ones_like_it_in_other_jobs(home: JobHome) -> None:
    home_with(unfinished(), "other")
    home_with(unfinished()[:1], "empty")
    damaged = home_with(unfinished()[:1], "damaged")
    damaged.journal.write_bytes(b"no journal")
    snapshot = replay(home.journal)
    assert snapshot is not None
    known = snapshot.job.incidents

    async def told(web: ServedPage, number: int) -> list[dict[str, Any]]:
        while True:
            one = await web.get(f"/api/jobs/j/incidents/{number}")
            if one["seen_elsewhere"] is not None:
                found: list[dict[str, Any]] = one["seen_elsewhere"]
                return found

    async def test() -> None:
        async with page() as web:
            for one in known:
                like = [
                    {"job": "other", "id": other.id, "at": other.fault_at}
                    for other in known
                    if answers.alike(other) == answers.alike(one) and other.fault_at < one.fault_at
                ]
                like.sort(key=lambda seen: -seen["at"])
                assert await told(web, one.id) == like[:10]

    assert len({answers.alike(one) for one in known}) < len(known)
    run(test)


def test_the_journals_of_other_jobs_are_read_once_and_bounded(
    home: JobHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        home_with(unfinished()[:50], f"other-{number}")
    monkeypatch.setattr(elsewhere, "MOST_JOBS", 4)
    monkeypatch.setattr(elsewhere, "AGAIN_S", 0.0)
    read: list[str] = []
    incidents = SeenElsewhere._incidents

    def counted(seen: SeenElsewhere, other: JobHome) -> Any:
        read.append(other.name)
        return incidents(seen, other)

    monkeypatch.setattr(SeenElsewhere, "_incidents", counted)

    async def test() -> None:
        seen = SeenElsewhere()
        snapshot = replay(home.journal)
        assert snapshot is not None
        for _ in range(3):
            seen.before("j", snapshot.job.incidents[0])
            assert seen._reading is not None
            await seen._reading
        assert len(read) == len(set(read)) == 4

    run(test)


def test_the_log_of_an_incidents_rank_is_shown_with_it(home: JobHome) -> None:
    snapshot = replay(home.journal)
    assert snapshot is not None
    incident = next(one for one in snapshot.job.incidents if one.rank is not None)
    log = home.logs / f"round_{incident.round}" / f"rank_{incident.rank}.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\nlast words\n")

    async def test() -> None:
        async with page() as web:
            told = await web.get(f"/api/jobs/j/incidents/{incident.id}")
            assert told["log"] == {str(incident.rank): ["first", "last words"]}
            asked = {"rank": incident.rank, "round": incident.round}
            tail = await web.get("/api/jobs/j/logs", **asked)
            assert tail["text"] == "first\nlast words\n"
            with log.open("a") as file:
                file.write("more\n")
            more = await web.get("/api/jobs/j/logs", after=tail["offset"], **asked)
            assert more["text"] == "more\n"

    run(test)


def test_checkpoints_say_what_would_be_restored(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            told = await web.get("/api/jobs/j/checkpoints")
            assert told["checkpointers"]
            assert any("storage" in one["tiers"] for one in told["steps"])
            restore = told["would_restore"]
            newest = [c["in_memory"] or c["on_storage"] for c in told["checkpointers"]]
            assert restore["step"] in newest
            assert restore["from"] in ("memory", "storage")
            nodes = await web.get("/api/jobs/j/nodes")
            assert {"node", "host", "state", "health", "score", "usage"} <= nodes["nodes"][0].keys()
            assert (await web.get("/api/jobs/j/speed"))["points"]

    run(test)


def test_an_answer_that_is_known_already_costs_nothing(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            first = await web.client.get("/api/jobs/j/goodput")
            tag = first.headers["etag"]
            again = await web.client.get("/api/jobs/j/goodput", headers={"if-none-match": tag})
            assert again.status_code == 304
            assert again.content == b""
            assert first.headers["content-encoding"] == "gzip"

    run(test)


def test_wrong_parameters_and_unknown_jobs_are_answered_with_a_sentence(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            for path, status in (
                ("/api/jobs/j/timeline?width=x", 400),
                ("/api/jobs/j/timeline?from=nan", 400),
                ("/api/jobs/j/timeline?fold=y", 400),
                ("/api/jobs/j/goodput?buckets=0", 400),
                ("/api/jobs/nobody/now", 404),
                ("/api/jobs/..%2Fj/now", 404),
                ("/static/..%2F..%2Fguard.py", 404),
                ("/static/../../guard.py", 404),
            ):
                answer = await web.client.get(path)
                assert answer.status_code == status, path
                if answer.headers["content-type"] == "application/json":
                    assert answer.json()["error"]

    run(test)


def test_a_dead_job_cannot_be_asked_why(home: JobHome) -> None:
    async def test() -> None:
        async with page() as web:
            answer = await web.client.get("/api/jobs/j/why")
            assert answer.status_code == 503
            assert "does not run" in answer.json()["error"]

    run(test)


# ---- the stream ----


def test_the_stream_tells_what_is_written_and_incidents_at_once(tmp_path: Path) -> None:
    entries = simulated()
    home = home_with(entries[:60])

    async def test() -> None:
        async with page() as web:
            before = len((await web.get("/api/jobs/j/incidents"))["incidents"])

            async def go_on() -> None:
                for first in range(60, len(entries), 100):
                    write(home, entries[first : first + 100])
                    await asyncio.sleep(0.01)

            writing = asyncio.create_task(go_on())
            heard = await web.events("/api/jobs/j/stream", lambda name, data: name == "incident")
            await writing
            assert heard[0][0] == "now"
            assert heard[0][1]["map"]["nodes"]
            assert heard[-1][1]["id"] == before + 1
            assert heard[-1][1]["line"]

    run(test)


def test_a_later_now_leaves_out_what_did_not_change_of_the_map(tmp_path: Path) -> None:
    entries = unfinished()
    home = home_with(entries[:-1])

    async def test() -> None:
        async with page() as web:
            seen: list[str] = []

            def second(name: str, data: object) -> bool:
                seen.append(name)
                if len(seen) == 1:
                    write(home, entries[-1:])
                return seen.count("now") == 2

            heard = await web.events("/api/jobs/j/stream", second)
            assert "nodes" in heard[0][1]["map"]
            assert "nodes" not in heard[-1][1]["map"]

    run(test)


def test_the_stream_tells_when_the_job_is_run_no_more_and_when_it_is_again(tmp_path: Path) -> None:
    home = home_with(simulated()[:60])

    async def test() -> None:
        async with page() as web:
            lock = home.path / "lock"
            away, hidden = home.path / "lock.away", list[Path]()

            def gone_then_back(name: str, data: object) -> bool:
                if name == "gone":
                    away.rename(lock)
                elif lock.exists() and not hidden:
                    hidden.append(lock.rename(away))
                return name == "back"

            heard = await web.events("/api/jobs/j/stream", gone_then_back)
            assert [name for name, _ in heard if name in ("gone", "back")] == ["gone", "back"]

    run(test)


def test_metrics_are_those_of_the_jobs_that_run(home: JobHome) -> None:
    home_with(unfinished(), name="runs")

    async def test() -> None:
        async with page() as web:
            for _ in range(600):  # A job whose journal is still being read is left out.
                answer = await web.client.get("/metrics")
                if "holdfast_step" in answer.text:
                    break
                await asyncio.sleep(0.1)
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'holdfast_step{job="runs"}' in answer.text
            assert 'holdfast_step{job="j"}' not in answer.text, "no process runs it"
            newer = {"accept": "application/openmetrics-text;version=1.0.0"}
            assert (await web.client.get("/metrics", headers=newer)).text.endswith("# EOF\n")

    run(test)
