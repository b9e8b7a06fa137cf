"""What `holdfast run` says of a job when it is over."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from reported import an_incident, of_two_ranks

from holdfast.messages.reports import GoodputReport
from holdfast.messages.units import StepNumber
from holdfast.view.summary import summary

GOODPUT = GoodputReport(
    job="j", wall_s=10.0, ranks=2, seconds={"productive": 19.0, "start": 1.0}, goodput=0.95
)


@pytest.mark.parametrize(
    ("code", "headline"),
    [
        (None, "job j: not ended properly"),
        (0, "job j finished"),
        (1, "job j ended with exit code 1: why"),
        (75, "job j ended with exit code 75 (try again): why"),
        (93, "job j ended with exit code 93 (do not requeue: it would fail again): why"),
    ],
)
def test_the_first_line_says_how_it_ended(code: int | None, headline: str) -> None:
    status = replace(of_two_ranks(), exit_code=code, reason="why")
    assert summary(status, GOODPUT, []) == [headline]


def test_a_job_that_trained_has_its_steps_and_goodput_told() -> None:
    status = replace(of_two_ranks(), exit_code=0, step=StepNumber(20))
    assert summary(status, GOODPUT, [])[1:] == [
        "20 steps in 10.0 s on 2 ranks, goodput 95.0% (productive 95.0%, start 5.0%)"
    ]


def test_of_many_incidents_the_last_ten_are_told() -> None:
    incidents = [an_incident(id=number) for number in range(1, 13)]
    told = summary(of_two_ranks(), GOODPUT, incidents)[1:]
    assert told[0] == "12 incidents, the last 10 of them (`holdfast incidents` has all):"
    assert [line.partition(":")[0] for line in told[1:]] == [f"incident {n}" for n in range(3, 13)]


def test_nodes_that_are_to_blame_are_named_however_many_incidents_there_were() -> None:
    status = replace(of_two_ranks(), suspects={"n1": "7 crashes"}, excluded={"bad": "gpu-ecc"})
    incidents = [an_incident(id=number) for number in range(1, 13)]
    assert summary(status, GOODPUT, incidents)[1:3] == [
        "suspect: node n1: 7 crashes",
        "excluded: host bad: gpu-ecc",
    ]
