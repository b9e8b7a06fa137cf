"""What a script says of itself, and what the agent reads of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from holdfast.shm.rank_page import RankPage, create_page
from holdfast.shm.vital_signs import BETWEEN, DATA, MOST_SECTIONS
from holdfast.worker.channel import Channel
from holdfast.worker.runtime import Runtime


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


def test_the_time_in_a_section_is_not_the_time_of_a_phase(worker: Worker) -> None:
    vitals = worker.page.vitals
    worker.runtime.heartbeat()
    with worker.runtime.section("eval"):
        time.sleep(0.03)
    worker.runtime.heartbeat()
    times = vitals.times()
    assert times["eval"].longest_s >= 0.03
    assert times["between"].longest_s < 0.03


def test_a_section_of_another_thread_marks_nothing_and_costs_no_training(worker: Worker) -> None:
    inside, leave = threading.Event(), threading.Event()

    def upload() -> None:
        with worker.runtime.section("checkpoint"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=upload)
    marks = worker.page.vitals.marks
    thread.start()
    assert inside.wait(10)
    assert worker.vitals == [("checkpoint", False)]
    leave.set()
    thread.join()
    assert worker.vitals == []
    assert worker.page.vitals.marks == marks
    assert (worker.page.read().saves, worker.page.read().checkpoint_s) == (1, 0.0)


def test_threads_that_enter_sections_at_once_each_have_a_place(worker: Worker) -> None:
    start = threading.Barrier(8)

    def go_in_and_out() -> None:
        start.wait(10)
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
