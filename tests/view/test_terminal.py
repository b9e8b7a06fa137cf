"""What people read of a job's reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from reported import an_incident, of_two_ranks

from holdfast.messages.chaos import FaultsReport, InjectionReport
from holdfast.messages.reports import (
    CheckpointerReport,
    GoodputReport,
)
from holdfast.view.terminal import print_goodput, print_incidents, print_status

Shown = Callable[..., list[str]]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """The lines for that job, some of whose values, or of whose ranks' values, are replaced."""

    def show(ranks: list[dict[str, Any]] | None = None, **changes: Any) -> list[str]:
        status = of_two_ranks()
        (node,) = status.nodes
        changed = [
            replace(r, **more) for r, more in zip(node.ranks, ranks or [{}, {}], strict=True)
        ]
        print_status(replace(status, nodes=[replace(node, ranks=changed)], **changes))
        return capsys.readouterr().out.splitlines()

    return show


def test_nothing_is_said_about_what_is_not_known(shown: Shown) -> None:
    title, columns, *rows = shown()
    assert title.startswith("job j: running, round 1, 2 ranks, step 0")
    assert columns.split("\t")[-1] == "speed"
    assert [row.split("\t")[-1] for row in rows] == ["-", "-"]


def test_a_job_that_stands_is_shown_so(shown: Shown) -> None:
    title, *_ = shown(step=7, steps_per_s=0.024, no_step_s=42.3)
    assert title.endswith("step 7, 0.024 steps/s, no step for 42 s")


def test_samples_a_second_are_shown_in_total_and_of_each_rank(shown: Shown) -> None:
    ranks = [{"samples_per_s": 64.0}, {"samples_per_s": None}]
    title, columns, *rows = shown(ranks, steps_per_s=2.0, samples_per_s=128.04)
    assert title.endswith(", 2.0 steps/s, 128.0 samples/s")
    at = columns.split("\t").index("samples/s")
    assert [row.split("\t")[at] for row in rows] == ["64.0", "-"]


def test_slow_ranks_are_marked(shown: Shown) -> None:
    ranks = [{"score": 0.994}, {"score": 0.512, "own_score": 0.6, "straggler": "relative"}]
    _, _, *rows = shown(ranks)
    assert [row.split("\t")[-1] for row in rows] == ["0.99", "0.51, slow"]


def test_a_rank_that_nobody_can_be_compared_with_is_shown_beside_its_own_best(
    shown: Shown,
) -> None:
    _, _, row, _ = shown([{"own_score": 0.7}, {}])
    assert row.split("\t")[-1] == "0.70 of its best"


def test_a_rank_that_is_slower_than_it_was_is_shown_so(shown: Shown) -> None:
    slower = {"score": 1.0, "own_score": 0.6, "straggler": "individual"}
    _, _, row, _ = shown([slower, {}])
    assert row.split("\t")[-1] == "0.60 of its best, slow"


def test_a_node_without_ranks_has_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    status = of_two_ranks()
    print_status(replace(status, nodes=[replace(status.nodes[0], state="waiting", ranks=[])]))
    assert capsys.readouterr().out.splitlines()[-1] == "h:1\twaiting\t-\t-\t-\t-\t-"


def test_checkpoints_are_told_in_a_line(shown: Shown) -> None:
    none = {"in_memory": None, "on_storage": None, "writing": None, "failures": 0}
    some = {"in_memory": 40, "on_storage": 30, "writing": 40, "failures": 2}
    *_, first, second = shown(
        checkpoints=[
            CheckpointerReport(checkpointer="a", **none),
            CheckpointerReport(checkpointer="b", **some),
        ]
    )
    assert first == "checkpoints of a: none yet"
    assert second == (
        "checkpoints of b: step 40 in memory, step 30 on storage, step 40 being written,"
        " 2 failed in a row"
    )


