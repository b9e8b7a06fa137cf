"""Ranks that end before others, and what the others fail of."""

from __future__ import annotations

import pytest
from driver import WAKE, Driver, raised

from holdfast.core import report
from holdfast.messages.actions import StopWorkers
from holdfast.messages.events import NodeWarm
from holdfast.messages.evidence import Collective, RankCollectives
from holdfast.messages.records import Incident, Raised
from holdfast.messages.units import NodeId, Rank


def training(step: int = 50) -> Driver:
    return Driver(min_nodes=2, max_nodes=2).running("a", "b", step=step)


def last(job: Driver) -> Incident:
    return job.job.incidents[-1]


def test_a_rank_that_ended_early_is_named_for_what_the_others_fail_of() -> None:
    job = training()
    job.after(1).exit(1, 50, code=0)
    job.after(1).exit(0, 51, code=1, raised=WAKE)
    incident = last(job)
    assert (incident.kind, incident.rank, incident.node) == ("exit", 1, "a")
    assert incident.step == 50
    assert incident.detail.startswith(
        "rank 1 ended with exit code 0 at step 50 while others still trained;"
        " rank 0 failed in a collective that needed it"
    )
    assert incident.also == ["rank 0 RuntimeError at train.py:3"]
    line = report.incident_line(job.job, incident)
    assert line.startswith("rank 1 ended with exit code 0 while others still trained at step 50")


# ---- a collective that did not match -----------------------------------------------------------


def call(size: int, number: int = 46) -> Collective:
    sizes = f"Float[{size}]"
    return Collective(
        group="0", number=number, op="gloo:all_reduce", state="scheduled", sizes=sizes
    )


ABORTED = "what(): op.preamble.length <= op.nbytes. Is there a distributed collective mismatch?"


def stopped_after_abort(job: Driver, *sizes: tuple[int, int]) -> list[StopWorkers]:
    """Rank 1 is aborted by its backend; the others tell what they were in."""
    actions = job.after(1).exit(1, 50, signal=6, log_tail=ABORTED)
    for node in ("a", "b"):
        ranks = [r for r, state in job.job.ranks.items() if state.node == node]
        line = "train.py:17 (step)"
        last = [
            RankCollectives(rank=Rank(r), last=(call(s),), place=line)
            for r, s in sizes
            if r in ranks
        ]
        job.ready(node, last=tuple(last))
    return [action for action in actions if isinstance(action, StopWorkers)]


def test_after_an_abort_the_others_tell_what_they_were_in_and_the_odd_one_is_named() -> None:
    job = training()
    stops = stopped_after_abort(job, (0, 124), (2, 125), (3, 124))
    assert all(stop.look for stop in stops)
    incident = last(job)
    assert (incident.kind, incident.rank, incident.node) == ("hang", 2, "b")
    assert incident.detail == (
        "collective #46 of group 0 does not match: rank 2 in all_reduce of Float[125]; ranks 0, 3 in"
        " all_reduce of Float[124]; they will never meet; rank 2 was in train.py:17 (step);"
        " rank 1 was killed by SIGABRT"
    )
    assert incident.also == ["rank 1 killed by SIGABRT"]


def test_the_one_that_was_aborted_did_it_if_all_others_agree() -> None:
    job = training()
    stopped_after_abort(job, (0, 124), (2, 124), (3, 124))
    assert (last(job).kind, last(job).rank) == ("hang", 1)


def test_without_a_majority_no_rank_is_named() -> None:
    job = training()
    stopped_after_abort(job, (0, 124), (2, 125))
    assert (last(job).kind, last(job).rank, last(job).node) == ("hang", None, "")
    assert "does not match" in last(job).detail


def test_a_rank_that_was_killed_is_the_cause_and_nobody_looks_further() -> None:
    job = training()
    actions = job.after(1).exit(1, 50, signal=9)
    assert not any(action.look for action in actions if isinstance(action, StopWorkers))
    job.all_ready()
    assert (last(job).kind, last(job).rank) == ("signal", 1)


# ---- what others fail of -----------------------------------------------------------------------


def test_all_who_fail_of_it_are_listed_once_and_the_blame_stays() -> None:
    job = training()
    job.after(1).exit(1, 50, code=0)
    job.after(1).exit(2, 51, code=1, raised=WAKE)
    job.exit(0, 51, code=1, raised=WAKE, at=job.at - 0.5)  # Heard of later, and died first.
    incident = last(job)
    assert (incident.kind, incident.rank) == ("exit", 1)
    assert sorted(incident.also) == [
        "rank 0 RuntimeError at train.py:3",
        "rank 2 RuntimeError at train.py:3",
    ]


def test_a_death_that_explains_the_failure_is_named_although_a_rank_had_ended() -> None:
    job = training()
    job.after(1).exit(1, 50, code=0)
    job.after(1).exit(0, 51, code=1, raised=WAKE)
    job.after(0.1).exit(2, 51, signal=9)
    incident = last(job)
    assert (incident.kind, incident.rank) == ("signal", 2)
    assert incident.also == ["rank 0 RuntimeError at train.py:3"]


def test_a_lost_node_is_named_although_a_rank_had_ended() -> None:
    job = training()
    job.after(1).exit(1, 50, code=0)
    job.after(0.1).exit(0, 51, code=1, raised=WAKE)
    job.left("b")
    assert (last(job).kind, last(job).node, last(job).rank) == ("node", "b", None)


@pytest.mark.parametrize("error", [raised(), raised("ValueError", "bad batch")])
def test_a_failure_of_a_ranks_own_is_not_blamed_on_one_that_ended(error: Raised) -> None:
    job = training()
    job.after(1).exit(1, 50, code=0)
    job.after(1).exit(0, 51, code=1, raised=error)
    assert (last(job).kind, last(job).rank) == ("exception", 0)


def test_without_a_rank_that_ended_the_one_that_failed_is_named() -> None:
    job = training()
    job.after(1).exit(0, 50, code=1, raised=WAKE)
    assert (last(job).kind, last(job).rank) == ("exception", 0)


def test_the_same_early_end_three_times_ends_the_job_and_says_why() -> None:
    job = training()
    for _ in range(3):
        job.after(1).exit(1, 50, code=0)
        job.after(1).exit(0, 51, code=1, raised=WAKE)
        job.all_ready()
        if job.job.result is None:
            job.start_all()
            job.after(1).step_all(50, steps=10)
    assert job.job.result is not None
    assert job.job.result.code == 93
    assert job.job.result.reason == (
        "rank 1: exit code 0 while others still trained at step 50, 3 times in a row"
    )


def test_an_incident_says_that_ranks_which_had_finished_began_again() -> None:
    job = training()
    job.after(1).exit(1, 50, code=0)
    job.after(1).exit(0, 51, signal=9)
    job.all_ready()
    assert last(job).action == "gave the ranks to standbys; 1 that had finished began again"


def test_once_a_rank_has_finished_nothing_begins_again_for_more_nodes() -> None:
    job = Driver(min_nodes=1, max_nodes=2).running("a", step=50)
    job.after(1).exit(1, 50, code=0)
    job.join("b")
    job.take(NodeWarm(at=job.at, node=NodeId("b")))
    job.after(1).step(0, 51)
    assert job.round == 1
    assert job.job.incidents == []
