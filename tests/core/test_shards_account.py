"""What the committed history has used: how often, and in which round."""

from __future__ import annotations

from lending import LEASES, LOCKSTEP, Lender, packed, used_by
from msgspec.structs import replace

from holdfast.core.shards.history import MOST_RANGES
from holdfast.messages.data import DataSpec
from holdfast.messages.reports import LineAccount

SPEC = replace(LEASES, shard=1)
Piece = tuple[int, int, int, list[int], str]


def spans(line: LineAccount) -> list[Piece]:
    return [(s.start, s.stop, s.times, s.rounds, s.fate) for s in line.spans]


def stepping(spec: DataSpec = LOCKSTEP, steps: int = 6, each: int = 5) -> Lender:
    """A round that has taken some steps in lockstep, and is broken then."""
    job = Lender("a")
    job.open_all(spec)
    for rank in (0, 1):
        job.report("a", used=[used_by(rank, (0, 0, steps * each), 0, steps - 1)])
    job.break_round()
    return job


def leasing(*uses: tuple[tuple[int, int, int], int]) -> Lender:
    """A round that has used these spans, each at its step, and is broken then."""
    job = Lender("a")
    job.open_all(SPEC)
    job.lend("a", 40)
    for span, step in uses:
        job.use("a", span, step=step)
    job.break_round()
    return job


# ---- lockstep ------------------------------------------------------------------------------------


def test_reports_that_continue_each_other_are_one_stretch_whoever_makes_them() -> None:
    job = Lender("a")
    job.open_all(LOCKSTEP)
    for first in range(0, 10, 2):
        for rank in (0, 1):
            used = (0, 5 * first, 5 * first + 10)
            job.report("a", used=[used_by(rank, used, first, first + 1)])
    job.report("a", used=[used_by(1, (0, 0, 50), 0, 9)])
    (stretch,) = job.data.history.rounds[-1].stretches
    assert (stretch.span.start, stretch.span.stop, stretch.first, stretch.last) == (0, 50, 0, 9)
    assert spans(job.line()) == [(0, 50, 1, [1], "used"), (50, 100, 0, [], "ahead")]
    assert job.account().sound


def test_an_epoch_that_a_loop_begins_anew_in_the_same_round_is_used_twice() -> None:
    job = Lender("a")
    job.open_all(LOCKSTEP)
    for rank in (0, 1):
        job.report("a", used=[used_by(rank, (0, 0, 50), 0, 9)])
    for rank in (0, 1):
        job.report("a", used=[used_by(rank, (0, 0, 20), 10, 13)])
        job.report("a", used=[used_by(rank, (0, 20, 60), 14, 21)])
    assert spans(job.line()) == [
        (0, 50, 2, [1, 1], "used"),
        (50, 60, 1, [1], "used"),
        (60, 100, 0, [], "ahead"),
    ]
    assert not job.account().sound
    job.break_round()
    job.open_all(LOCKSTEP, resumed="whole", used=packed((0, 0, 20)), step=12)
    assert job.line().more == 10, "what was used again after the step does not count"


def test_a_report_that_comes_late_fills_its_place() -> None:
    job = Lender("a")
    job.open_all(LOCKSTEP)
    job.report("a", used=[used_by(0, (0, 10, 20), 2, 3)])
    job.report("a", used=[used_by(1, (0, 0, 15), 0, 2)])
    (stretch,) = job.data.history.rounds[-1].stretches
    assert (stretch.span.start, stretch.span.stop, stretch.first, stretch.last) == (0, 20, 0, 3)


def test_a_round_counts_up_to_the_step_from_which_the_next_went_on() -> None:
    job = stepping()
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 20)), step=4)
    job.report("a", used=[used_by(0, (0, 20, 40), 4, 7)])
    assert spans(job.line()) == [
        (0, 20, 1, [1], "used"),
        (20, 40, 1, [2], "used"),
        (40, 100, 0, [], "ahead"),
    ]
    assert [(r.round, r.resumed, r.until, r.records) for r in job.account().rounds] == [
        (1, 0, 4, 20),
        (2, 4, None, 20),
    ]
    assert job.account().sound


