"""A job that its platform starts again is the same job: one journal, one ledger, all incidents."""

from __future__ import annotations

from driver import Driver

from holdfast.core import report
from holdfast.core.ledger.books import Ledger
from holdfast.messages.events import JobRequeued, JobStopAsked
from holdfast.messages.units import Time


def preempted() -> Driver:
    """A job that trained on two nodes, and was told to stop at step 7."""
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=7)
    driver.leaving("a")
    driver.after(2).left("a")
    driver.left("b")
    assert driver.job.result is not None
    assert driver.job.result.code == 75
    return driver


def requeued(driver: Driver, after_s: float) -> Driver:
    since = driver.at
    driver.after(after_s).take(JobRequeued(at=driver.at, since=since))
    return driver


def test_it_goes_on_in_a_new_round_when_nodes_have_come() -> None:
    driver = requeued(preempted(), 300)
    assert driver.job.result is None
    driver.after(5).join("c", host="hc")
    driver.join("d", host="hd")
    assert driver.round == 2
    driver.after(1).start_all()
    driver.after(1).step_all(8, steps=1)
    assert driver.job.highest == 8


def test_the_time_between_is_booked_as_waiting_and_the_causes_add_up() -> None:
    driver = preempted()
    before = dict(driver.job.of(Ledger).seconds)
    requeued(driver, 300)
    driver.after(5).join("c", host="hc")
    driver.join("d", host="hd")
    waited_s = driver.job.of(Ledger).seconds["wait"] - before.get("wait", 0.0)
    assert waited_s == 4 * 305
    books = report.goodput(driver.job, driver.at)
    assert abs(sum(books.seconds.values()) - books.wall_s * books.ranks) < 1e-3


def test_the_incident_of_it_begins_with_the_end_and_closes_with_the_first_step() -> None:
    driver = requeued(preempted(), 300)
    driver.join("c", host="hc")
    driver.join("d", host="hd")
    driver.after(1).start_all()
    driver.after(1).step_all(8, steps=1)
    newest = report.incidents(driver.job)[-1]
    assert newest.kind == "requeue"
    assert "requeued after it ended: " in newest.signature
    assert newest.lost_s == 302
    assert driver.job.incidents[-1].closed_at is not None


def test_a_job_that_was_cut_short_goes_on_too_and_its_old_nodes_are_gone() -> None:
    driver = Driver(min_nodes=2, max_nodes=2).running("a", "b", step=7)
    since = driver.at
    driver.after(100).take(JobRequeued(at=driver.at, since=since))
    assert driver.job.membership.count() == 0
    assert driver.job.result is None
    driver.join("c", host="hc")
    driver.join("d", host="hd")
    assert driver.round == 2
    assert report.incidents(driver.job)[-1].signature == "requeued after it was cut short"


def test_requeues_are_counted_and_may_follow_one_another() -> None:
    driver = requeued(requeued(preempted(), 10), 10)
    assert report.status(driver.job, driver.at, alive=True).requeues == 2
    assert driver.job.result is None


def test_a_job_is_told_to_stop_from_outside_with_that_code() -> None:
    driver = Driver(min_nodes=1, max_nodes=1).running("a", step=3)
    driver.take(JobStopAsked(at=driver.at, reason="suspended", code=75, by="kubernetes"))
    driver.left("a")
    assert driver.job.result is not None
    assert (driver.job.result.code, driver.job.result.reason) == (75, "suspended")


def test_a_job_that_has_ended_is_not_ended_again() -> None:
    driver = preempted()
    driver.take(JobStopAsked(at=Time(driver.now), reason="again", code=1))
    assert driver.job.result is not None
    assert driver.job.result.code == 75
