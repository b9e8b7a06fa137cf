"""A pause is told from a step by what steps usually take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.step_times import KNOWN_AFTER, StepTimes


def after(*took: float) -> StepTimes:
    times = StepTimes()
    for seconds in took:
        times.took(seconds)
    return times


def test_steps_that_vary_are_steps() -> None:
    assert after(*[1.0, 3.0, 0.5, 2.0, 1.5] * 20).pause_s == 0.0


def test_an_evaluation_between_two_steps_is_a_pause_but_for_one_usual_step() -> None:
    times = after(*[0.5] * 20, 100.0, *[0.5] * 20)
    assert (times.pause_s, times.usual_s) == (pytest.approx(99.5), 0.5)


def test_a_delay_of_tiny_steps_is_no_pause() -> None:
    assert after(*[0.001] * 20, 0.1).pause_s == 0.0


def test_the_first_steps_are_judged_when_the_usual_time_is_known() -> None:
    compiling = [30.0, 20.0, 0.1, 0.1]
    assert after(*compiling).usual_s is None
    assert after(*compiling).pause_s == 0.0
    times = after(*compiling, 0.1)
    assert times.usual_s == 0.1
    assert times.pause_s == pytest.approx(29.9 + 19.9)


def test_steps_that_became_slower_for_good_are_soon_usual() -> None:
    times = after(*[0.1] * 50, *[1.0] * 50)
    assert times.usual_s == 1.0
    assert times.pause_s < 25 * 0.9


@given(st.lists(st.floats(0.0, 1000.0), max_size=200))
def test_pauses_are_never_more_than_there_was_time(took: list[float]) -> None:
    times = StepTimes()
    for seconds in took:
        before = times.pause_s
        times.took(seconds)
        assert times.pause_s >= before
    assert times.pause_s <= sum(took) + 1e-6
    assert (times.usual_s is None) == (len(took) < KNOWN_AFTER)


@given(st.floats(0.001, 10.0), st.lists(st.floats(1.0, 3.0), min_size=5, max_size=100))
def test_steps_of_the_same_order_contain_no_pause(step_s: float, factors: list[float]) -> None:
    assert after(*(step_s * factor for factor in factors)).pause_s == 0.0