def test_a_model_that_is_restored_without_its_data_uses_records_twice() -> None:
    job = stepping()
    job.open_all(LOCKSTEP, "fresh", step=4)
    job.report("a", used=[used_by(0, (0, 0, 30), 4, 9)])
    assert spans(job.line())[:2] == [(0, 20, 2, [1, 2], "used"), (20, 30, 1, [2], "used")]
    assert job.line().more == 20
    assert not job.account().sound


def test_data_that_is_restored_without_its_model_is_never_used() -> None:
    job = stepping()
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 20)), step=0)
    job.report("a", used=[used_by(0, (0, 20, 30), 0, 1)])
    assert spans(job.line())[:2] == [(0, 20, 0, [], "lost"), (20, 30, 1, [2], "used")]
    assert job.line().lost == 20
    assert not job.account().sound


def test_data_that_is_restored_from_a_later_step_than_its_model_is_lost_in_between() -> None:
    job = stepping()
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 30)), step=4)
    assert spans(job.line())[:2] == [(0, 20, 1, [1], "used"), (20, 30, 0, [], "lost")]


def test_where_reports_end_before_the_step_the_restored_state_is_the_evidence() -> None:
    job = stepping(steps=2)
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 20)), step=4)
    assert spans(job.line())[0] == (0, 20, 1, [1], "used")


def test_an_older_checkpoint_undoes_more_than_one_round() -> None:
    job = stepping()
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 20)), step=4)
    job.report("a", used=[used_by(0, (0, 20, 40), 4, 7)])
    job.break_round()
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 10)), step=2)
    job.report("a", used=[used_by(0, (0, 10, 50), 2, 9)])
    assert spans(job.line())[:2] == [(0, 10, 1, [1], "used"), (10, 50, 1, [3], "used")]
    assert job.account().sound


def test_what_was_used_before_the_job_counts_once() -> None:
    job = Lender("a")
    job.open_all(LOCKSTEP, "whole", used=packed((0, 0, 20)), step=4)
    job.report("a", used=[used_by(0, (0, 20, 30), 4, 5)])
    assert spans(job.line())[:2] == [(0, 20, 1, [0], "used"), (20, 30, 1, [1], "used")]


def test_epochs_far_behind_are_counted_and_their_faults_listed() -> None:
    spec = replace(LOCKSTEP, size=10, epochs=0)
    job = Lender("a")
    job.open_all(spec)
    job.report("a", used=[used_by(0, (0, 0, 10), 0, 9)])
    job.break_round()
    job.open_all(spec, "fresh", step=5)  # The model goes on, and its data does not.
    for epoch in range(50):
        first = 5 + 10 * epoch
        job.report("a", used=[used_by(0, (epoch, 0, 10), first, first + 9)])
    account = job.account()
    assert account.whole_lines == 45
    assert [line.line for line in account.lines] == [0, 45, 46, 47, 48, 49]
    assert (account.lines[0].more, account.lines[0].once) == (5, 5)
    assert spans(account.lines[0]) == [(0, 5, 2, [1, 2], "used")]
    assert not account.sound


def test_a_checkpoint_from_before_the_epochs_that_are_only_counted_undoes_them_too() -> None:
    spec = replace(LOCKSTEP, size=10, epochs=0)
    job = Lender("a")
    job.open_all(spec)
    for epoch in range(20):
        job.report("a", used=[used_by(0, (epoch, 0, 10), 10 * epoch, 10 * epoch + 9)])
    job.break_round()
    job.open_all(spec, "whole", used=packed((3, 0, 5)), step=35)
    assert job.account().sound
    for epoch in range(3, 20):
        start = 5 if epoch == 3 else 0
        first = 10 * epoch + start
        job.report("a", used=[used_by(0, (epoch, start, 10), first, 10 * epoch + 9)])
    assert job.account().sound
    assert job.account().whole_lines == 15


def test_a_checkpoint_undoes_epochs_that_were_used_and_folded_in_the_step_after_it() -> None:
    spec = replace(SPEC, size=1, epochs=0)
    job = Lender("a")
    job.open_all(spec)
    for epoch in range(12):
        assert job.lend("a") == [(epoch, 0, 1)]
        job.use("a", (epoch, 0, 1), step=4 if epoch < 2 else 5)
    assert job.account().whole_lines == 8
    job.break_round()
    job.open_all(spec, "whole", used=packed((0, 0, 1), (1, 0, 1)), step=5)
    assert job.account().whole_lines == 2
    for epoch in range(2, 12):
        assert job.lend("a") == [(epoch, 0, 1)]
        job.use("a", (epoch, 0, 1), step=5)
    assert job.account().sound


