"""Notices: which incidents are told and when, and how they reach targets that fail."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.webhooks import SECRET, Webhooks
from msgspec.structs import replace
from reported import an_incident, of_two_ranks

from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport
from holdfast.messages.units import Seconds, Time
from holdfast.view.notices import news, targets
from holdfast.view.notices.delivery import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LONGEST_PAUSE_S,
    NoticeRoute,
)
from holdfast.view.notices.news import BURST, OPEN_S, PACE_S, NoticesTold
from holdfast.view.notices.notice import LINES_SHOWN, JobSeen, Notice, of_incidents, of_the_end
from holdfast.view.notices.targets import ANSWER_S, Outcome, Target, target_of


def incident(id: int, at: float = 1000.0, lost_s: float | None = 1.0) -> IncidentReport:
    return an_incident(id=id, at=Time(at), lost_s=lost_s, line=f"incident number {id}")


def seen(incidents: list[IncidentReport], status: StatusReport | None = None) -> JobSeen:
    goodput = GoodputReport(
        job="j", wall_s=100.0, ranks=2, seconds={"productive": 150.0}, goodput=0.75
    )
    return JobSeen(status or of_two_ranks(), goodput, incidents, "host", Time(1.0))


# ---- what is told, and when ----


class Told:
    """A target that takes every notice."""

    def __init__(self, told: NoticesTold | None = None) -> None:
        self.told = told or NoticesTold()

    def tell(self, incidents: list[IncidentReport], at: float) -> list[int]:
        due = news.due(self.told, incidents, Time(at))
        if due:
            self.told = news.after(self.told, due, incidents, Time(at))
        return [one.id for one in due]


def test_the_first_incidents_are_told_at_once_and_a_storm_in_digests() -> None:
    target, incidents, told = Told(), [], []
    for number in range(1, 101):
        incidents.append(incident(number, at=1000.0 + number))
        told.append(target.tell(incidents, 1000.0 + number))
    sent = [ids for ids in told if ids]
    assert sent[:BURST] == [[1], [2], [3]]
    assert len(sent) <= BURST + 100 / PACE_S + 1
    assert sorted(id for ids in sent for id in ids) == list(range(1, sent[-1][-1] + 1))


def test_a_sender_that_is_started_again_is_not_allowed_more() -> None:
    target, incidents, sent = Told(), [], 0
    for number in range(1, 101):
        incidents.append(incident(number, at=1000.0 + number))
        target = Told(target.told)
        sent += bool(target.tell(incidents, 1000.0 + number))
    assert sent <= BURST + 100 / PACE_S + 1


def test_an_incident_is_told_when_it_is_over_or_lasts() -> None:
    target, open = Told(), [incident(1, at=1000.0, lost_s=None)]
    assert target.tell(open, 1001.0) == []
    assert news.next_at(target.told, open, Time(1001.0)) == 1000.0 + OPEN_S
    assert target.tell(open, 1000.0 + OPEN_S) == [1]
    assert target.tell(open, 1500.0) == []
    assert target.tell([incident(1)], 1600.0) == [1]
    assert target.tell([incident(1)], 1700.0) == []


def test_an_open_incident_does_not_keep_a_later_one_from_being_told() -> None:
    target = Told()
    assert target.tell([incident(1, lost_s=None), incident(2)], 1001.0) == [2]
    assert target.tell([incident(1), incident(2)], 1002.0) == [1]


def test_what_was_told_before_the_sender_died_is_not_told_again() -> None:
    before, incidents = Told(), [incident(1), incident(2, lost_s=None)]
    before.tell(incidents, 1000.0 + OPEN_S)
    after = Told(before.told)
    assert after.tell(incidents, 2000.0) == []
    assert after.tell([incident(1), incident(2), incident(3)], 2000.0) == [2, 3]


# ---- what a notice says ----


def test_one_incident_is_told_in_its_line_and_several_in_a_list() -> None:
    one = of_incidents(seen([incident(1)]), [incident(1)])
    assert (one.kind, one.text) == ("incident", "job j: incident number 1")
    incidents = [incident(n) for n in range(1, 31)]
    many = of_incidents(seen(incidents), incidents)
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
    told = of_the_end(seen([incident(1), incident(2)], status), [incident(2)])
    assert told.kind == kind
    assert told.text.startswith(begins)
    assert told.text.endswith(
        "1,234 steps in 1 min 40 s, goodput 75.0%, 2 incidents\n2. incident number 2"
    )


def test_control_characters_of_a_script_do_not_reach_a_notice() -> None:
    bad = replace(incident(1), line="rank 0 raised \x1b[31mError\x1b[0m\n\x07: x")
    text = of_incidents(seen([bad]), [bad]).text
    assert text == "job j: rank 0 raised Error : x"


# ---- webhooks ----


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    server = Webhooks()
    yield server
    server.close()


def notice(number: int = 1) -> Notice:
    return of_incidents(seen([incident(number)]), [incident(number)])


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


@pytest.mark.parametrize("code", [302, 400, 404, 410])
def test_a_refusal_that_lasts_is_final(webhooks: Webhooks, code: int) -> None:
    webhooks.answers = [code]
    assert target_of(webhooks.url).deliver(notice()) == Outcome(
        False, f"HTTP status {code}", final=True
    )


@pytest.mark.parametrize("answer", [408, 429, 500, 503, "close", "half"])
def test_what_may_pass_is_worth_another_try(webhooks: Webhooks, answer: int | str) -> None:
    webhooks.answers = [answer]
    outcome = target_of(webhooks.url).deliver(notice())
    assert (outcome.taken, outcome.final) == (False, False)
    assert outcome.why


def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(webhooks: Webhooks) -> None:
    webhooks.answers, webhooks.retry_after = [429], "7"
    assert target_of(webhooks.url).deliver(notice()) == Outcome(
        False, "HTTP status 429", False, pause_s=7.0
    )


def test_a_server_that_hangs_is_given_up_after_a_while(
    webhooks: Webhooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "ANSWER_S", 0.2)
    webhooks.hangs.set()
    outcome = target_of(webhooks.url).deliver(notice())
    assert (outcome.taken, outcome.final) == (False, False)


@pytest.mark.parametrize(
    "url",
    [
        f"http://127.0.0.1:1/{SECRET}",
        f"http://user:{SECRET}@127.0.0.1:1/",
        f"https://127.0.0.1:1/{SECRET}",
    ],
)
def test_no_message_shows_a_url(url: str) -> None:
    target = target_of(url)
    outcome = target.deliver(notice())
    assert outcome.why == "Connection refused"
    assert SECRET not in target.name


# ---- when a target is tried again ----


class Fails(Target):
    """A target that takes nothing."""

    name = "fails"

    def __init__(self, pause_s: Seconds = 0.0) -> None:
        self._pause_s = pause_s

    def deliver(self, notice: Notice) -> Outcome:
        return Outcome(False, "why", pause_s=self._pause_s)


def pause_after(route: NoticeRoute, tries: int, deadline_in_s: Seconds | None = None) -> Seconds:
    """Have some tries fail; return the pause before the next."""
    for _ in range(tries):
        asyncio.run(route.bring(notice(), NoticesTold(through=1)))
    now = time.monotonic()
    return route.next_try(None if deadline_in_s is None else now + deadline_in_s) - now


def never(told: NoticesTold) -> None:
    raise AssertionError(f"nothing was delivered: {told}")


def test_pauses_between_tries_double_up_to_a_limit() -> None:
    route = NoticeRoute(Fails(), NoticesTold(), never)
    assert pause_after(route, 1) == pytest.approx(FIRST_PAUSE_S, abs=0.5)
    assert pause_after(route, 1) == pytest.approx(2 * FIRST_PAUSE_S, abs=0.5)
    assert pause_after(route, 20) == pytest.approx(LONGEST_PAUSE_S, abs=0.5)
    assert pause_after(route, 0, deadline_in_s=14.0) <= LAST_PAUSE_S


def test_the_pause_that_a_target_asks_for_is_kept_but_for_a_last_try() -> None:
    route = NoticeRoute(Fails(pause_s=100.0), NoticesTold(), never)
    assert pause_after(route, 1) == pytest.approx(100.0, abs=0.5)
    assert pause_after(route, 0, deadline_in_s=14.0) == pytest.approx(14.0 - ANSWER_S, abs=0.5)


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
    assert (hanging.taken, hanging.final) == (False, False)


def test_a_command_need_not_read_and_may_print_as_much_as_it_likes() -> None:
    assert target_of("true").deliver(notice()).taken
    assert target_of("head -c 50000000 /dev/zero").deliver(notice()).taken


def test_a_command_that_does_not_exist_is_refused_for_good() -> None:
    assert target_of("/no/such/command").deliver(notice()).final
