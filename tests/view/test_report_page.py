"""A report is one file that needs nothing else, says what the other reports say, and stays small."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from journals import home_with, simulated

from holdfast.cli.main import main
from holdfast.core.replay import Entry
from holdfast.jobhome import JobHome
from holdfast.messages.events import JobOpened, WorkerExited
from holdfast.messages.reports import CAUSES
from holdfast.view.follower import Follower
from holdfast.view.report import facts
from holdfast.view.report.facts import JobReport, gather
from holdfast.view.report.html import html
from holdfast.view.report.markdown import markdown
from holdfast.view.report.style import DARK, LIGHT
from holdfast.view.report.wording import duration, headline, lost_s, short, size


@pytest.fixture
def home(monkeypatch) -> JobHome:
    monkeypatch.setattr(JobHome, "alive", lambda self: False)
    return home_with(simulated())


@pytest.fixture
def report(home) -> JobReport:
    return gather(Follower.open(home))


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed, in order."""

    VOID = frozenset({"meta", "br"})
    DRAWN = frozenset({"path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in self.DRAWN
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing(report) -> None:
    text = html(report)
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "form"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on")} | {"href", "src"} & names
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"https?:", text)
    assert len(text.encode()) < 5_000_000
    assert page.tags.count("svg") >= 5


def test_what_a_job_says_of_itself_cannot_become_part_of_the_page(monkeypatch) -> None:
    monkeypatch.setattr(JobHome, "alive", lambda self: False)
    bad = "<script>alert(1)</script>|`&\n#"

    def poisoned(entry: Entry) -> Entry:
        event = entry.event
        if isinstance(event, JobOpened):
            event = msgspec.structs.replace(event, job=bad)
        if isinstance(event, WorkerExited) and event.raised is not None:
            raised = msgspec.structs.replace(event.raised, message=bad, type=bad, traceback=bad)
            event = msgspec.structs.replace(event, raised=raised)
        return msgspec.structs.replace(entry, event=event)

    follower = Follower.open(home_with(tuple(map(poisoned, simulated()))))
    report = gather(follower)
    assert any("<script>" in one.line + one.detail for one in report.incidents)
    assert "<script" not in html(report)
    Page(html(report))
    assert "<script" not in markdown(report)
    tables = [line for line in markdown(report).splitlines() if line.startswith("| ")]
    assert len({line.replace("\\|", "").count("|") for line in tables}) <= 4


def test_the_numbers_are_those_of_the_other_reports(home, report) -> None:
    follower = Follower.open(home)
    assert report.status == follower.status()
    assert report.goodput == follower.goodput()
    assert report.incident_count == len(follower.incidents())
    found: dict[str, float] = {}
    for bucket in report.goodput_over_time:
        for cause, seconds in bucket.seconds.items():
            found[cause] = found.get(cause, 0.0) + seconds
    booked = {cause: s for cause, s in report.goodput.seconds.items() if s > 0}
    assert found == pytest.approx(booked, rel=0.01, abs=0.5)
    text = html(report)
    assert f"{report.goodput.goodput:.1%}" in text
    assert all(f'<span class="num">{one.id}</span>' in text for one in report.incidents)


def test_a_long_list_of_incidents_is_cut_and_says_so(home, monkeypatch) -> None:
    monkeypatch.setattr(facts, "MOST_INCIDENTS", 3)
    report = gather(Follower.open(home))
    assert [one.id for one in report.incidents][-1] == report.incident_count
    text = html(report)
    assert text.count('class="incident-row"') == 3
    assert "`holdfast incidents` has all" in text


def test_ranks_of_a_large_job_share_lanes(home, monkeypatch) -> None:
    monkeypatch.setattr(facts, "MOST_LANES", 3)
    report = gather(Follower.open(home))
    assert len(report.timeline) == 3
    assert report.timeline[0].name == "ranks 0–2"


def test_every_cause_has_a_colour_in_the_light_and_in_the_dark() -> None:
    assert list(LIGHT) == list(CAUSES) == list(DARK)


def test_a_job_that_has_just_opened_has_a_report(monkeypatch) -> None:
    monkeypatch.setattr(JobHome, "alive", lambda self: False)
    report = gather(Follower.open(home_with(simulated()[:1])))
    Page(html(report))
    assert "There was no fault" in headline(report)
    assert markdown(report)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0134, "13 ms"),
        (9.04, "9.0 s"),
        (119, "119 s"),
        (3599, "60 min"),
        (10799, "3 h 00 min"),
        (86400 * 3 - 5, "3 d 0 h"),
    ],
)
def test_durations_are_written_with_two_units_at_most(seconds, text) -> None:
    assert duration(seconds) == text


def test_large_numbers_are_short() -> None:
    assert [short(n) for n in (99_999, 2_021_400, 5e9)] == ["99,999", "2.0 M", "5.0 G"]
    assert size(1.5e9) == "1.5 GB"


# ---- the command ----


def test_the_formats_follow_the_name(home, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "j"]) == 0
    assert Path("report-j.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", "j", "-o", "r.md"]) == 0
    assert Path("r.md").read_text().startswith("# ")
    assert main(["report", "j", "-o", "r.json"]) == 0
    content = json.loads(Path("r.json").read_text())
    assert json.loads(msgspec.json.encode(msgspec.convert(content, JobReport))) == content
    assert main(["report", "j", "--json"]) == 0
    capsys.readouterr()
    assert main(["report", "j", "-o", "-", "--format", "md"]) == 0
    assert main(["report", "j", "-o", "r.pdf"]) == 2
    assert "end the name in .html, .md or .json" in capsys.readouterr().err


def test_a_price_from_any_source_tells_what_faults_cost(
    home, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", "j", "-o", "-", "--format", "md"]) == 0
    assert "cost" not in capsys.readouterr().out
    Path("holdfast.toml").write_text('price-per-hour = "3600000 EUR"\n')
    lost = lost_s(gather(Follower.open(home)))
    assert lost > 0
    assert main(["report", "j", "-o", "-", "--format", "md"]) == 0
    assert f"| what that cost | {lost * 1000:,.2f} EUR |" in capsys.readouterr().out
    flag = ("--price-per-hour", "3600000 <b>")
    assert main(["report", "j", "-o", "-", "--format", "html", *flag]) == 0
    assert f"<b>{lost * 1000:,.2f} &lt;b&gt;</b>" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_it(report, tmp_path) -> None:
    (tmp_path / "r.html").write_text(html(report))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom")
    words = [
        "chromium",
        *flags,
        f"--user-data-dir={tmp_path / 'p'}",
        (tmp_path / "r.html").as_uri(),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "Where the time went" in done.stdout
    assert done.stdout.count("<svg") == html(report).count("<svg")