def test_folded_epochs_that_are_used_again_are_used_twice() -> None:
    spec = replace(LOCKSTEP, size=10, epochs=0)
    job = Lender("a")
    job.open_all(spec)
    for epoch in range(20):
        job.report("a", used=[used_by(0, (epoch, 0, 10), 10 * epoch, 10 * epoch + 9)])
    job.break_round()
    job.open_all(spec, "fresh", step=200)
    job.report("a", used=[used_by(0, (0, 0, 10), 200, 209)])
    assert spans(job.line(0)) == [(0, 10, 2, [0, 2], "used")]
    assert spans(job.line(1)) == [(0, 10, 1, [0], "used")]
    assert job.account().lines[0].more == 10
    assert not job.account().sound


# ---- leases --------------------------------------------------------------------------------------


def test_leased_shards_count_up_to_the_step_from_which_the_next_round_went_on() -> None:
    job = leasing(((0, 0, 10), 1), ((0, 10, 20), 5))
    job.open_all(SPEC, "whole", used=packed((0, 0, 10)), step=3)
    assert spans(job.line()) == [(0, 10, 1, [1], "used"), (10, 100, 0, [], "ahead")]
    assert job.account().sound


def test_a_shard_that_was_half_used_counts_as_the_state_has_it() -> None:
    job = leasing(((0, 0, 10), 0))
    job.open_all(SPEC, "whole", used=packed((0, 0, 14)), step=3)
    assert spans(job.line()) == [(0, 14, 1, [1], "used"), (14, 100, 0, [], "ahead")]


def test_leased_data_that_is_not_restored_with_its_model_is_used_twice() -> None:
    job = leasing(((0, 0, 10), 0), ((0, 10, 20), 5))
    job.open_all(SPEC, "fresh", step=3)
    job.lend("a", 20)
    job.use("a", (0, 0, 20), step=4)
    assert spans(job.line())[:2] == [(0, 10, 2, [1, 2], "used"), (10, 20, 1, [2], "used")]


def test_leased_data_that_is_restored_without_its_model_is_lost() -> None:
    job = leasing(((0, 0, 10), 1))
    job.open_all(SPEC, "whole", used=packed((0, 0, 10)), step=0)
    assert spans(job.line())[0] == (0, 10, 0, [], "lost")


def test_data_that_is_not_exact_never_goes_back() -> None:
    spec = replace(SPEC, exact=False)
    job = Lender("a")
    job.open_all(spec)
    job.lend("a", 20)
    job.use("a", (0, 0, 20), step=7)
    job.break_round()
    job.open_all(spec)
    assert spans(job.line())[0] == (0, 20, 1, [1], "used")
    assert job.account().sound


def test_a_long_round_keeps_a_bounded_number_of_ranges_of_steps() -> None:
    spec = replace(SPEC, size=10_000)
    job = Lender("a")
    job.open_all(spec)
    job.lend("a", 2000)
    for step in range(2000):
        job.use("a", (0, step, step + 1), step=step)
    ranges = job.data.history.rounds[-1].ranges
    assert MOST_RANGES / 4 < len(ranges) <= MOST_RANGES
    job.break_round()
    job.open_all(spec, "whole", used=packed((0, 0, 1000)), step=1000)
    assert spans(job.line())[0] == (0, 1000, 1, [1], "used")


def test_a_stream_is_accounted_for_by_partition() -> None:
    spec = DataSpec(name="d", sharing="leases", partitions=("p", "q"), shard=10)
    job = Lender("a")
    job.open_all(spec, "whole", used=packed((0, 0, 40)), step=4)
    job.lend("a", 4)
    job.use("a", (0, 40, 60), (1, 0, 10), step=5)
    p, q = job.account().lines
    assert (p.name, spans(p)) == ("p", [(0, 40, 1, [0], "used"), (40, 60, 1, [1], "used")])
    assert (q.name, spans(q)) == ("q", [(0, 10, 1, [1], "used")])


def test_records_of_each_rank_are_counted() -> None:
    job = Lender("a")
    job.open_all(SPEC)
    job.lend("a", 20)
    job.use("a", (0, 0, 5), rank=1)
    job.use("a", (0, 5, 12), rank=0)
    assert job.data.by_rank == {1: 5, 0: 7}
