"""Notices: which incidents are told and when, and how they reach targets that fail."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from reported import an_incident, of_two_ranks

from holdfast.messages.reports import GoodputReport, IncidentReport
from holdfast.messages.units import Seconds, Time
from holdfast.view.notices import delivery as deliveries
from holdfast.view.notices import targets
from holdfast.view.notices.delivery import QUEUE, NoticeRoute
from holdfast.view.notices.news import BURST, OPEN_S, PACE_S, IncidentNews, NoticesTold
from holdfast.view.notices.notice import LINES_SHOWN, Notice, of_incidents, of_the_end
from holdfast.view.notices.targets import Outcome, Target, target_of

PATIENCE_S = 60.0
SECRET = "T000-very-secret"


def incident(id: int, at: float = 1000.0, lost_s: float | None = 1.0) -> IncidentReport:
    return an_incident(id=id, at=Time(at), lost_s=lost_s, line=f"incident number {id}")


def goodput() -> GoodputReport:
    return GoodputReport(
        job="j", wall_s=100.0, ranks=2, seconds={"productive": 150.0}, goodput=0.75
    )


# ---- what is told, and when ----


def tell(news: IncidentNews, incidents: list[IncidentReport], at: float) -> list[int]:
    due = news.due(incidents, Time(at))
    news.tell(due, incidents)
    return [one.id for one in due]


def test_the_first_incidents_are_told_at_once_and_a_storm_in_digests() -> None:
    news, incidents, told = IncidentNews(NoticesTold()), [], []
    for number in range(1, 101):
        incidents.append(incident(number, at=1000.0 + number))
        told.append(tell(news, incidents, 1000.0 + number))
    sent = [ids for ids in told if ids]
    assert sent[:BURST] == [[1], [2], [3]]
    assert len(sent) <= BURST + 100 / PACE_S + 1
    assert sorted(id for ids in sent for id in ids) == list(range(1, sent[-1][-1] + 1))


def test_an_incident_is_told_when_it_is_over_or_lasts() -> None:
    news = IncidentNews(NoticesTold())
    open = [incident(1, at=1000.0, lost_s=None)]
    assert tell(news, open, 1001.0) == []
    assert news.next_at(open, Time(1001.0)) == 1000.0 + OPEN_S
    assert tell(news, open, 1000.0 + OPEN_S) == [1]
    assert tell(news, open, 1500.0) == []
    assert tell(news, [incident(1)], 1600.0) == [1]
    assert tell(news, [incident(1)], 1700.0) == []


def test_an_open_incident_does_not_keep_a_later_one_from_being_told() -> None:
    news = IncidentNews(NoticesTold())
    incidents = [incident(1, lost_s=None), incident(2)]
    assert tell(news, incidents, 1001.0) == [2]
    assert tell(news, [incident(1), incident(2)], 1002.0) == [1]


def test_what_was_told_before_the_sender_died_is_not_told_again() -> None:
    before = IncidentNews(NoticesTold())
    incidents = [incident(1), incident(2, lost_s=None)]
    tell(before, incidents, 1000.0 + OPEN_S)
    after = IncidentNews(before.told)
    assert tell(after, incidents, 2000.0) == []
    assert tell(after, [incident(1), incident(2), incident(3)], 2000.0) == [2, 3]


# ---- what a notice says ----


def test_one_incident_is_told_in_its_line_and_several_in_a_list() -> None:
    status = of_two_ranks()
    one = of_incidents(status, goodput(), [incident(1)], 1, "host", Time(1.0))
    assert (one.kind, one.text) == ("incident", "job j: incident number 1")
    many = of_incidents(
        status, goodput(), [incident(n) for n in range(1, 31)], 30, "host", Time(1.0)
    )
    assert many.kind == "incidents"
    lines = many.text.splitlines()
    assert lines[0] == "job j: 30 incidents"
    assert lines[1] == f"... {30 - LINES_SHOWN} more before these"
    assert lines[-1] == "30. incident number 30"
    assert many.incidents_new == 30


@pytest.mark.parametrize(
    ("code", "kind", "begins"),
    [
        (0, "finished", "job j finished: "),
        (93, "failed", "job j gave up (exit code 93, do not requeue: it would fail again): why: "),
        (None, "lost", "job j is lost (nobody runs it, and it has not ended): "),
    ],
)
def test_the_end_is_told_with_what_came_of_the_job(
    code: int | None, kind: str, begins: str
) -> None:
    status = replace(of_two_ranks(), exit_code=code, reason="why", step=1234, wall_s=100.0)
    told = of_the_end(status, goodput(), [incident(2)], 2, "host", Time(1.0))
    assert told.kind == kind
    assert told.text.startswith(begins)
    assert told.text.endswith(
        "1,234 steps in 1 min 40 s, goodput 75.0%, 2 incidents\n2. incident number 2"
    )


def test_control_characters_of_a_script_do_not_reach_a_notice() -> None:
    bad = replace(incident(1), line="rank 0 raised \x1b[31mError\x1b[0m\n\x07: x")
    text = of_incidents(of_two_ranks(), goodput(), [bad], 1, "host", Time(1.0)).text
    assert text == "job j: rank 0 raised Error : x"


# ---- webhooks ----


class Webhooks:
    """A server that behaves as a test wants, and remembers what it was sent."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []
        """Status codes to answer with, the last one from then on."""
        self.hangs = threading.Event()
        """Set while requests are not answered."""
        self.retry_after = ""
        webhooks = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                while webhooks.hangs.is_set():
                    time.sleep(0.02)
                answers = webhooks.answers
                code = (answers.pop(0) if len(answers) > 1 else answers[0]) if answers else 200
                webhooks.headers.append(dict(self.headers.items()))
                if code == 200:
                    webhooks.received.append(json.loads(body))
                self.send_response(code)
                if webhooks.retry_after:
                    self.send_header("Retry-After", webhooks.retry_after)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/services/{SECRET}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.hangs.clear()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    server = Webhooks()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(deliveries, "LAST_PAUSE_S", 0.05)