def test_excluded_hosts_are_told_with_the_reason(shown: Shown) -> None:
    *_, last = shown(excluded={"bad": "gpu-ecc: GPU 3 has uncorrectable errors"})
    assert last == "excluded: host bad: gpu-ecc: GPU 3 has uncorrectable errors"


def test_suspects_are_told_with_the_reason(shown: Shown) -> None:
    *_, last = shown(suspects={"n1": "7 of the last 7 crashes struck it"})
    assert last == "suspect: node n1: 7 of the last 7 crashes struck it"


def test_an_overloaded_node_is_told_with_what_keeps_its_cpus_busy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = of_two_ranks()
    (node,) = status.nodes
    print_status(replace(status, nodes=[replace(node, overload="run-queue delay 30 %")]))
    lines = capsys.readouterr().out.splitlines()
    assert f"overloaded: node {node.node}: run-queue delay 30 %" in lines


def test_faults_that_were_not_injected_are_told_with_the_reason(shown: Shown) -> None:
    fault = InjectionReport(
        injection=1, fault="kill", outcome="refused", line="kill on rank 1 now", why="it is gone"
    )
    lines = shown(faults=FaultsReport(pending=[], injected=0, refused=[fault]))
    assert "fault not injected: kill on rank 1 now: it is gone" in lines


def test_faults_to_come_refused_events_the_last_incident_and_the_end_are_told(
    shown: Shown,
) -> None:
    fault = InjectionReport(injection=1, fault="kill", outcome="armed", line="kill now")
    faults = FaultsReport(pending=[fault], injected=0, refused=[])
    lines = shown(
        faults=faults,
        refused={"Progress of an older round": 2},
        last_incident="rank 1 killed",
        exit_code=1,
        reason="too few nodes",
    )
    assert lines[-4:] == [
        "fault to come: kill now",
        "refused: 2 events: Progress of an older round",
        "last incident: rank 1 killed",
        "ended with 1: too few nodes",
    ]


def test_goodput_is_told_by_cause_the_largest_first(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"start": 1.0, "productive": 19.0, "idle": 0.0}
    print_goodput(GoodputReport(job="j", wall_s=10.0, ranks=2, seconds=seconds, goodput=0.95))
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "job j: goodput 95.0% of 10.0 s × 2 ranks"
    assert [row.split("\t")[:3] for row in rows] == [
        ["productive", "19.00", "95.0%"],
        ["start", "1.00", "5.0%"],
    ]


def test_samples_are_told_beside_the_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    report = GoodputReport(
        job="j", wall_s=10.0, ranks=2, seconds={"productive": 19.0}, goodput=0.95, samples=960
    )
    print_goodput(report)
    print_goodput(replace(report, redone_samples=48, samples_per_s=101.05))
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job")]
    assert titles[0].endswith("2 ranks; 960 samples")
    assert titles[1].endswith("2 ranks; 960 samples, 48 redone, 101.0/s while productive")


def test_time_without_a_cause_is_told_with_its_begin(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"productive": 19.0, "unknown": 1.0}
    since = time.mktime((2026, 3, 1, 14, 3, 12, 0, 0, -1))
    print_goodput(
        GoodputReport(
            job="j", wall_s=10.0, ranks=2, seconds=seconds, goodput=0.95, unknown_since=since
        )
    )
    title = capsys.readouterr().out.splitlines()[0]
    assert title == "job j: goodput 95.0% of 10.0 s × 2 ranks, unknown since 14:03:12"


def test_an_incident_is_a_line_and_the_end_of_what_else_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    detail = "\n".join(f"line {n}" for n in range(20)) + "\n"
    print_incidents("j", [an_incident(also=["rank 1 lost its peer"], detail=detail)])
    head, also, *tail = capsys.readouterr().out.splitlines()
    assert head == "1. rank 0 raised ValueError: x"
    assert also == "     rank 1 lost its peer"
    assert tail == [f"     line {n}" for n in range(8, 20)]


def test_a_job_without_incidents_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_incidents("j", [])
    assert capsys.readouterr().out == "job j: no incidents\n"
