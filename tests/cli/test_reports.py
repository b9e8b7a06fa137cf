"""`status`, `incidents` and `goodput` over a journal: the same structs for people and programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.main import main
from holdfast.cli.view import tell_end
from holdfast.coordinator.journal import Entry, Journal
from holdfast.jobhome import JobFile, JobHome, create
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
from holdfast.messages.reports import GoodputReport, IncidentReport, StatusReport
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

NODE = NodeId("n")


def a_killed_rank() -> Iterator[AnyEvent]:
    """Two ranks finish seven steps, one is killed, and both are back after six seconds."""
    yield JobOpened(at=Time(1000.0), job="j", terms=Terms())
    spec = NodeSpec(host="h", address="a", slots=2, pid=1)
    yield NodeJoined(at=Time(1001.0), node=NODE, spec=spec, store_port=1)
    yield from trained(1, 1002.0, step=7)
    yield WorkerExited(
        at=Time(1010.0),
        node=NODE,
        round=RoundNumber(1),
        rank=Rank(1),
        signal=9,
        progress=progress(Rank(1), 1002.0, step=7),
    )
    yield NodeReady(
        at=Time(1012.0), node=NODE, round=RoundNumber(1), store_port=2, slowest_stop_s=1.0
    )
    yield from trained(2, 1013.0, step=9)


def trained(number: int, at: float, step: int) -> Iterator[AnyEvent]:
    round = RoundNumber(number)
    for rank in (Rank(0), Rank(1)):
        yield WorkerStarted(at=Time(at), node=NODE, round=round, rank=rank, pid=9, warm=True)
    for rank in (Rank(0), Rank(1)):
        ranks = (progress(rank, at, step),)
        yield Progress(at=Time(at + 7), node=NODE, round=round, ranks=ranks)


def progress(rank: Rank, at: float, step: int) -> RankProgress:
    return RankProgress(
        rank=rank,
        step=StepNumber(step),
        steps=5,
        first_at=Time(at + 3),
        last_at=Time(at + 7),
        step_s=1.0,
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobHome:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    home = create("j", "train.py")
    home.write_job_file(JobFile(job="llm", host="127.0.0.1", port=1, token="t", pid=1))
    journal = Journal(home.journal)
    assert journal.append([Entry(event.at, event) for event in a_killed_rank()]) is None
    journal.close()
    return home


@pytest.mark.parametrize(
    ("command", "kind"),
    [("status", StatusReport), ("goodput", GoodputReport), ("incidents", list[IncidentReport])],
)
def test_as_json_a_command_prints_its_struct_and_nothing_else(
    home: JobHome, capsys: pytest.CaptureFixture[str], command: str, kind: Any
) -> None:
    assert main([command, "j", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert msgspec.to_builtins(msgspec.convert(printed, kind)) == printed


def test_the_same_is_shown_to_people(home: JobHome, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "incidents", "goodput"):
        assert main([command]) == 0
    out = capsys.readouterr().out
    assert "round 2, 2 ranks, step 9" in out
    assert "1. rank 1 killed by SIGKILL" in out
    assert "back in 6.00 s" in out
    assert "job j: goodput " in out


def test_the_end_is_told_on_the_terminal_and_kept_as_a_trace(
    home: JobHome, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_end(home, quiet=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[holdfast] job j: not ended properly"
    assert lines[1].startswith("[holdfast] 9 steps in 20.0 s on 2 ranks, goodput ")
    assert lines[2].startswith("[holdfast] incident 1: rank 1 killed by SIGKILL")
    assert lines[-1] == f"[holdfast] more in {home.path}"
    slices = [e for e in json.loads(home.trace.read_text())["traceEvents"] if e["ph"] == "X"]
    booked_s = (
        sum(event["dur"] for event in slices if event["cat"] not in ("incident", "phase")) / 1e6
    )
    assert booked_s == pytest.approx(2 * 20.0, abs=0.01)
    assert [e["dur"] for e in slices if e["cat"] == "incident"] == [6_000_000]


def test_a_job_without_events_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    create("empty", "train.py").journal.touch()
    assert main(["status", "empty"]) == 1
    assert capsys.readouterr().err == (
        "holdfast status: job empty has no events yet; try again in a moment\n"
    )
