"""How long a process may take to stop, and when a rank is late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.hangs.deadlines import (
    late_between_marks,
    late_in_collective,
    late_in_section,
)
from holdfast.core.patience import STOP_FACTOR, STOP_FLOOR_S, STOP_UNKNOWN_S, StopGrace

seconds = st.floats(0, 1e6)


def test_before_anything_was_seen_the_grace_is_torchruns() -> None:
    assert StopGrace(None).limit_s() == STOP_UNKNOWN_S == 30.0


@given(st.lists(seconds, min_size=1))
def test_the_grace_is_a_multiple_of_the_longest_stop_seen(took: list[float]) -> None:
    grace = StopGrace(None)
    for each in took:
        grace.observe(each)
    assert grace.limit_s() == max(STOP_FLOOR_S, STOP_FACTOR * max(took))


@given(st.lists(seconds), seconds)
def test_a_given_grace_is_kept_whatever_is_seen(took: list[float], given_s: float) -> None:
    grace = StopGrace(given_s)
    for each in took:
        grace.observe(each)
    assert grace.limit_s() == given_s


# ---- when a rank is late -----------------------------------------------------------------------


@given(seconds)
def test_between_two_marks_a_rank_is_late_soon_after_its_usual_time(usual_s: float) -> None:
    assert late_between_marks(usual_s) == max(1.0, 0.5 + 1.2 * usual_s)


@given(seconds)
def test_a_rank_that_waits_for_others_is_late_no_later_than_its_phase(usual_s: float) -> None:
    assert 1.0 <= late_in_collective(usual_s) <= late_between_marks(usual_s)


@given(seconds)
def test_in_a_section_a_rank_has_twice_its_usual_time(usual_s: float) -> None:
    assert late_in_section(usual_s) == max(5.0, 2.0 * usual_s)


def test_while_nothing_is_known_a_rank_has_some_seconds() -> None:
    unknown = late_between_marks(None), late_in_collective(None), late_in_section(None)
    assert unknown == (5.0, 5.0, 5.0)
