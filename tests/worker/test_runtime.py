"""What a script says of itself, and what the agent reads of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from yardstick import cost_in_calls

from holdfast.shm.rank_page import RankPage, create_page
from holdfast.shm.vital_signs import BETWEEN, DATA, MOST_SECTIONS
from holdfast.worker.channel import Channel
from holdfast.worker.data_link import AgentDataLink
from holdfast.worker.runtime import EVALUATION, Runtime


class Worker:
    def __init__(self) -> None:
        self.near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = create_page()
        self.page = RankPage(fd)
        self.runtime = Runtime(Channel(far.detach()), self.page)
        os.close(fd)

    @property
    def vitals(self) -> list[tuple[str, bool]]:
        return [(s.name, s.own) for s in self.page.vitals.read().sections]

    def close(self) -> None:
        self.runtime.channel.close()
        self.near.close()
        self.page.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_a_step_that_only_the_script_knows_of_is_a_sign_of_life(worker: Worker) -> None:
    """Without that, a script that our hooks do not see would look as if it stood still."""
    for step in range(1, 4):
        before = time.monotonic()
        worker.runtime.stepped(step)
        signs = worker.page.vitals.read()
        assert signs.mark_at >= before
        assert (signs.steps, signs.phase) == (step, "between")


def test_a_step_that_our_hooks_saw_is_not_marked_again(worker: Worker) -> None:
    vitals = worker.page.vitals
    for step in range(1, 4):
        vitals.mark(DATA, time.monotonic())
        vitals.mark(BETWEEN, time.monotonic())
        marks = vitals.marks
        worker.runtime.stepped(step)
        assert vitals.marks == marks


def test_a_heartbeat_is_a_mark(worker: Worker) -> None:
    marks = worker.page.vitals.marks
    worker.runtime.heartbeat()
    assert worker.page.vitals.marks == marks + 1


def test_sections_nest_and_an_error_closes_all_of_them(worker: Worker) -> None:
    def fail() -> None:
        with worker.runtime.section("outer"), worker.runtime.section("inner"):
            assert worker.vitals == [("outer", True), ("inner", True)]
            raise KeyError("no such batch")

    with pytest.raises(KeyError, match="no such batch"):
        fail()
    assert worker.vitals == []
    assert {"outer", "inner"} <= worker.page.vitals.times().keys()


def test_the_time_in_a_section_is_not_the_time_of_a_phase(worker: Worker, clock: Clock) -> None:
    vitals = worker.page.vitals
    worker.runtime.heartbeat()
    clock.after(2.0)
    with worker.runtime.section("eval"):
        clock.after(30.0)
    clock.after(1.0)
    worker.runtime.heartbeat()
    times = vitals.times()
    assert times["eval"].longest_s == 30.0
    assert times["between"].longest_s <= 3.0


def test_a_section_of_another_thread_marks_nothing_and_costs_no_training(worker: Worker) -> None:
    inside, leave = threading.Event(), threading.Event()

    def upload() -> None:
        with worker.runtime.section("checkpoint"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=upload)
    marks = worker.page.vitals.marks
    thread.start()
    assert inside.wait(60)
    assert worker.vitals == [("checkpoint", False)]
    leave.set()
    thread.join()
    assert worker.vitals == []
    assert worker.page.vitals.marks == marks
    assert (worker.page.read().saves, worker.page.read().checkpoint_s) == (1, 0.0)


def test_threads_that_enter_sections_at_once_each_have_a_place(worker: Worker) -> None:
    start = threading.Barrier(8)

    def go_in_and_out() -> None:
        start.wait(60)
        for _ in range(200):
            with worker.runtime.section("part"):
                pass

    threads = [threading.Thread(target=go_in_and_out) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worker.vitals == []
    assert list(worker.page.vitals.times()) == ["part"]


def test_one_section_too_many_is_not_watched_and_does_no_harm(worker: Worker) -> None:
    for number in range(MOST_SECTIONS + 3):
        with worker.runtime.section(f"section {number}"):
            pass
    assert len(worker.page.vitals.times()) == MOST_SECTIONS + 1, "and the phase between them"
    with worker.runtime.section("checkpoint"):
        assert worker.vitals == []
    assert worker.page.read().saves == 1


def test_a_pause_between_steps_is_on_the_page_without_what_was_saved_in_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(1, 8):
        now += 1.0
        worker.runtime.stepped(step)
    now += 20.0
    with worker.runtime.section("checkpoint"):
        now += 10.0
    worker.runtime.stepped(8)
    page = worker.page.read()
    assert (page.step_s, page.checkpoint_s, page.pause_s) == (1.0, 10.0, 19.0)


def test_an_ordinary_step_with_a_save_has_no_pause(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for step in range(1, 40):
        now += 1.0
        with worker.runtime.section("checkpoint"):
            now += 10.0
        worker.runtime.stepped(step)
    page = worker.page.read()
    assert (page.step_s, page.pause_s) == (1.0, 0.0)


# ---- samples, evaluations and the time of steps ----


class Clock:
    """A monotonic clock that goes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def train(worker: Worker, clock: Clock, steps: range, records: int = 4) -> None:
    for step in steps:
        worker.runtime.used(records)
        clock.after(1.0)
        worker.runtime.stepped(step)


