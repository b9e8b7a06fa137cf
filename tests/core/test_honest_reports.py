"""What reports say while a job stands still, of pauses between steps, and of an exception's cost."""

from __future__ import annotations

import pytest
from driver import Driver, raised

from holdfast.core import report
from holdfast.messages.events import Progress
from holdfast.messages.records import RankProgress
from holdfast.messages.reports import GoodputReport, StatusReport
from holdfast.messages.units import NodeId, Rank, StepNumber, Time

STEP_S = 0.5


class Training(Driver):
    """Two ranks of one node that have taken 21 steps of half a second."""

    def __init__(self) -> None:
        super().__init__()
        self.running("a")
        self.first_at = self.after(1).at
        self.trained(1)
        self.after(20 * STEP_S).trained(21)

    def pages(self, step: int, **aside: float) -> tuple[RankProgress, ...]:
        """What the ranks' pages say when both have just finished that step."""
        return tuple(
            RankProgress(
                rank=rank,
                step=StepNumber(step),
                steps=step,
                first_at=self.first_at,
                last_at=self.at,
                step_s=STEP_S,
                trained_s=self.now - self.first_at - sum(aside.values()),
                **aside,
            )
            for rank in self.job.ranks
        )

    def trained(self, step: int, **aside: float) -> None:
        ranks = self.pages(step, **aside)
        self.take(Progress(at=self.at, node=NodeId("a"), round=self.round, ranks=ranks))

    def status(self) -> StatusReport:
        return report.status(self.job, self.at, alive=True)

    def goodput(self) -> GoodputReport:
        return report.goodput(self.job, self.at)


# ---- status ----


def test_the_speed_of_a_job_that_stands_falls_and_the_time_without_a_step_is_told() -> None:
    job = Training()
    assert (job.status().steps_per_s, job.status().no_step_s) == (2.0, None)
    job.after(42)
    assert job.status().no_step_s == 42
    assert job.status().steps_per_s == pytest.approx(1 / 42, abs=1e-3)
    job.after(42)
    assert job.status().steps_per_s == pytest.approx(1 / 84, abs=1e-3)
    job.trained(22, pause_s=83.5)
    assert job.status().no_step_s is None


def test_a_step_that_is_not_reported_yet_is_not_missed() -> None:
    job = Training()
    assert job.after(2.5).status().no_step_s is None
    assert job.status().steps_per_s == 2.0


def test_slow_steps_are_no_standstill() -> None:
    job = Training()
    job.after(60).trained(22)
    job.after(60).trained(23)
    status = job.after(50).status()
    assert (status.no_step_s, status.steps_per_s) == (None, pytest.approx(22 / 130, abs=1e-3))


def test_ranks_that_have_all_finished_are_not_missed() -> None:
    job = Training()
    job.exit(0, 21, code=0)
    job.exit(1, 21, code=0)
    assert job.after(10).status().no_step_s is None


# ---- goodput ----


def test_goodput_falls_while_nothing_moves_and_the_time_is_unknown() -> None:
    job = Training()
    last, before = job.at, job.goodput()
    for _ in range(10):
        now = job.after(10).goodput()
        assert now.goodput < before.goodput
        assert now.seconds["productive"] == before.seconds["productive"] == 20
        before = now
    assert before.seconds["unknown"] == 2 * 100
    assert before.unknown_since == last


def test_an_evaluation_between_two_steps_is_neither_training_nor_unknown_once_it_is_over() -> None:
    job = Training()
    job.after(100).trained(22, pause_s=99.5)
    seconds = job.goodput().seconds
    assert (seconds["productive"], seconds["other"], seconds["unknown"]) == (21, 199, 0)
    assert job.goodput().unknown_since is None


def test_an_evaluation_that_a_fault_ends_is_not_thrown_away_training() -> None:
    job = Training()
    pages = job.pages(21)
    job.after(100).exit(0, code=None, signal=9)
    job.ready("a", pages)
    seconds = job.goodput().seconds
    assert (seconds["redo"], seconds["other"]) == (2 * STEP_S, 2 * 99.5)


def test_what_follows_the_last_step_is_its_finish() -> None:
    job = Training()
    job.after(30).exit(0, code=0)
    job.after(10).exit(1, code=0)
    job.left("a")
    seconds = job.goodput().seconds
    assert (seconds["productive"], seconds["finish"], seconds["idle"]) == (20, 30 + 40, 10)


def test_a_job_that_a_script_ends_well_before_all_ranks_have_finished_is_stopped() -> None:
    job = Training()
    job.after(30).exit(0, code=0)
    job.leaving("a", code=0)
    job.after(5).left("a")
    seconds = job.goodput().seconds
    assert (seconds["productive"], seconds["redo"], seconds["stop"]) == (20, STEP_S, 10)
    assert (seconds["finish"], seconds["other"], seconds["unknown"]) == (30, 29.5, 0)


# ---- an exception ----


def test_an_incident_begins_when_the_script_raised_and_its_teardown_is_a_phase() -> None:
    job = Training()
    raised_at = job.after(0.25).at
    job.after(5).exit(0, 21, 21, code=1, raised=raised(), raised_at=raised_at)
    job.after(0.5).all_ready()
    job.start_all()
    job.after(1)
    for rank in (0, 1):
        job.step(rank, 22, 1)
    (incident,) = report.incidents(job.job)
    assert incident.at == raised_at
    assert incident.lost_s == pytest.approx(6.5)
    assert incident.phases == pytest.approx(
        {"teardown": 5, "detect": 0, "stop": 0.5, "rendezvous": 0, "start": 0, "first_step": 1}
    )
    assert "back in 6.50 s (teardown 5.00, detect 0.00, stop 0.50" in incident.line


def test_ranks_that_wait_for_a_teardown_do_not_train() -> None:
    job = Training()
    pages = job.pages(21)
    raised_at = job.after(0.25).at
    job.after(5).exit(0, code=1, raised=raised(), raised_at=raised_at)
    job.ready("a", (RankProgress(rank=Rank(0)), pages[1]))
    seconds = job.goodput().seconds
    assert (seconds["detect"], seconds["redo"]) == (2 * 5, 2 * 0.25)


def test_a_raise_that_a_clock_puts_after_the_exit_costs_nothing_extra() -> None:
    job = Training()
    job.exit(0, 21, 21, code=1, raised=raised(), raised_at=Time(job.now + 7))
    (incident,) = report.incidents(job.job)
    assert incident.at == job.at
    assert sum(incident.phases.values()) == 0


def test_the_rank_that_raised_first_is_blamed_although_its_process_ended_last() -> None:
    job = Training()
    first_at = job.after(1).at
    job.after(1).exit(1, 21, 21, code=1, raised=raised("KeyError"), raised_at=job.at)
    job.after(3).exit(0, 21, 21, code=1, raised=raised(), raised_at=first_at)
    (incident,) = report.incidents(job.job)
    assert (incident.rank, incident.at) == (0, first_at)
