"""Requests for faults on the command line, and the complaints about those that make no sense."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import flags
from holdfast.cli.main import main
from holdfast.config.faults import schedule
from holdfast.errors import UsageError
from holdfast.messages.chaos import FAULT_NAMES, MAX_SCHEDULED, Injection

FLAG = "--chaos"


def test_a_schedule_is_faults_with_semicolons_between() -> None:
    text = "kill@step=50,rank=1; stop@step=80,rank=any; hang@every=100,seed=7;"
    assert schedule(text, FLAG) == (
        Injection(kind="kill", at_step=50, ranks=(1,)),
        Injection(kind="stop", at_step=80),
        Injection(kind="hang", every=100, seed=7),
    )
    assert schedule("", FLAG) == ()
    assert schedule("slow@step=3,rank=0,rank=2,value=1.5", FLAG) == (
        Injection(kind="slow", at_step=3, ranks=(0, 2), value=1.5),
    )
    assert schedule("netcut@step=9,node=node-1", FLAG)[0].node == "node-1"
    assert schedule("oom@step=9,force=1", FLAG)[0].force


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill", "say when, as in kill@step=50"),
        ("kill@rank=1", "say when"),
        ("kil@step=5", "did you mean kill?"),
        ("explode@step=5", "no fault is called explode; known are: kill"),
        ("kill@step=0", "from 1 on"),
        ("kill@step=x", "whole number"),
        ("kill@stp=5", "stp=5 is not understood; did you mean step?"),
        ("kill@when=5", "when=5 is not understood; known are: rank, node, step, every, seed"),
        ("kill@step", "step needs a value, as in kill@step=50,rank=1"),
        ("kill@step=5,step=6", "step is given twice"),
        ("kill@step=5,every=6", "not both"),
        ("kill@step=5,rank=-1", "a rank is a number, or any"),
        ("kill@step=5,value=1", "kill takes no value"),
        ("exit@step=5,value=300", "from 0 to 255"),
        ("exit@step=5,value=nan", "a number, 0 or more"),
        ("kill-coordinator@step=5,rank=1", "one coordinator"),
        (";".join(["kill@step=5"] * (MAX_SCHEDULED + 1)), "is the most"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        schedule(text, FLAG)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_is_more_than_a_usage_error(text: str) -> None:
    try:
        schedule(text, FLAG)
    except UsageError:
        pass


@given(st.sampled_from(FAULT_NAMES), st.text("kil@step=5,;rankyvue. 0", max_size=40))
def test_nor_is_any_that_looks_like_one(name: str, rest: str) -> None:
    try:
        schedule(f"{name}@{rest}", FLAG)
    except UsageError:
        pass


def test_run_reads_the_flag_and_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setenv("HOLDFAST_CHAOS", "hang@every=100,seed=7")
    by_variable = flags.parse_run([str(script)])
    assert by_variable.terms.chaos == (Injection(kind="hang", every=100, seed=7),)
    by_flag = flags.parse_run(["--chaos", "kill@step=5", str(script)])
    assert by_flag.terms.chaos == (Injection(kind="kill", at_step=5),)
    monkeypatch.setenv("HOLDFAST_CHAOS", "nonsense")
    with pytest.raises(UsageError, match="HOLDFAST_CHAOS"):
        flags.parse_run([str(script)])


def run_command(
    capsys: pytest.CaptureFixture[str], *words: str, home: Path, patch: pytest.MonkeyPatch
) -> tuple[int, str]:
    patch.setenv("HOLDFAST_HOME", str(home))
    code = main(["chaos", *words])
    return code, capsys.readouterr().err


def test_of_a_job_that_is_not_there_one_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(*words: str) -> tuple[int, str]:
        return run_command(capsys, *words, home=tmp_path, patch=monkeypatch)

    code, text = say("nobody", "kill")
    assert code == 1
    assert "no job nobody" in text
    code, text = say("nobody", "kil")
    assert code == 2
    assert text == "holdfast chaos: job nobody: no fault is called kil; did you mean kill?\n"
    code, text = say("nobody")
    assert code == 2
    assert "FAULT" in text


def test_the_help_lists_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--help"])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in FAULT_NAMES)
