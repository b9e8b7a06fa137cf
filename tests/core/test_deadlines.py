"""Deadlines are learnt, with a floor, and a flag wins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.deadlines import STOP_FACTOR, STOP_FLOOR_S, STOP_UNKNOWN_S, StopGrace

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
