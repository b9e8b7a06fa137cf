"""The loss of a job: the newest that the lowest telling rank told in the newest round."""

from __future__ import annotations

import math

import msgspec
import pytest
from driver import Driver, encoded, replayed
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.core import report
from holdfast.core.view import JobLoss
from holdfast.messages.events import Progress
from holdfast.messages.losses import Loss, written
from holdfast.messages.records import Resumed
from holdfast.messages.reports import StatusReport
from holdfast.messages.units import StepNumber


def told(
    job: Driver,
    rank: int,
    step: int,
    loss: Loss | None,
    age: int = 0,
    steps: int | None = None,
    resumed: Resumed = "known",
) -> None:
    page = replace(job.progress(rank, step, steps), loss=loss, loss_age=age, resumed=resumed)
    node = job.node_of(rank)
    job.take(Progress(at=job.at, node=node, round=job.round, ranks=(page,)))


def restarted(job: Driver) -> None:
    """A rank is killed, and the next round begins."""
    job.exit(0, signal=9, code=None)
    job.all_ready()
    job.after(60).tick()
    job.start_all()


def status(job: Driver) -> StatusReport:
    return report.status(job.job, job.at, alive=True)


def test_a_job_whose_script_tells_no_loss_has_none() -> None:
    job = Driver().running("a", step=5)
    assert job.job.loss is None
    assert (status(job).loss, status(job).loss_step) == (None, None)


def test_a_loss_has_the_step_that_it_was_told_with() -> None:
    job = Driver().running("a")
    told(job, 0, 10, 2.5, age=3)
    assert job.job.loss == JobLoss(2.5, StepNumber(7))
    told(job, 0, 12, 2.25)
    assert (status(job).loss, status(job).loss_step) == (2.25, 12)


def test_the_loss_is_that_of_the_lowest_rank_that_tells_one() -> None:
    job = Driver(min_nodes=2, max_nodes=2).running("a", "b")
    told(job, 3, 10, 3.0)
    told(job, 2, 10, 2.0)
    told(job, 3, 11, 3.1)
    told(job, 0, 11, None)
    assert job.job.loss == JobLoss(2.0, StepNumber(10))


def test_a_round_that_goes_back_shows_no_loss_of_the_steps_it_takes_again() -> None:
    job = Driver().running("a")
    told(job, 0, 100, 0.5)
    told(job, 1, 100, 0.6)
    restarted(job)
    assert job.job.loss is None
    told(job, 1, 51, 0.9, steps=1)
    assert job.job.loss == JobLoss(0.9, StepNumber(51))
    told(job, 0, 52, 0.8, steps=2)
    assert job.job.loss == JobLoss(0.8, StepNumber(52))
    assert job.job.highest == 100


def test_the_step_of_a_loss_is_corrected_with_that_of_its_rank() -> None:
    """Rank 0 does not know where it resumed until rank 1 says so."""
    job = Driver().running("a")
    told(job, 0, 5, 1.5, age=2, steps=5, resumed="unknown")
    assert job.job.loss == JobLoss(1.5, StepNumber(3))
    told(job, 1, 105, None, steps=5)
    assert job.job.loss == JobLoss(1.5, StepNumber(103))


def test_a_loss_is_still_there_when_the_job_has_ended() -> None:
    job = Driver().running("a", slots=1)
    told(job, 0, 10, 0.25)
    job.exit(0, step=10, code=0)
    job.left("a")
    assert job.job.state.name == "ended"
    assert (status(job).loss, status(job).loss_step) == (0.25, 10)


@given(st.floats())
def test_every_loss_is_read_from_json_as_it_was_written(value: float) -> None:
    data = msgspec.json.encode(written(value))
    again = float(msgspec.json.decode(data, type=Loss))
    assert again == value or (math.isnan(again) and math.isnan(value))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_in_json_does_not_decode_as_one(bad: float) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Loss)


STEPS = st.tuples(st.integers(0, 3), st.integers(0, 20), st.none() | st.floats())
"""A rank, the steps that it takes, and the loss that it tells after them."""


@given(st.lists(STEPS, max_size=20), st.integers(0, 20))
def test_the_loss_is_the_lowest_ranks_newest_whatever_the_others_tell(
    reports: list[tuple[int, int, float | None]], revive_at: int
) -> None:
    job = Driver(min_nodes=2, max_nodes=2).running("a", "b")
    steps, newest = dict.fromkeys(range(4), 1), dict[int, JobLoss]()
    for rank, more, loss in reports:
        steps[rank] += more
        if loss is not None:
            newest[rank] = JobLoss(written(loss), StepNumber(steps[rank]))
        page = newest.get(rank, JobLoss("NaN", StepNumber(0)))
        loss_told = page.value if rank in newest else None
        told(job, rank, steps[rank], loss_told, steps[rank] - page.step if rank in newest else 0)
    assert job.job.loss == (newest[min(newest)] if newest else None)
    assert encoded(replayed(job.history, revive_at)) == encoded(job.job)
