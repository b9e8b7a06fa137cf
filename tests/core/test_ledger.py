"""Every second has exactly one cause, and they add up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.ledger import books
from holdfast.core.ledger.books import Ledger
from holdfast.messages.records import Cause, RankProgress
from holdfast.messages.units import Rank, RoundNumber, StepNumber, Time

OPEN = 100.0


def opened(ranks: int = 1) -> Ledger:
    """A ledger whose first round was frozen 2 s after the job opened."""
    ledger = Ledger(Time(OPEN))
    books.size(ledger, ranks, Time(OPEN + 2))
    books.begin_round(ledger, RoundNumber(1), StepNumber(0), Time(OPEN + 2))
    return ledger


def report(
    ledger: Ledger,
    step: int,
    steps: int,
    first_at: float,
    last_at: float,
    step_s: float | None = 1.0,
    **aside: float,
) -> None:
    progress = RankProgress(
        rank=Rank(0),
        step=StepNumber(step),
        steps=steps,
        first_at=Time(first_at),
        last_at=Time(last_at),
        step_s=step_s,
        **aside,
    )
    books.progressed(ledger, progress)
    books.validate(ledger)


def fault(ledger: Ledger, at: float, noticed_at: float, stopped_at: float) -> None:
    books.broke(ledger, Time(at), Time(noticed_at))
    books.stopped(ledger, Time(stopped_at))


def spent(ledger: Ledger, now: float) -> dict[Cause, float]:
    books.validate(ledger)
    seconds = books.seconds_until(ledger, Time(now))
    assert sum(seconds.values()) == pytest.approx(books.rank_seconds(ledger, Time(now)))
    return {cause: round(s, 6) for cause, s in seconds.items() if s}


def trained() -> Ledger:
    """Start 3 s, init 2 s, then ten steps of a second."""
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    report(ledger, 10, 10, OPEN + 5, OPEN + 14)
    return ledger


def test_an_ordinary_start_is_start_then_init_then_productive() -> None:
    assert spent(trained(), OPEN + 14) == {"start": 3, "init": 2, "productive": 9}


def test_the_first_round_is_on_the_books_from_the_opening_on() -> None:
    assert books.rank_seconds(opened(3), Time(OPEN + 2)) == 6


def test_time_since_the_last_step_is_unknown_until_more_is_known() -> None:
    ledger = trained()
    assert books.unknown_since(ledger, Time(OPEN + 14)) is None
    seconds = spent(ledger, OPEN + 114)
    assert (seconds["productive"], seconds["unknown"]) == (9, 100)
    assert books.unknown_since(ledger, Time(OPEN + 114)) == OPEN + 14


def test_a_pause_between_two_steps_is_no_training() -> None:
    ledger = trained()
    report(ledger, 12, 12, OPEN + 5, OPEN + 116, pause_s=100.0)
    assert spent(ledger, OPEN + 116) == {"start": 3, "init": 2, "productive": 11, "other": 100}


def test_an_evaluation_that_the_script_marks_has_a_cause_of_its_own() -> None:
    ledger = trained()
    report(ledger, 12, 12, OPEN + 5, OPEN + 66, evaluation_s=50.0)
    assert spent(ledger, OPEN + 66) == {"start": 3, "init": 2, "productive": 11, "evaluation": 50}
    report(ledger, 13, 13, OPEN + 5, OPEN + 87, evaluation_s=60.0, pause_s=10.0)
    seconds = spent(ledger, OPEN + 87)
    assert (seconds["evaluation"], seconds["other"], seconds["productive"]) == (60, 10, 12)


def test_an_evaluation_before_the_first_step_is_not_taken_from_the_steps() -> None:
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    report(ledger, 1, 1, OPEN + 33, OPEN + 33, evaluation_s=20.0)
    report(ledger, 10, 10, OPEN + 33, OPEN + 42, evaluation_s=20.0)
    seconds = spent(ledger, OPEN + 42)
    assert (seconds["init"], seconds["evaluation"], seconds["productive"]) == (10, 20, 9)


def test_samples_are_used_once_and_redone_when_their_steps_are_taken_again() -> None:
    ledger = opened()
    report(ledger, 10, 10, OPEN + 5, OPEN + 14, samples=80)
    assert ledger.samples == books.Samples(used=80, redone=0, timed=72.0)
    fault(ledger, OPEN + 14, OPEN + 14, OPEN + 15)
    books.begin_round(ledger, RoundNumber(2), StepNumber(10), Time(OPEN + 15))
    report(ledger, 5, 1, OPEN + 20, OPEN + 20, samples=8)  # It goes on from step 4.
    report(ledger, 12, 8, OPEN + 20, OPEN + 27, samples=64)
    assert ledger.samples == books.Samples(used=96, redone=48, timed=88.0)


def test_samples_of_a_report_that_comes_twice_count_once() -> None:
    ledger = trained()
    for _ in range(2):
        report(ledger, 12, 12, OPEN + 5, OPEN + 16, samples=96)
    assert ledger.samples is not None
    assert ledger.samples.used == 96


def test_first_steps_are_undecided_until_their_usual_time_is_known() -> None:
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    report(ledger, 2, 2, OPEN + 5, OPEN + 65, step_s=None)
    assert spent(ledger, OPEN + 66) == {"start": 3, "init": 2, "unknown": 61}
    report(ledger, 8, 8, OPEN + 5, OPEN + 71, pause_s=59.0)
    assert spent(ledger, OPEN + 71) == {"start": 3, "init": 2, "other": 59, "productive": 7}


@pytest.mark.parametrize("ends", ["finished", "stopped"])
def test_steps_too_few_to_have_a_usual_time_are_training_all_the_same(ends: str) -> None:
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    report(ledger, 3, 3, OPEN + 5, OPEN + 7, step_s=None)
    if ends == "finished":
        books.finished(ledger, Rank(0), Time(OPEN + 10))
        rest: Cause = "finish"
    else:
        fault(ledger, OPEN + 10, OPEN + 10, OPEN + 10)
        rest = "unknown"
    assert spent(ledger, OPEN + 10) == {"start": 3, "init": 2, "productive": 2, rest: 3}


def test_from_the_last_step_to_its_end_a_rank_finishes_then_it_is_idle() -> None:
    ledger = trained()
    books.finished(ledger, Rank(0), Time(OPEN + 44))
    seconds = spent(ledger, OPEN + 50)
    assert (seconds["productive"], seconds["finish"], seconds["idle"]) == (9, 30, 6)


def test_a_script_without_steps_has_no_finish() -> None:
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    books.finished(ledger, Rank(0), Time(OPEN + 10))
    assert spent(ledger, OPEN + 10) == {"start": 3, "init": 7}


def test_the_last_save_after_the_last_step_is_booked_as_such() -> None:
    ledger = trained()
    ledger.now = Time(OPEN + 20)
    report(ledger, 10, 10, OPEN + 5, OPEN + 14, checkpoint_s=4.0)
    books.finished(ledger, Rank(0), Time(OPEN + 20))
    seconds = spent(ledger, OPEN + 20)
    assert (seconds["checkpoint"], seconds["finish"]) == (4, 2)


def test_the_same_report_twice_books_nothing_twice() -> None:
    ledger = trained()
    report(ledger, 10, 10, OPEN + 5, OPEN + 14)
    report(ledger, 4, 4, OPEN + 5, OPEN + 8)
    assert spent(ledger, OPEN + 14) == {"start": 3, "init": 2, "productive": 9}


def test_a_fault_books_the_step_under_way_as_redo_then_detect_then_stop() -> None:
    ledger = trained()
    books.broke(ledger, Time(OPEN + 15), Time(OPEN + 15.5))
    books.stopped(ledger, Time(OPEN + 17))
    seconds = spent(ledger, OPEN + 18)
    assert seconds == {
        "start": 3,
        "init": 2,
        "productive": 9,
        "redo": 1,
        "detect": 0.5,
        "stop": 1.5,
        "rendezvous": 1,
    }


def test_a_fault_discards_one_usual_step_and_not_an_evaluation() -> None:
    ledger = trained()
    fault(ledger, OPEN + 114, OPEN + 114.5, OPEN + 115)
    seconds = spent(ledger, OPEN + 115)
    assert (seconds["redo"], seconds["other"]) == (1, 99)
    assert (seconds["detect"], seconds["stop"]) == (0.5, 0.5)


def test_a_save_before_the_fault_stays_a_save() -> None:
    ledger = trained()
    books.broke(ledger, Time(OPEN + 24), Time(OPEN + 24))
    ledger.now = Time(OPEN + 25)
    report(ledger, 10, 10, OPEN + 5, OPEN + 14, checkpoint_s=9.5)
    books.stopped(ledger, Time(OPEN + 25))
    seconds = spent(ledger, OPEN + 25)
    assert (seconds["checkpoint"], seconds["redo"], seconds["stop"]) == (9.5, 0.5, 1)
    assert "other" not in seconds


def test_a_hang_is_time_to_detect_from_the_culprits_last_mark_on() -> None:
    ledger = trained()
    fault(ledger, OPEN + 14.5, OPEN + 74.5, OPEN + 75)
    seconds = spent(ledger, OPEN + 75)
    assert (seconds["redo"], seconds["detect"], seconds["stop"]) == (0.5, 60, 0.5)


def test_the_fault_that_turned_out_to_be_the_cause_counts() -> None:
    ledger = trained()
    books.broke(ledger, Time(OPEN + 16), Time(OPEN + 16))
    books.blamed(ledger, Time(OPEN + 14.5))
    books.stopped(ledger, Time(OPEN + 17))
    seconds = spent(ledger, OPEN + 17)
    assert (seconds["redo"], seconds["detect"], seconds["stop"]) == (0.5, 1.5, 1)


def test_the_usual_step_of_the_last_round_bounds_what_the_next_may_throw_away() -> None:
    ledger = trained()
    fault(ledger, OPEN + 14, OPEN + 14, OPEN + 14)
    books.begin_round(ledger, RoundNumber(2), StepNumber(10), Time(OPEN + 14))
    books.script_began(ledger, Rank(0), Time(OPEN + 14))
    report(ledger, 11, 1, OPEN + 15, OPEN + 15, step_s=None)
    fault(ledger, OPEN + 45, OPEN + 45, OPEN + 45)
    seconds = spent(ledger, OPEN + 45)
    assert (seconds["redo"], seconds["other"]) == (1, 29)


def test_progress_heard_of_after_the_fault_is_still_productive() -> None:
    ledger = trained()
    books.broke(ledger, Time(OPEN + 16), Time(OPEN + 16))
    report(ledger, 12, 12, OPEN + 5, OPEN + 16)
    books.stopped(ledger, Time(OPEN + 16))
    assert spent(ledger, OPEN + 16) == {"start": 3, "init": 2, "productive": 11}


def test_steps_that_were_finished_before_are_redo_and_new_ones_productive() -> None:
    ledger = trained()
    books.broke(ledger, Time(OPEN + 14), Time(OPEN + 14))
    books.stopped(ledger, Time(OPEN + 14))
    books.begin_round(ledger, RoundNumber(2), StepNumber(10), Time(OPEN + 14))
    books.script_began(ledger, Rank(0), Time(OPEN + 14))
    # Resumed from step 5: steps 6 to 10 are redone, 11 to 15 are new; the first ends with init.
    report(ledger, 15, 10, OPEN + 15, OPEN + 24)
    seconds = spent(ledger, OPEN + 24)
    assert seconds["redo"] == 4
    assert seconds["productive"] == 9 + 5


def test_a_booking_knows_the_step_that_was_finished_before_it() -> None:
    ledger = trained()
    ledger.spans = []
    fault(ledger, OPEN + 14, OPEN + 15, OPEN + 16)
    books.begin_round(ledger, RoundNumber(2), StepNumber(10), Time(OPEN + 17))
    books.script_began(ledger, Rank(0), Time(OPEN + 18))
    report(ledger, 14, 8, OPEN + 20, OPEN + 27)
    steps = {(one.round, one.cause): one.step for one in ledger.spans}
    assert steps[RoundNumber(1), "detect"] == 10
    assert steps[RoundNumber(2), "redo"] == 7
    assert steps[RoundNumber(2), "productive"] == 10


def test_a_fault_before_the_first_step_redoes_nothing() -> None:
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    books.broke(ledger, Time(OPEN + 4), Time(OPEN + 4))
    books.stopped(ledger, Time(OPEN + 5))
    assert spent(ledger, OPEN + 5) == {"start": 3, "init": 1, "stop": 1}


def test_checkpoints_and_restores_are_booked_as_such() -> None:
    ledger = opened()
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    report(ledger, 10, 10, OPEN + 6, OPEN + 15, restore_s=2.0, checkpoint_s=3.0)
    seconds = spent(ledger, OPEN + 15)
    assert (seconds["restore"], seconds["checkpoint"]) == (2, 3)
    assert (seconds["init"], seconds["productive"]) == (1, 6)


def test_a_checkpoint_longer_than_the_time_there_is_takes_no_more_than_that() -> None:
    ledger = opened()
    report(ledger, 2, 2, OPEN + 3, OPEN + 4, checkpoint_s=1e6)
    assert spent(ledger, OPEN + 4) == {"start": 3, "checkpoint": 1}


def test_word_of_the_past_does_not_call_a_rank_back_to_training() -> None:
    ledger = trained()
    books.enter(ledger, "stop", Time(OPEN + 15))
    report(ledger, 11, 11, OPEN + 5, OPEN + 15)
    assert spent(ledger, OPEN + 20)["stop"] == 5


def test_a_rank_that_is_no_more_leaves_its_seconds_on_the_books() -> None:
    ledger = opened(4)
    books.size(ledger, 2, Time(OPEN + 10))
    books.begin_round(ledger, RoundNumber(2), StepNumber(0), Time(OPEN + 10))
    assert books.rank_seconds(ledger, Time(OPEN + 20)) == 4 * 10 + 2 * 10
    spent(ledger, OPEN + 20)


def test_a_rank_that_is_new_is_on_the_books_from_then_on() -> None:
    ledger = opened(1)
    books.size(ledger, 2, Time(OPEN + 10))
    books.begin_round(ledger, RoundNumber(2), StepNumber(0), Time(OPEN + 10))
    assert books.rank_seconds(ledger, Time(OPEN + 20)) == 20 + 10
    spent(ledger, OPEN + 20)


def test_spans_are_the_books_line_by_line() -> None:
    ledger = opened()
    ledger.spans = []
    ledger.seconds.clear()
    ledger.accounts[Rank(0)].opened_at = ledger.accounts[Rank(0)].cursor
    books.script_began(ledger, Rank(0), Time(OPEN + 3))
    report(ledger, 10, 10, OPEN + 5, OPEN + 14)
    by_cause: dict[Cause, float] = {}
    for span in ledger.spans:
        by_cause[span.cause] = by_cause.get(span.cause, 0.0) + span.end - span.begin
    assert by_cause == pytest.approx(ledger.seconds)
    assert all(a.end == b.begin for a, b in zip(ledger.spans, ledger.spans[1:], strict=False))


times = st.floats(OPEN, OPEN + 1000)
happenings = st.one_of(
    st.tuples(st.just("size"), st.integers(0, 5), times),
    st.tuples(st.just("round"), st.integers(0, 100), times),
    st.tuples(st.just("began"), st.integers(0, 4), times),
    st.tuples(st.just("broke"), times, times),
    st.tuples(st.just("stopped"), st.just(0), times),
    st.tuples(st.just("blamed"), st.just(0), times),
    st.tuples(st.just("finished"), st.integers(0, 4), times),
    st.tuples(st.just("passed"), st.just(0), times),
    st.tuples(st.just("enter"), st.sampled_from(["wait", "idle", "stop"]), times),
    st.tuples(
        st.just("report"),
        st.tuples(st.integers(0, 4), st.integers(0, 50), st.integers(0, 50), times, times),
        st.tuples(
            st.floats(0, 100),
            st.floats(0, 100),
            st.floats(0, 100),
            st.none() | st.floats(0.001, 100),
        ),
    ),
)


def told(ledger: Ledger, what: str, one: Any, other: Any) -> None:
    """Have the ledger hear one of the above."""
    if what == "size":
        books.size(ledger, one, Time(other))
    elif what == "round":
        books.begin_round(ledger, RoundNumber(ledger.round + 1), StepNumber(one), Time(other))
    elif what == "broke":
        books.broke(ledger, Time(one), Time(other))
    elif what == "blamed":
        books.blamed(ledger, Time(other))
    elif what == "stopped":
        books.stopped(ledger, Time(other))
    elif what == "enter":
        books.enter(ledger, one, Time(other))
    elif what == "passed":
        ledger.now = Time(other)
    elif what == "began" and one in ledger.accounts:
        books.script_began(ledger, Rank(one), Time(other))
    elif what == "finished" and one in ledger.accounts:
        books.finished(ledger, Rank(one), Time(other))
    elif what == "report" and one[0] in ledger.accounts:
        rank, step, steps, first_at, last_at = one
        checkpoint_s, restore_s, pause_s, step_s = other
        progress = RankProgress(
            rank=Rank(rank),
            step=StepNumber(step),
            steps=steps,
            first_at=Time(first_at),
            last_at=Time(last_at),
            checkpoint_s=checkpoint_s,
            restore_s=restore_s,
            pause_s=pause_s,
            step_s=step_s,
        )
        books.progressed(ledger, progress)


@settings(max_examples=200, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_nothing_that_is_told_in_any_order_loses_or_invents_time(
    story: list[tuple[str, Any, Any]],
) -> None:
    ledger = opened(3)
    due = books.rank_seconds(ledger, Time(OPEN + 2000))
    for what, one, other in story:
        told(ledger, what, one, other)
        spent(ledger, OPEN + 2000)
    if not any(what == "size" for what, _, _ in story):
        assert books.rank_seconds(ledger, Time(OPEN + 2000)) == pytest.approx(due)


@settings(max_examples=200, deadline=None)
@given(st.lists(happenings, max_size=40), st.floats(0, 100), st.floats(0, 100))
def test_goodput_never_rises_while_time_merely_passes(
    story: list[tuple[str, Any, Any]], first_s: float, then_s: float
) -> None:
    ledger = opened(3)
    for what, one, other in story:
        told(ledger, what, one, other)

    def goodput(at: float) -> float:
        now = Time(max([at, *(a.cursor for a in ledger.accounts.values())]))
        total = books.rank_seconds(ledger, now)
        productive = books.seconds_until(ledger, now).get("productive", 0.0)
        return productive / total if total else 0.0

    at = OPEN + 1000 + first_s
    assert goodput(at + then_s) <= goodput(at) + 1e-12
    assert goodput(at) <= goodput(OPEN + 1000) + 1e-12


@settings(max_examples=100, deadline=None)
@given(st.lists(happenings, max_size=40), times, times)
def test_a_fault_throws_away_at_most_one_usual_step_of_each_rank(
    story: list[tuple[str, Any, Any]], fault_at: float, stopped_at: float
) -> None:
    ledger = opened(3)
    for what, one, other in story:
        told(ledger, what, one, other)
    for account in ledger.accounts.values():
        account.undecided = None  # What was finished before may be redo as well.
    before = ledger.seconds.get("redo", 0.0)
    fault(ledger, fault_at, fault_at, stopped_at)
    most = sum(account.step_s or 0.0 for account in ledger.accounts.values())
    assert ledger.seconds.get("redo", 0.0) - before <= most + 1e-6
