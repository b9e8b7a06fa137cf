"""Job time never goes back, whatever the wall clock does."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.clock import JobClock
from holdfast.messages.units import Time

moments = st.floats(0, 1e9)


class Clocks:
    """The machine's two clocks, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 1_700_000_000.0, 5000.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_job_time_begins_as_the_wall_clock(clocks: Clocks) -> None:
    assert JobClock().now() == clocks.wall


def test_a_wall_clock_that_jumps_is_not_followed(clocks: Clocks) -> None:
    clock = JobClock()
    began = clock.now()
    clocks.wall -= 86400
    clocks.monotonic += 10
    assert clock.now() == began + 10


def test_a_restarted_coordinator_goes_on_from_the_journals_last_time(clocks: Clocks) -> None:
    last = Time(clocks.wall + 500)
    clocks.wall -= 86400
    clock = JobClock(not_before=last)
    assert clock.now() == last
    clocks.monotonic += 1
    assert clock.now() == last + 1


def test_a_moment_of_the_monotonic_clock_has_a_job_time(clocks: Clocks) -> None:
    clock = JobClock()
    assert clock.at(clocks.monotonic - 3) == clock.now() - 3


def test_a_clock_taken_over_goes_on_from_what_was_heard(clocks: Clocks) -> None:
    clock = JobClock()
    clock.adopt(Time(123.0), 5000.0)
    clocks.monotonic = 5000.5
    assert clock.now() == pytest.approx(123.5)


@given(st.lists(moments, min_size=2))
def test_later_moments_have_later_times(times: list[float]) -> None:
    clock = JobClock()
    told = [clock.at(moment) for moment in sorted(times)]
    assert told == sorted(told)
