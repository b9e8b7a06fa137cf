"""Deadlines are learnt, with a floor, and a flag wins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.hangs.deadlines import (
    ALARM_FACTOR,
    ALARMS_AT_MOST,
    ASIDE_FLOOR_S,
    FIRST_FACTOR,
    FIRST_FLOOR_S,
    FIRST_STEP,
    FIRST_UNKNOWN_S,
    HANG_BASE_S,
    HANG_FACTOR,
    HANG_STEPS,
    OVERDUE_FACTOR,
    OVERDUE_FLOOR_S,
    SECTION_FACTOR,
    SECTION_UNKNOWN_S,
    WARM_UP_FLOOR_S,
    Deadline,
    HangLimits,
)
from holdfast.core.patience import STOP_FACTOR, STOP_FLOOR_S, STOP_UNKNOWN_S, StopGrace
from holdfast.messages.hangs import HangTerms, Paces

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


# ---- ranks that stand still --------------------------------------------------------------------


def limits(
    before: Paces | None = None, alarms: dict[str, int] | None = None, **said: Any
) -> HangLimits:
    return HangLimits(HangTerms(**said), before or Paces(), alarms or {})


@given(seconds, seconds)
def test_between_two_marks_there_are_three_steps_or_three_times_the_longest(
    step_s: float, longest_s: float
) -> None:
    found = limits().between_marks("forward", step_s, longest_s)
    assert found.limit_s == max(HANG_BASE_S + HANG_STEPS * step_s, HANG_FACTOR * longest_s)
    assert found.overdue_s == max(OVERDUE_FLOOR_S, OVERDUE_FACTOR * found.limit_s)
    assert found.known


def test_the_bar_is_met_three_steps_and_two_seconds() -> None:
    for step_s in (0.02, 0.2, 1.0, 30.0):
        assert limits().between_marks("data", step_s, 0.9 * step_s).limit_s < 3 * step_s + 2.0


def test_a_phase_that_took_long_in_an_earlier_round_may_take_long_again() -> None:
    before = Paces(0.1, {"forward": 40.0})
    assert limits(before).between_marks("forward", 0.1, 0.1).limit_s == HANG_FACTOR * 40.0
    assert limits(before).between_marks("data", 0.1, 0.1).limit_s < 2.0


def test_until_a_process_has_steps_of_its_own_those_of_earlier_rounds_count() -> None:
    before = Paces(2.0, {})
    assert limits(before).between_marks("data", None, 0.0).limit_s == HANG_BASE_S + 2 * HANG_STEPS
    assert limits().between_marks("data", None, 0.0).limit_s == HANG_BASE_S


def test_while_a_process_warms_up_it_has_more_time() -> None:
    cold = limits().between_marks("forward", 0.02, 0.1, warm=False)
    assert cold.limit_s == WARM_UP_FLOOR_S
    assert limits().between_marks("forward", 0.02, 60.0, warm=False).limit_s == 180.0


def test_the_first_step_has_half_an_hour_until_one_was_seen() -> None:
    assert limits().until_first_step().limit_s == FIRST_UNKNOWN_S
    assert not limits().until_first_step().known
    seen = limits(Paces(0.1, {FIRST_STEP: 2.0})).until_first_step()
    assert (seen.limit_s, seen.known) == (FIRST_FLOOR_S, True)
    slow = limits(Paces(0.1, {FIRST_STEP: 90.0})).until_first_step()
    assert slow.limit_s == FIRST_FACTOR * 90.0


def test_a_section_has_a_deadline_of_its_own() -> None:
    assert limits().in_section("eval", 0.1, 0.0).limit_s == SECTION_UNKNOWN_S
    assert not limits().in_section("eval", 0.1, 0.0).known
    assert limits().in_section("eval", 0.1, 30.0).limit_s == SECTION_FACTOR * 30.0
    assert limits().in_section("eval", 0.1, 0.001).limit_s == pytest.approx(
        HANG_BASE_S + 0.1 * HANG_STEPS
    )
    before = Paces(0.1, {"eval": 30.0})
    assert limits(before).in_section("eval", 0.1, 0.0).limit_s == SECTION_FACTOR * 30.0


@pytest.mark.parametrize("name", ["checkpoint", "restore"])
def test_slow_storage_is_no_hang(name: str) -> None:
    """A save that took a second yesterday takes minutes when the storage is busy."""
    assert limits().in_section(name, 0.02, 1.0).limit_s == ASIDE_FLOOR_S >= 300.0
    assert limits().in_section(name, 0.02, 0.0).limit_s == SECTION_UNKNOWN_S
    assert limits().in_section(name, 0.02, 100.0).limit_s == 500.0


@given(st.integers(0, 20))
def test_after_each_alarm_the_next_deadline_of_that_kind_is_several_times_as_long(n: int) -> None:
    calm, alarmed = limits(), limits(alarms={"forward": n, "eval": n, FIRST_STEP: n})
    factor = ALARM_FACTOR ** min(n, ALARMS_AT_MOST)
    for of in (
        lambda each: each.between_marks("forward", 0.1, 0.0),
        lambda each: each.in_section("eval", 0.1, 1.0),
        lambda each: each.until_first_step(),
    ):
        assert of(alarmed).limit_s == pytest.approx(factor * of(calm).limit_s)
        assert of(alarmed).overdue_s == pytest.approx(factor * of(calm).overdue_s)
    assert alarmed.between_marks("data", 0.1, 0.0) == calm.between_marks("data", 0.1, 0.0)


SAID = [
    ("rank_heartbeat_timeout", lambda each: each.between_marks("forward", 9.0, 9.0)),
    ("rank_out_of_section_timeout", lambda each: each.between_marks("forward", 9.0, 9.0)),
    ("initial_rank_heartbeat_timeout", lambda each: each.until_first_step()),
]


@pytest.mark.parametrize(("name", "of"), SAID)
@given(said=seconds)
def test_what_the_user_says_holds_however_the_rank_stands(name: str, of: Any, said: float) -> None:
    found = of(limits(Paces(5.0, {FIRST_STEP: 9.0}), {"forward": 3}, **{name: said}))
    assert found == Deadline(said, said)


def test_what_the_user_says_about_a_section_holds_for_that_one() -> None:
    told = limits(rank_section_timeouts={"eval": 7.0})
    assert told.in_section("eval", 9.0, 9.0) == Deadline(7.0, 7.0)
    assert told.in_section("checkpoint", 0.1, 1.0).limit_s == ASIDE_FLOOR_S


def test_a_safety_factor_takes_the_place_of_ours() -> None:
    told = limits(safety_factor=20.0)
    assert told.between_marks("forward", 0.1, 3.0).limit_s == 60.0
    assert told.in_section("eval", 0.1, 3.0).limit_s == 60.0
