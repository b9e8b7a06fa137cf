"""Every second has exactly one cause, and they add up."""

from __future__ import annotations

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
    ledger: Ledger, step: int, steps: int, first_at: float, last_at: float, **aside: float
) -> None:
    progress = RankProgress(
        rank=Rank(0),
        step=StepNumber(step),
        steps=steps,
        first_at=Time(first_at),
        last_at=Time(last_at),
        **aside,
    )
    books.progressed(ledger, progress)
    books.validate(ledger)


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


def test_time_since_the_last_step_counts_as_training_until_more_is_known() -> None:
    assert spent(trained(), OPEN + 20)["productive"] == 15


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
    st.tuples(st.just("enter"), st.sampled_from(["wait", "idle", "stop"]), times),
    st.tuples(
        st.just("report"),
        st.tuples(st.integers(0, 4), st.integers(0, 50), st.integers(0, 50), times, times),
        st.tuples(st.floats(0, 100), st.floats(0, 100)),
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(happenings, max_size=40))
def test_nothing_that_is_told_in_any_order_loses_or_invents_time(told: list[tuple]) -> None:  # type: ignore[type-arg]
    ledger = opened(3)
    due = books.rank_seconds(ledger, Time(OPEN + 2000))
    for what, one, other in told:
        if what == "size":
            books.size(ledger, one, Time(other))
        elif what == "round":
            books.begin_round(ledger, RoundNumber(ledger.round + 1), StepNumber(one), Time(other))
        elif what == "broke":
            books.broke(ledger, Time(one), Time(other))
        elif what == "stopped":
            books.stopped(ledger, Time(other))
        elif what == "enter":
            books.enter(ledger, one, Time(other))
        elif what == "began" and one in ledger.accounts:
            books.script_began(ledger, Rank(one), Time(other))
        elif what == "report" and one[0] in ledger.accounts:
            rank, step, steps, first_at, last_at = one
            books.progressed(
                ledger,
                RankProgress(
                    rank=Rank(rank),
                    step=StepNumber(step),
                    steps=steps,
                    first_at=Time(first_at),
                    last_at=Time(last_at),
                    checkpoint_s=other[0],
                    restore_s=other[1],
                ),
            )
        spent(ledger, OPEN + 2000)
    if not any(what == "size" for what, _, _ in told):
        assert books.rank_seconds(ledger, Time(OPEN + 2000)) == pytest.approx(due)
