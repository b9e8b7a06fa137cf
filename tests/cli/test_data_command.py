"""`holdfast data` over the journal of a job that used data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.cli.main import main
from holdfast.coordinator.journal import Entry, Journal
from holdfast.data.order import Order
from holdfast.jobhome import JobFile, create
from holdfast.messages.data import DataSpec, ShardFailure, Span, Used, UsedBy
from holdfast.messages.events import (
    AnyEvent,
    Asked,
    JobOpened,
    NodeJoined,
    ShardsReported,
    WorkerStarted,
)
from holdfast.messages.records import NodeSpec, Terms
from holdfast.messages.reports import DataAccount
from holdfast.messages.requests import OpenData
from holdfast.messages.units import NodeId, Rank, RoundNumber, StepNumber, Time

NODE = NodeId("n")
ROUND = RoundNumber(1)
LOCKSTEP = DataSpec(name="train", sharing="lockstep", size=100, order="records", seed=7)
LEASES = DataSpec(name="pages", sharing="leases", size=30, shard=10, skip=True, failures=1)
AT = Time(1010.0)

Written = Callable[..., None]


def started() -> Iterator[AnyEvent]:
    yield JobOpened(at=Time(1000.0), job="j", terms=Terms())
    spec = NodeSpec(host="h", address="a", slots=1, pid=1)
    yield NodeJoined(at=Time(1001.0), node=NODE, spec=spec, store_port=1)
    yield WorkerStarted(at=Time(1002.0), node=NODE, round=ROUND, rank=Rank(0), pid=9, warm=True)


def opened(spec: DataSpec, number: int) -> Asked:
    request = OpenData(spec=spec, resumed="fresh")
    asked = {"rank": Rank(0), "channel": 0, "number": number, "request": request}
    return Asked(at=Time(1003.0), node=NODE, round=ROUND, **asked)


def reported(dataset: str, **what: Any) -> ShardsReported:
    return ShardsReported(at=AT, node=NODE, round=ROUND, dataset=dataset, **what)


def used(dataset: str, *spans: tuple[int, int], epoch: int = 0) -> ShardsReported:
    """Positions of an epoch, all handed out before the first step."""
    step = StepNumber(0)
    told = [Used(Span(epoch, *span), step, step, span[1] - span[0]) for span in spans]
    return reported(dataset, used=tuple(UsedBy(Rank(0), one) for one in told))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Write the journal of a job: its start, and then these events."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    home = create("j", "train.py")
    home.write_job_file(JobFile(job="j", host="127.0.0.1", port=1, token="t", pid=1))

    def write(*events: AnyEvent) -> None:
        journal = Journal(home.journal)
        entries = [Entry(event.at, event) for event in (*started(), *events)]
        assert journal.append(entries) is None
        journal.close()

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Run `holdfast data`; its exit code, and the lines it printed."""

    def command(*arguments: str) -> tuple[int, list[str]]:
        code = main(["data", *arguments])
        printed = capsys.readouterr()
        return code, (printed.out + printed.err).splitlines()

    return command


Run = Callable[..., tuple[int, list[str]]]


def test_what_was_used_once_so_far_is_exact(written: Written, run: Run) -> None:
    written(opened(LOCKSTEP, 1), used("train", (0, 40)))
    code, lines = run("audit", "j")
    assert code == 0
    assert lines[:2] == [
        "data set train (training, shared in lockstep): exact so far",
        "  epoch 0: 40 once, 60 to come",
    ]


def test_shards_that_were_left_out_make_the_audit_fail_and_are_in_the_status(
    written: Written, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ShardFailure(Rank(0), Span(0, 10, 20), "OSError: truncated")
    written(
        opened(LEASES, 1),
        reported("pages", want=1),
        used("pages", (0, 10)),
        reported("pages", want=1),
        reported("pages", failed=(bad,), want=1),
        used("pages", (20, 30)),
    )
    code, lines = run("audit")
    assert code == 1
    assert lines[0].endswith("not exact: 10 left out")
    assert "  left out in round 1: positions 10 to 19 of epoch 0: OSError: truncated" in lines
    assert main(["status"]) == 0
    told = "left out: data set pages: positions 10 to 19 of epoch 0: OSError: truncated"
    assert told in capsys.readouterr().out


def test_as_json_the_accounts_are_printed_and_nothing_else(written: Written, run: Run) -> None:
    written(opened(LOCKSTEP, 1), opened(LEASES, 2), used("train", (0, 40)))
    for command in ("ls", "audit"):
        code, lines = run(command, "j", "--json")
        printed = json.loads("\n".join(lines))
        accounts = msgspec.convert(printed, list[DataAccount])
        assert code == 0
        assert msgspec.to_builtins(accounts) == printed
        assert [one.dataset for one in accounts] == ["train", "pages"]
        assert (accounts[0].order, accounts[0].seed) == ("records", 7)


def test_data_sets_are_listed(written: Written, run: Run) -> None:
    written(opened(LOCKSTEP, 1), opened(LEASES, 2), used("train", (0, 40)))
    code, (title, columns, train, pages) = run("ls")
    assert (code, title) == (0, "job j: 2 data sets")
    assert train.split("\t") == [
        *("train", "training", "lockstep", "100", "1 of 1", "40", "60", "exact so far")
    ]
    assert pages.split("\t")[0] == "pages"
    assert len(columns.split("\t")) == len(train.split("\t"))


def test_one_data_set_can_be_asked_for_and_an_unknown_one_is_an_error(
    written: Written, run: Run
) -> None:
    written(opened(LOCKSTEP, 1), opened(LEASES, 2))
    code, lines = run("audit", "j", "--set", "pages")
    assert (code, [text for text in lines if text.startswith("data set")]) == (0, lines[:1])
    code, lines = run("audit", "j", "--set", "other")
    assert code == 2
    assert lines == ["holdfast data: job j has no data set 'other'; it has: train, pages"]


def test_records_that_were_never_used_are_named(written: Written, run: Run) -> None:
    two_epochs = replace(LOCKSTEP, epochs=2)
    written(
        opened(two_epochs, 1),
        used("train", (0, 38), (40, 100)),
        used("train", (0, 10), epoch=1),
    )
    code, lines = run("audit", "--records")
    records = ", ".join(map(str, Order(100, "records", 7, 0).records(range(38, 40))))
    assert code == 1
    assert lines[0].endswith("not exact: 2 never used")
    assert f"  never used: positions 38 to 39 of epoch 0: records {records}" in lines


def test_a_job_without_data_sets_says_so(written: Written, run: Run) -> None:
    written()
    told = "job j: its script has opened no data set of holdfast.data"
    assert run("ls") == (0, [told])
    assert run("audit") == (0, [told])


@pytest.mark.parametrize("arguments", [[], ["prove"], ["audit", "--sets"]], ids=" ".join)
def test_wrong_usage_ends_with_2(arguments: list[str], run: Run) -> None:
    assert run(*arguments)[0] == 2


def test_the_help_teaches(run: Run) -> None:
    code, lines = run("--help")
    assert code == 0
    assert "  holdfast data audit llm --set train --records" in lines
