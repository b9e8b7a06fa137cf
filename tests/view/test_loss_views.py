"""Every viewer shows the loss that the script told last, also when it is no finite number."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Any

import msgspec
import pytest
from journals import home_with, latest, simulated
from msgspec.structs import replace
from reported import of_two_ranks
from serving_web import page, run

from holdfast.core.job import Job
from holdfast.core.replay import Entry
from holdfast.core.view import JobLoss
from holdfast.jobhome import JobHome
from holdfast.messages.losses import Loss
from holdfast.messages.reports import GoodputReport
from holdfast.messages.requests import JobAccount
from holdfast.messages.units import StepNumber
from holdfast.sim.training import loss_after
from holdfast.view.follower import Follower
from holdfast.view.metrics.families import families
from holdfast.view.metrics.otlp import encoded
from holdfast.view.metrics.text import _number, metrics_text
from holdfast.view.report.facts import gather
from holdfast.view.report.html import html
from holdfast.view.report.markdown import markdown
from holdfast.view.statusline import status_line
from holdfast.view.terminal import print_status
from holdfast.view.top import lines
from holdfast.view.top.frame import frame
from holdfast.view.top.state import Looks, look_at
from holdfast.view.wording import loss as written
from holdfast.worker.tracking import numbers


@cache
def until(*, finite: bool) -> tuple[tuple[Entry, ...], JobLoss]:
    """The simulated job up to the latest moment in which its loss is a number, or none."""

    def loss(job: Job) -> JobLoss | None:
        found = job.loss
        return found if found is not None and isinstance(found.value, float) == finite else None

    return latest(simulated(), loss)


@pytest.fixture(params=[True, False], ids=["finite", "NaN"])
def told(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[JobHome, JobLoss]:
    monkeypatch.setattr(JobHome, "alive", lambda self: True)
    entries, loss = until(finite=request.param)
    return home_with(entries), loss


def test_the_history_has_every_loss_with_its_step(told: tuple[JobHome, JobLoss]) -> None:
    home, newest = told
    points = Follower.open(home).history.loss.points()
    assert points[-1][1] == newest
    assert len(points) > 20
    assert all(one.value == loss_after(one.step) for _, one in points)


def test_the_page_is_told_it_now_and_over_time(told: tuple[JobHome, JobLoss]) -> None:
    _, newest = told

    async def test() -> None:
        async with page() as web:
            now = await web.get("/api/jobs/j/now")
            assert (now["loss"], now["status"]["loss"]) == (newest.value, newest.value)
            assert now["status"]["loss_step"] == newest.step
            points = (await web.get("/api/jobs/j/loss"))["points"]
            assert points[-1][1:] == [newest.step, newest.value]

    run(test)


def test_metrics_have_it_in_the_words_of_each_format(told: tuple[JobHome, JobLoss]) -> None:
    home, newest = told
    follower = Follower.open(home)
    text = metrics_text(follower)
    (value,) = re.findall(r'^holdfast_loss\{job="j"\} (\S+)$', text, re.MULTILINE)
    assert value == ("NaN" if newest.value == "NaN" else repr(round(float(newest.value), 6)))
    assert f'holdfast_loss_step{{job="j"}} {float(newest.step)}' in text
    pushed = json.loads(encoded(families([follower]), 2.0, 1.0), parse_constant=no_json)
    (metrics,) = pushed["resourceMetrics"][0]["scopeMetrics"]
    (metric,) = [one for one in metrics["metrics"] if one["name"] == "holdfast_loss"]
    (point,) = metric["gauge"]["dataPoints"]
    assert point["asDouble"] == newest.value


def no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (3.1e-8, "3.1e-08"), (0.0, "0.0")],
)
def test_numbers_of_any_size_are_written_as_prometheus_reads_them(value: float, text: str) -> None:
    assert _number(value) == text


def test_reports_have_it(told: tuple[JobHome, JobLoss]) -> None:
    home, newest = told
    report = gather(Follower.open(home))
    shown, step = written(newest.value), f"{newest.step:,}"
    assert f"| loss | {shown} at step {step} |" in markdown(report)
    assert f"<b>{shown}</b><span>loss at step {step}</span>" in html(report)
    assert 'aria-label="loss"' in html(report)
    again: Any = json.loads(msgspec.json.encode(report), parse_constant=no_json)
    assert again["losses"][-1]["loss"] == again["status"]["loss"] == newest.value


def test_terminals_show_it(
    told: tuple[JobHome, JobLoss], capsys: pytest.CaptureFixture[str]
) -> None:
    home, newest = told
    follower = Follower.open(home)
    shown = f"loss {written(newest.value)}"
    view = look_at(follower)
    assert f", {shown}," in lines.words(view)
    assert f"  {shown}" in "\n".join(line.plain for line in frame(view, Looks(), 120, 40))
    assert f" · {shown} · " in status_line(follower.status(), follower.goodput(), 200)
    print_status(follower.status())
    assert f", {shown} at step {newest.step}" in capsys.readouterr().out


def test_nothing_is_said_of_a_loss_that_was_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    status = replace(of_two_ranks(), step=StepNumber(5))
    goodput = GoodputReport(job="j", wall_s=1.0, ranks=2, seconds={}, goodput=0.0)
    print_status(status)
    assert "loss" not in capsys.readouterr().out + status_line(status, goodput, 200)


@pytest.mark.parametrize("loss", [None, 0.5, "NaN", "-Infinity"])
def test_trackers_get_it_as_a_number(loss: Loss | None) -> None:
    account = JobAccount(
        step=StepNumber(5),
        seconds={},
        restarts=0,
        incidents=0,
        steps_per_s=None,
        samples_per_s=None,
        world_size=2,
        loss=loss,
    )
    found = numbers(account)
    if loss is None:
        assert "holdfast/loss" not in found
    else:
        assert repr(found["holdfast/loss"]) == repr(float(loss))
