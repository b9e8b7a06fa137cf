"""`holdfast run --requeued`: what a platform starts again is the same job, with one account of it."""

from __future__ import annotations

import os
import signal

import pytest

from .harness import Run, wait_for


def test_a_job_that_was_told_to_stop_goes_on_as_the_same_job(run: Run) -> None:
    run.train(nproc=2)
    first = run.until_stepping()
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 75
    run.train("--requeued", nproc=2)
    again = run.until_stepping(round=2)
    assert again.id == first.id
    run.end()
    assert run.code() == 0
    kinds = [incident["kind"] for incident in run.ask("incidents")]
    assert kinds[-1] == "requeue"
    assert run.ask("status")["requeues"] == 1
    books = run.ask("goodput")
    assert books["seconds"]["wait"] > 0, "the time between"
    assert sum(books["seconds"].values()) == pytest.approx(books["wall_s"] * 2, rel=0.01)


def test_a_job_whose_launcher_was_killed_goes_on_as_the_same_job(run: Run) -> None:
    run.train(nproc=1)
    first = run.until_stepping()
    os.kill(run.pid, signal.SIGKILL)
    run.code()
    wait_for(lambda: not run.alive(), "the end of all its processes")
    run.train("--requeued", nproc=1)
    assert run.until_stepping(round=2).id == first.id
    run.end()
    assert run.code() == 0


def test_a_job_that_has_finished_is_not_continued_but_begun_anew(run: Run) -> None:
    run.train(args=["5"], nproc=1)
    assert run.code() == 0
    first = run.peek()
    assert first is not None
    run.train("--requeued", args=["5"], nproc=1)
    assert run.code() == 0
    second = run.peek()
    assert second is not None
    assert second.id != first.id