def notice(number: int = 1) -> Notice:
    told = of_incidents(of_two_ranks(), goodput(), [incident(number)], number, "h", Time(1.0))
    return told


def until(found: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_webhook_gets_what_slack_wants_and_our_fields(webhooks: Webhooks) -> None:
    assert target_of(webhooks.url).deliver(notice()) == Outcome(taken=True)
    (told,) = webhooks.received
    assert told["text"] == "job j: incident number 1"
    assert (told["kind"], told["job"], told["incidents"][0]["id"]) == ("incident", "j", 1)
    assert webhooks.headers[0]["Content-Type"] == "application/json"


def test_a_user_and_password_in_a_url_become_a_header(webhooks: Webhooks) -> None:
    url = webhooks.url.replace("http://", "http://me:p%40ss@")
    assert target_of(url).deliver(notice()).taken
    assert webhooks.headers[0]["Authorization"] == "Basic bWU6cEBzcw=="


def test_a_webhook_that_fails_for_a_while_gets_the_notice_later(
    webhooks: Webhooks, caplog: pytest.LogCaptureFixture
) -> None:
    webhooks.answers = [500, 503, 429, 200]
    with caplog.at_level(logging.INFO):
        way = NoticeRoute(target_of(webhooks.url))
        way.put(notice())
        until(lambda: webhooks.received, "the notice")
        way.finish(time.monotonic() + PATIENCE_S)
        assert way.join()
    assert "127.0.0.1 did not take one (HTTP status 500); trying again" in caplog.text
    assert "takes them again" in caplog.text


@pytest.mark.parametrize("code", [302, 400, 404, 410])
def test_a_refusal_that_lasts_is_not_tried_again(webhooks: Webhooks, code: int) -> None:
    webhooks.answers = [code]
    way = NoticeRoute(target_of(webhooks.url))
    way.put(notice())
    way.put(notice(2))
    way.finish(time.monotonic() + PATIENCE_S)
    assert way.join()
    assert len(webhooks.headers) == 2  # Once for each notice.


def test_the_next_notice_says_how_many_were_not_delivered(webhooks: Webhooks) -> None:
    webhooks.answers = [404, 404, 200]
    way = NoticeRoute(target_of(webhooks.url))
    for number in (1, 2, 3):
        way.put(notice(number))
    way.finish(time.monotonic() + PATIENCE_S)
    assert way.join()
    assert [told["undelivered"] for told in webhooks.received] == [2]


def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(webhooks: Webhooks) -> None:
    webhooks.answers, webhooks.retry_after = [429], "7"
    assert target_of(webhooks.url).deliver(notice()) == Outcome(
        False, "HTTP status 429", False, pause_s=7.0
    )


def test_a_server_that_hangs_costs_nobody_else_anything(
    webhooks: Webhooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "ANSWER_S", 0.2)
    webhooks.hangs.set()
    way = NoticeRoute(target_of(webhooks.url))
    began = time.monotonic()
    for number in range(1, QUEUE + 20):
        way.put(notice(number))
    assert time.monotonic() - began < 5.0
    way.finish(time.monotonic() + 0.5)
    assert way.join() is False
    webhooks.hangs.clear()


def test_of_more_notices_than_the_queue_holds_the_oldest_go_and_are_counted() -> None:
    told: list[Notice] = []
    may = threading.Event()

    class Slow(Target):
        name = "slow"

        def deliver(self, notice: Notice) -> Outcome:
            may.wait(PATIENCE_S)
            told.append(notice)
            return Outcome(taken=True)

    way = NoticeRoute(Slow())
    for number in range(1, QUEUE + 11):
        way.put(notice(number))
    may.set()
    way.finish(time.monotonic() + PATIENCE_S)
    assert way.join()
    assert told[-1].incidents_total == QUEUE + 10
    assert len(told) <= QUEUE + 1
    assert max(one.undelivered for one in told) >= 9


@pytest.mark.parametrize("port", [1], ids=["refused"])
def test_no_message_shows_a_url(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG):
        for url in (
            f"http://127.0.0.1:{port}/{SECRET}",
            f"http://user:{SECRET}@127.0.0.1:{port}/",
            f"https://127.0.0.1:{port}/{SECRET}",
            f"http://[bad/{SECRET}",
        ):
            try:
                target = target_of(url)
            except ValueError:
                continue
            way = NoticeRoute(target)
            way.put(notice())
            way.finish(time.monotonic() + 0.5)
            way.join()
            assert SECRET not in target.name
    assert "did not take one" in caplog.text
    assert SECRET not in caplog.text


# ---- commands ----


def test_a_command_gets_the_notice_on_stdin_and_in_its_environment(tmp_path: Path) -> None:
    told = "$HOLDFAST_NOTICE_KIND $HOLDFAST_NOTICE_JOB"
    command = f"sh -c 'cat > {tmp_path}/in; echo {told} > {tmp_path}/env'"
    assert target_of(command).deliver(notice()).taken
    assert json.loads((tmp_path / "in").read_text())["text"] == "job j: incident number 1"
    assert (tmp_path / "env").read_text() == "incident j\n"


def test_a_command_that_fails_or_does_not_end_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "RUN_S", Seconds(0.2))
    assert target_of("sh -c 'exit 3'").deliver(notice()) == Outcome(False, "exit code 3")
    hanging = target_of("sleep 1000").deliver(notice())
    assert not hanging.taken
    assert not hanging.final
    assert target_of("true").deliver(notice()).taken  # It does not read its input.
