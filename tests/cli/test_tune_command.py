"""`holdfast tune`: what it asks of a coordinator, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.coordinator.journal import Journal
from holdfast.core.replay import Entry
from holdfast.jobhome import JobHome
from holdfast.messages.events import JobOpened
from holdfast.messages.records import Terms
from holdfast.messages.tuning import LoaderConfig, TuningChange, TuningReport
from holdfast.messages.units import Rank, RoundNumber, StepNumber, Time
from holdfast.messages.wire import AskTune, Rejected, TuneTaken, Visit
from holdfast.view.terminal import tuning_lines
from holdfast.wire import framing

Serve = Callable[[bytes], list[Visit]]

CHANGE = TuningChange(
    version=1,
    config=LoaderConfig(micro_batch=64),
    by="ann@host",
    at=Time(0.0),
    outcome="applied",
    round=RoundNumber(2),
    step=StepNumber(40),
)
TAKEN = TuneTaken(dataset="train", change=CHANGE, line="train: micro-batch 64: applied")


def test_settings_are_asked_for_and_the_outcome_is_printed(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = serve(framing.encode(TAKEN))
    words = ["--micro-batch", "64", "--workers", "0", "--prefetch", "8", "--data", "train"]
    assert main(["tune", "j", *words]) == 0
    (question,) = [visit.question for visit in asked]
    assert isinstance(question, AskTune)
    assert question.config == LoaderConfig(micro_batch=64, workers=0, prefetch=8)
    assert (question.dataset, question.auto) == ("train", False)
    assert question.by
    assert capsys.readouterr().out == "train: micro-batch 64: applied\n"


def test_as_json_the_change_is_there(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(framing.encode(TAKEN))
    assert main(["tune", "j", "--auto", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["change"]["step"] == 40


def test_a_change_that_was_given_up_is_a_failure(serve: Serve) -> None:
    given_up = TuneTaken(
        dataset="train",
        change=TuningChange(
            version=0,
            config=LoaderConfig(workers=1),
            by="ann",
            at=Time(0.0),
            outcome="given up",
            round=RoundNumber(1),
        ),
        line="train: workers 1: given up",
    )
    serve(framing.encode(given_up))
    assert main(["tune", "j", "--workers", "1"]) == 1


def test_a_refusal_is_one_line(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(framing.encode(Rejected(reason="no data set is called x; choose one with --data: train")))
    assert main(["tune", "j", "--data", "x", "--workers", "1"]) == 1
    assert "no data set is called x; choose one with --data: train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--micro-batch", "0"], "--micro-batch 0: a whole number from 1 to"),
        (["--micro-batch", "many"], "--micro-batch many: a whole number"),
        (["--workers", "-1"], "--workers"),
        (["--prefetch", "0"], "--prefetch 0: a whole number from 1 to"),
        (["--auto", "--micro-batch", "8"], "leave --micro-batch out"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anybody_is_asked(
    home: JobHome, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["tune", "j", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_job_without_loaders_says_so(
    home: JobHome, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home.journal.unlink()
    journal = Journal(home.journal)
    opened = JobOpened(at=Time(1.0), job="llm", terms=Terms())
    journal.append([Entry(Time(1.0), opened, None, 0)])
    journal.close()
    assert main(["tune", "j"]) == 1
    assert capsys.readouterr().err == "holdfast tune: job j has no loader that can be tuned\n"


def test_what_is_in_force_is_shown_with_its_history() -> None:
    lines = tuning_lines(
        TuningReport(
            dataset="train",
            version=1,
            config=LoaderConfig(micro_batch=64),
            script=LoaderConfig(micro_batch=8, workers=2),
            ranks=3,
            missing=[Rank(3)],
            pending="workers 4 (bob@host): waits for rank 3 to open the data set",
            auto="ended: bob@host chose the settings",
            changes=[CHANGE],
        )
    )
    assert lines[0] == "train: version 1, micro-batch 64, workers 2; open on 3 ranks"
    assert lines[1] == "  under way: workers 4 (bob@host): waits for rank 3 to open the data set"
    assert lines[2] == "  search for a micro-batch ended: bob@host chose the settings"
    assert lines[3].endswith("ann@host: micro-batch 64: applied from step 40 of round 2")
