"""Steps count on from where the script resumed, as far as any rank knows."""

from __future__ import annotations

from driver import Driver, raised
from msgspec.structs import replace

from holdfast.messages.events import Progress
from holdfast.messages.records import Resumed
from holdfast.messages.units import NodeId


def training(step: int = 50) -> Driver:
    return Driver(min_nodes=2, max_nodes=2).running("a", "b", step=step)


def fail(job: Driver, rank: int, steps: int, known: bool) -> None:
    """Train that many steps, and fail."""
    for one in job.job.ranks:
        unsure(job, one, steps, known)
    job.after(1).exit(rank, 0, code=1, raised=raised())
    job.all_ready()
    job.after(1)
    if job.job.result is None:
        job.start_all()


def unsure(
    job: Driver, rank: int, steps: int, known: bool = False, resumed: Resumed = "unknown"
) -> None:
    progress = job.progress(rank, steps, steps)
    progress = replace(progress, resumed="known" if known else resumed)
    node = job.node_of(rank)
    job.take(Progress(at=job.at, node=node, round=job.round, ranks=(progress,)))


def steps(job: Driver) -> list[int]:
    return [rank.step for rank in job.job.ranks.values()]


def test_a_job_whose_steps_are_counted_by_each_process_is_not_given_up() -> None:
    job = training()
    for _ in range(10):
        fail(job, 1, steps=50, known=False)
    assert job.job.result is None


def test_a_job_that_begins_at_0_each_time_is_given_up_after_three_failures() -> None:
    job = training()
    for _ in range(3):
        fail(job, 1, steps=50, known=True)
    assert job.job.result is not None
    assert job.job.result.code == 93


def test_what_one_rank_knows_all_know() -> None:
    job = training()
    job.exit(1, 50, signal=9)
    job.all_ready()
    job.start_all()
    job.after(1)
    unsure(job, 2, 1)
    job.step(0, 41, steps=1)
    unsure(job, 3, 1)
    job.step(1, 41, steps=1)
    assert steps(job) == [41, 41, 41, 41]
    unsure(job, 3, 20)
    assert steps(job)[3] == 60
    assert job.job.highest == 60
    assert job.job.incidents[0].lost_steps == 10


def test_ranks_that_read_nothing_resume_where_the_one_that_read_does() -> None:
    """Rank 0 loads, and the others get the weights from it."""
    job = training()
    job.exit(1, 50, signal=9)
    job.all_ready()
    job.start_all()
    job.after(1)
    for rank in (1, 2, 3):
        unsure(job, rank, 1, resumed="none")
    assert job.job.resumed_at == 0
    job.step(0, 51, steps=1)
    assert steps(job) == [51, 51, 51, 51]
    assert job.job.resumed_at == 50


def test_ranks_that_read_nothing_do_not_know_what_another_read() -> None:
    job = training()
    for _ in range(10):
        job.exit(1, 0, signal=9)
        job.all_ready()
        job.start_all()
        job.after(1)
        for rank in (1, 2, 3):
            unsure(job, rank, 50, resumed="none")
        unsure(job, 0, 50)
        job.exit(1, 0, code=1, raised=raised())
        job.all_ready()
        job.start_all()
    assert job.job.result is None


def test_a_job_whose_ranks_read_nothing_begins_at_0_each_time() -> None:
    job = training()
    job.exit(1, 0, signal=9)
    job.all_ready()
    for _ in range(3):
        job.start_all()
        job.after(1)
        for rank in job.job.ranks:
            unsure(job, rank, 60, resumed="none")
        job.exit(1, 0, code=1, raised=raised())
        job.all_ready()
    assert job.job.result is not None
    assert job.job.result.code == 93


def test_an_unknown_start_is_no_loss_of_steps() -> None:
    job = training()
    job.exit(1, 50, signal=9)
    job.all_ready()
    job.start_all()
    job.after(1)
    for rank in job.job.ranks:
        unsure(job, rank, 1)
    assert job.job.resumed_at is None
    assert job.job.incidents[0].lost_steps == 0
    assert job.job.incidents[0].closed_at is not None


def test_a_failure_is_told_at_the_step_that_the_others_know() -> None:
    job = training()
    job.exit(1, 50, signal=9)
    job.all_ready()
    job.start_all()
    job.after(1).step(0, 41, steps=1)
    unsure(job, 3, 5)
    job.exit(3, 0, code=1, raised=raised())
    assert job.job.incidents[-1].step == 45
    assert job.job.incidents[-1].node == NodeId("b")


def test_a_round_without_a_step_can_be_compared() -> None:
    job = training()
    for _ in range(3):
        job.exit(1, 0, code=1, raised=raised())
        job.all_ready()
        job.after(1)
        if job.job.result is None:
            job.start_all()
    assert job.job.result is not None
    assert job.job.result.code == 93
