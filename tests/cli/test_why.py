"""`holdfast why`: what it asks of a coordinator, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.main import main
from holdfast.jobhome import JobHome
from holdfast.messages.evidence import Frame, RankEvidence, StackGroup, Verdict
from holdfast.messages.reports import SuspicionReport
from holdfast.messages.units import NodeId, Rank, RoundNumber
from holdfast.messages.wire import AskHang, AskWhy, HangNoted, Rejected, Visit, Why
from holdfast.wire import framing

FRAMES = tuple(Frame(file="train.py", line=n, function=f"f{n}") for n in range(1, 16))
GROUPS = (
    StackGroup(ranks=(Rank(0),), headline="rank 0 waits in all_reduce #4", frames=FRAMES),
    StackGroup(
        ranks=(Rank(1),),
        headline="rank 1: sleeps",
        frames=(Frame(file="kernel", line=0, function="clock_nanosleep", native=True),),
    ),
)
VERDICT = Verdict(guilty=(Rank(1),), sentence="rank 1 on n sleeps", groups=GROUPS)
EVIDENCE = RankEvidence(node=NodeId("n"), round=RoundNumber(1), rank=Rank(1), pid=7)
LINE = "rank 1 has been in train.py:1 (f1) for 12 s, 1 rank waits"
SUSPICION = SuspicionReport(
    rank=Rank(1),
    place="train.py:1 (f1)",
    for_s=12.0,
    waiting=[Rank(0)],
    signs=["cpu"],
    still_s=0.0,
    proof=None,
    acts_in_s=None,
    until="",
    sentence="rank 1 on n sleeps",
    line=LINE,
)
WHY = Why(verdict=VERDICT, evidence=(EVIDENCE,), suspicion=SUSPICION, detects=True)


Serve = Callable[[bytes], list[Visit]]


def test_it_shows_the_verdict_and_the_stacks_of_those_who_stand_alike(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = serve(framing.encode(WHY))
    assert main(["why", "j"]) == 0
    assert [(visit.token, visit.question) for visit in asked] == [("t", AskWhy())]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [LINE, "rank 1 on n sleeps"]
    assert "rank 0 waits in all_reduce #4" in lines
    assert "    f1  train.py:1" in lines
    assert "    ... 3 more" in lines
    assert "    clock_nanosleep  kernel" in lines


@pytest.mark.parametrize(
    ("detects", "said"), [(True, "no rank holds the others up"), (False, "hang detection is off")]
)
def test_when_nothing_is_suspected_it_says_so_first(
    serve: Serve, capsys: pytest.CaptureFixture[str], detects: bool, said: str
) -> None:
    serve(framing.encode(msgspec.structs.replace(WHY, suspicion=None, detects=detects)))
    assert main(["why"]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_a_person_decides_about_a_rank(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    asked = serve(framing.encode(HangNoted(text="rank 1 is left alone")))
    assert main(["hang", "j", "--rank", "1", "never"]) == 0
    assert [visit.question for visit in asked] == [AskHang(rank=Rank(1), act=False)]
    assert capsys.readouterr().out == "rank 1 is left alone\n"


@pytest.mark.parametrize("words", [["never"], ["--rank", "x", "now"], ["--rank", "1", "maybe"]])
def test_a_decision_that_is_none_is_one_line(
    home: JobHome, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["hang", "j", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_as_json_all_of_it_is_there(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(framing.encode(WHY))
    assert main(["why", "j", "--json"]) == 0
    found = msgspec.convert(json.loads(capsys.readouterr().out), Why)
    assert found == WHY


def test_a_coordinator_that_refuses_says_why(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(framing.encode(Rejected(reason="no round is in force now")))
    assert main(["why", "j"]) == 1
    assert "no round is in force now" in capsys.readouterr().err


def test_a_coordinator_that_hangs_up_may_want_tls(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(b"")
    assert main(["why", "j"]) == 1
    assert "--tls-cert" in capsys.readouterr().err


def test_a_coordinator_that_cannot_be_reached_is_one_line(
    home: JobHome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "j"]) == 1
    said = capsys.readouterr().err
    assert "no answer from its coordinator at 127.0.0.1:1" in said
    assert "Traceback" not in said


def test_a_job_that_does_not_run_has_nobody_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    (tmp_path / "jobs" / "old").mkdir(parents=True)
    (tmp_path / "jobs" / "old" / "journal.db").touch()
    assert main(["why", "old"]) == 1
    assert "does not run; see `holdfast incidents old`" in capsys.readouterr().err


def test_tls_files_go_together(home: JobHome, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "j", "--tls-ca", "ca.pem"]) == 2
    assert "go together" in capsys.readouterr().err


# ---- the past ----------------------------------------------------------------------------------


def keep(home: JobHome, number: int) -> None:
    folder = home.incidents / str(number)
    folder.mkdir(parents=True)
    (folder / "verdict.json").write_bytes(msgspec.json.encode(VERDICT))


def test_a_hang_of_the_past_is_shown_from_what_was_kept(
    home: JobHome, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(home, 4)
    assert main(["why", "j", "--incident", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rank 1 on n sleeps\n")
    assert "    f1  train.py:1" in said
    assert f"all evidence is in {home.incidents / '4'}" in said


def test_a_hang_of_the_past_as_json(home: JobHome, capsys: pytest.CaptureFixture[str]) -> None:
    keep(home, 4)
    assert main(["why", "j", "--incident", "4", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Verdict) == VERDICT


def test_an_incident_that_was_no_hang_was_not_looked_into(
    home: JobHome, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "j", "--incident", "9"]) == 1
    assert "only hangs are examined" in capsys.readouterr().err