def test_samples_are_on_the_page_once_their_step_is_finished(worker: Worker, clock: Clock) -> None:
    train(worker, clock, range(1, 4))
    worker.runtime.used(4)
    with worker.runtime.section("checkpoint"):  # It writes the page, in the middle of a step.
        pass
    assert worker.page.read().samples == 3 * 4
    worker.runtime.stepped(4)
    assert worker.page.read().samples == 4 * 4


def test_a_script_that_counts_no_records_has_none_on_its_page(worker: Worker) -> None:
    worker.runtime.stepped(1)
    assert worker.page.read().samples == 0


def test_an_evaluation_is_booked_and_its_records_are_not_trained_on(
    worker: Worker, clock: Clock
) -> None:
    train(worker, clock, range(1, 11))
    with worker.runtime.section(EVALUATION), worker.runtime.section(EVALUATION):
        worker.runtime.used(1000)
        clock.after(2.0)
    train(worker, clock, range(11, 21))
    page = worker.page.read()
    assert (page.samples, page.evaluation_s, page.pause_s) == (20 * 4, 2.0, 0.0)
    assert page.trained_s == 19.0


def test_an_evaluation_that_raises_is_over(worker: Worker) -> None:
    with pytest.raises(KeyError), worker.runtime.section(EVALUATION):
        raise KeyError
    worker.runtime.used(4)
    worker.runtime.stepped(1)
    assert worker.page.read().samples == 4


def test_an_evaluation_of_another_thread_does_not_stop_the_counting(worker: Worker) -> None:
    worker.runtime.stepped(1)
    inside, leave = threading.Event(), threading.Event()

    def evaluate() -> None:
        with worker.runtime.section(EVALUATION):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert inside.wait(60)
    worker.runtime.used(4)
    leave.set()
    thread.join()
    worker.runtime.stepped(2)
    page = worker.page.read()
    assert (page.samples, page.evaluation_s) == (4, 0.0)


def test_a_save_within_an_evaluation_is_booked_once(worker: Worker, clock: Clock) -> None:
    with worker.runtime.section(EVALUATION):
        clock.after(3.0)
        with worker.runtime.section("checkpoint"):
            clock.after(2.0)
    page = worker.page.read()
    assert (page.evaluation_s, page.checkpoint_s) == (3.0, 2.0)


def test_the_time_of_steps_has_neither_saves_nor_pauses_in_it(worker: Worker, clock: Clock) -> None:
    train(worker, clock, range(1, 11))
    with worker.runtime.section("checkpoint"):
        clock.after(5.0)
    assert worker.page.read().trained_s == 9.0
    clock.after(100.0)
    train(worker, clock, range(11, 12))
    page = worker.page.read()
    assert (page.trained_s, page.checkpoint_s, page.pause_s) == (10.0, 5.0, 100.0)


def test_a_script_that_goes_back_by_itself_goes_on_counting_its_steps(
    worker: Worker, clock: Clock
) -> None:
    """Otherwise nothing would be reported until it came to where it had been."""
    train(worker, clock, range(1, 101))
    train(worker, clock, range(51, 61))
    page = worker.page.read()
    assert (page.step, page.steps, page.trained_s) == (60, 110, 109.0)


def test_counting_a_batch_costs_a_few_function_calls(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    delivered = AgentDataLink(worker.runtime).delivered
    assert cost_in_calls(lambda: delivered(32)) < 25
