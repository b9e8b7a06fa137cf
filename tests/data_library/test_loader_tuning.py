"""`holdfast.data.tuning`: what a rank's loader does with what the coordinator says."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from yardstick import cost_in_calls

from holdfast.data import tuning as module
from holdfast.data.tuning import StepMeter, Tuning
from holdfast.errors import FencedError, RequestDenied
from holdfast.messages.data import Span
from holdfast.messages.local import DataUsed
from holdfast.messages.requests import (
    AnyAnswer,
    AwaitTuning,
    DataOpened,
    OpenData,
    ScriptRequest,
    SettleTuning,
    Truth,
    TuningNotice,
)
from holdfast.messages.tuning import LoaderConfig, MemoryRoom
from holdfast.messages.units import StepNumber

OWN = LoaderConfig(micro_batch=8, workers=2, prefetch=2)
OTHER = LoaderConfig(micro_batch=16)
ROOM = MemoryRoom(free_bytes=5, total_bytes=10)
PATIENCE_S = 60.0


class ScriptedLink:
    """A link whose other end is the test: it takes requests from a queue, and answers them."""

    rank, world_size, round, step = 0, 1, 1, 0

    def __init__(self) -> None:
        self.awaited: SimpleQueue[AwaitTuning] = SimpleQueue()
        self.notices: SimpleQueue[TuningNotice | Exception] = SimpleQueue()
        self.settles: list[SettleTuning] = []
        self.verdict: Callable[[SettleTuning], bool] = lambda request: True
        self.openings = 0

    def ask(self, request: ScriptRequest, timeout_s: float | None) -> AnyAnswer:
        if isinstance(request, SettleTuning):
            self.settles.append(request)
            return Truth(so=self.verdict(request))
        assert isinstance(request, AwaitTuning)
        self.awaited.put(request)
        answer = self.notices.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def count_opening(self, dataset: str) -> int:
        self.openings += 1
        return self.openings

    def memory(self) -> MemoryRoom:
        return ROOM

    def open(self, request: OpenData) -> DataOpened:
        raise NotImplementedError

    def take(self, dataset: str, count: int) -> tuple[Span, ...]:
        raise NotImplementedError

    def tell(self, message: DataUsed) -> None:
        raise NotImplementedError

    # ---- the coordinator's part ----

    def next(self) -> AwaitTuning:
        """The next request for news."""
        return self.awaited.get(timeout=PATIENCE_S)

    def tell_notice(self, number: int, at_step: int | None, **more: object) -> AwaitTuning:
        """Say something, and return the acknowledgement."""
        step = None if at_step is None else StepNumber(at_step)
        about = {"version": 1, "config": OTHER, **more}
        self.notices.put(TuningNotice(number=number, at_step=step, **about))
        return self.next()


def opened(link: ScriptedLink, first: TuningNotice | None = None, **more: object) -> Tuning:
    link.notices.put(first or TuningNotice(number=0, at_step=StepNumber(0)))
    made = Tuning("train", OWN, link=link, **more)
    link.next()  # The request that opened it.
    link.next()  # And the one that waits for news.
    return made


def test_outside_a_job_nothing_changes() -> None:
    tuning = Tuning("train", OWN)
    assert tuning.config == OWN
    assert [tuning.at_boundary(step) for step in range(5)] == [None] * 5


def test_it_begins_with_the_settings_in_force() -> None:
    first = TuningNotice(number=7, at_step=StepNumber(0), version=3, config=OTHER)
    tuning = opened(ScriptedLink(), first)
    assert (tuning.version, tuning.config) == (3, OTHER.over(OWN))


def test_it_changes_at_the_first_boundary_at_or_after_the_step() -> None:
    link = ScriptedLink()
    tuning = opened(link)
    link.tell_notice(1, at_step=10)
    said = [tuning.at_boundary(step) for step in range(1, 14)]
    assert said == [None] * 9 + [OTHER.over(OWN)] + [None] * 3
    assert link.settles == [SettleTuning(dataset="train", number=1)]
    assert tuning.version == 1


def test_what_is_cancelled_changes_nothing_and_is_asked_once() -> None:
    link = ScriptedLink()
    link.verdict = lambda request: False
    tuning = opened(link)
    link.tell_notice(1, at_step=10)
    assert [tuning.at_boundary(step) for step in range(1, 14)] == [None] * 13
    assert len(link.settles) == 1
    assert (tuning.version, tuning.config) == (0, OWN)


def test_an_acknowledgement_says_which_boundary_was_passed() -> None:
    link = ScriptedLink()
    tuning = opened(link)
    for step in range(1, 6):
        tuning.at_boundary(step)
    answer = link.tell_notice(1, at_step=None)
    assert (answer.after, answer.at) == (1, 5)
    assert answer.step_s is not None


def test_what_comes_too_late_is_not_asked_for() -> None:
    link = ScriptedLink()
    tuning = opened(link)
    for step in range(1, 21):
        tuning.at_boundary(step)
    assert link.tell_notice(1, at_step=20).at == 20  # By this the coordinator cancels it.
    assert tuning.at_boundary(21) is None
    assert link.settles == []


def test_a_newer_proposal_takes_the_place_of_one_that_was_cancelled() -> None:
    link = ScriptedLink()
    tuning = opened(link)
    link.tell_notice(1, at_step=10)
    link.tell_notice(2, at_step=None)
    link.tell_notice(3, at_step=30)
    for step in range(1, 40):
        tuning.at_boundary(step)
    assert [one.number for one in link.settles] == [3]


def test_the_end_of_the_round_ends_the_thread_and_the_question_raises() -> None:
    link = ScriptedLink()

    def fenced(request: SettleTuning) -> bool:
        raise FencedError("the round is over")

    link.verdict = fenced
    tuning = opened(link)
    link.tell_notice(1, at_step=1)
    threads = [one for one in threading.enumerate() if one.name == "holdfast-tuning"]
    link.notices.put(RequestDenied("data set: the loader of train was opened anew"))
    with pytest.raises(FencedError):
        tuning.at_boundary(1)
    threads[-1].join(PATIENCE_S)
    assert not threads[-1].is_alive()


def test_loaders_of_one_data_set_are_counted() -> None:
    link = ScriptedLink()
    opened(link)
    link.notices.put(TuningNotice(number=0, at_step=StepNumber(0)))
    Tuning("train", OWN, link=link)
    assert link.next().opening == 2


def test_a_boundary_costs_a_few_function_calls_when_nothing_is_proposed() -> None:
    tuning, steps = opened(ScriptedLink()), itertools.count()
    assert cost_in_calls(lambda: tuning.at_boundary(next(steps))) < 40


def test_many_changes_at_a_running_loader_are_each_made_or_late() -> None:
    """The thread and the loop run at once: what is acknowledged before its step is asked for there."""
    link = ScriptedLink()
    tuning = opened(link)
    asked_at: dict[int, int] = {}
    step, end = 0, threading.Event()

    def note(request: SettleTuning) -> bool:
        asked_at[request.number] = step
        return True

    def train() -> None:
        nonlocal step
        while not end.is_set():
            step += 1
            tuning.at_boundary(step)

    link.verdict = note
    loop = threading.Thread(target=train)
    loop.start()
    acknowledged = {}
    try:
        for number in range(1, 400):
            target = step + number % 7 * 40
            answer = link.tell_notice(number, at_step=target)
            if answer.at < target:
                acknowledged[number] = target
                deadline = time.monotonic() + PATIENCE_S
                while number not in asked_at:  # The next is proposed when this one is over.
                    assert time.monotonic() < deadline
    finally:
        end.set()
        loop.join()
    assert acknowledged
    assert {number: asked_at[number] for number in acknowledged} == acknowledged


# ---- measuring -----------------------------------------------------------------------------------


def filled(*took: float) -> StepMeter:
    meter = StepMeter()
    for seconds in (9.0,) * module.WARM_UP + took:
        meter.add(seconds)
    return meter


def test_the_first_steps_after_a_change_do_not_count() -> None:
    assert filled(*[0.25] * 20).steps_per_s() == pytest.approx(4.0)


def test_a_pause_for_a_checkpoint_does_not_count() -> None:
    assert filled(*[0.25] * 10, 30.0, *[0.25] * 10).steps_per_s() == pytest.approx(4.0)


@pytest.mark.parametrize(
    "took",
    [[0.25] * 19, [0.01] * 100, [0.5] * 10 + [0.25] * 10],
    ids=["too few steps", "too short a time", "not steady"],
)
def test_a_measurement_goes_on_until_it_means_something(took: list[float]) -> None:
    assert filled(*took).steps_per_s() is None


def test_steps_that_never_get_steady_are_measured_in_the_end() -> None:
    meter = filled(*[0.5] * 100, *[0.25] * 100)
    assert meter.steps_per_s() == pytest.approx(4.0)


def test_speed_and_memory_are_reported_once_for_each_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    link = ScriptedLink()
    link.notices.put(TuningNotice(number=0, at_step=StepNumber(0), measure=True))
    tuning = Tuning("train", OWN, link=link, most=64, auto=True)
    assert link.next().auto
    waiting = link.next()
    assert waiting.for_s is not None
    for step in range(1, 300):
        tuning.at_boundary(step)
    told = link.tell_notice(0, at_step=0)  # The time is up, and there is no news.
    assert told.measured is not None
    assert (told.measured.version, told.measured.memory) == (0, ROOM)
    assert told.measured.steps_per_s > 0
    assert told.for_s is None
    again = link.tell_notice(1, at_step=310, measure=True)
    assert again.measured is None
    assert again.for_s is not None
