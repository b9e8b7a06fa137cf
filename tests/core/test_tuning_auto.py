"""The search for a micro-batch, with made-up speeds and memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_tuning import opened, settle
from tuned_job import TunedJob

from holdfast.core import report
from holdfast.core.tuning import auto
from holdfast.core.tuning.auto import Choice, MicroBatchSearch
from holdfast.messages.tuning import LoaderMeasured, MemoryRoom

GIB = 1 << 30


def room(free_gib: float, total_gib: float = 100) -> MemoryRoom:
    return MemoryRoom(free_bytes=int(free_gib * GIB), total_bytes=int(total_gib * GIB))


def measured(*speeds: float, memory: MemoryRoom | None = None) -> list[LoaderMeasured]:
    free = memory or room(90)
    return [LoaderMeasured(version=0, steps_per_s=speed, memory=free) for speed in speeds]


def judged(
    search: MicroBatchSearch, size: int, speed: float, free: float = 90.0, **more: int
) -> Choice:
    about = {"most": 64, "limit": 0, **more}
    return auto.judge(search, auto.trial(size, measured(speed, memory=room(free))), **about)


def test_the_slowest_rank_and_the_one_with_the_least_memory_count() -> None:
    both = [*measured(5.0, memory=room(50)), *measured(3.0, memory=room(70))]
    found = auto.trial(8, both)
    assert (found.steps_per_s, found.memory) == (3.0, room(50))


def test_a_rank_whose_memory_is_not_known_counts_as_the_least() -> None:
    both = [*measured(5.0, memory=room(50)), *measured(3.0, memory=room(70, 0))]
    assert auto.trial(8, both).memory.total_bytes == 0


def test_it_doubles_while_steps_get_faster() -> None:
    search = MicroBatchSearch()
    assert judged(search, 8, 1.0) == Choice(16)
    assert judged(search, 16, 1.5) == Choice(32)
    assert not search.over


def test_it_goes_back_to_the_best_and_ends_when_steps_do_not_get_faster() -> None:
    search = MicroBatchSearch()
    judged(search, 8, 1.0)
    judged(search, 16, 1.5)
    assert judged(search, 32, 1.52) == Choice(16)
    assert (
        search.over
        == "micro-batch 32 (1.52 steps/s) is not faster than micro-batch 16 (1.5 steps/s)"
    )


def test_it_ends_at_the_share_of_a_rank() -> None:
    search = MicroBatchSearch()
    assert judged(search, 8, 1.0, most=12) == Choice(12)
    assert judged(search, 12, 1.4, most=12) == Choice(None)
    assert "all that a rank has in a step" in search.over


def test_it_never_tries_again_what_did_not_fit_into_memory() -> None:
    search = MicroBatchSearch()
    assert judged(search, 8, 1.0, limit=16) == Choice(None)
    assert search.over == "memory did not suffice for a micro-batch of 16"


@pytest.mark.parametrize(("free", "next"), [(31.0, 16), (29.0, None)])
def test_the_first_raise_needs_a_good_part_of_memory(free: float, next: int | None) -> None:
    assert judged(MicroBatchSearch(), 8, 1.0, free) == Choice(next)


@pytest.mark.parametrize(
    ("free", "next"),
    [
        (65.0, 32),  # 8 more records took 15 GiB: 16 more need 30, with the margin 36, of 65
        (45.0, None),  # 8 more took 35: 16 more would need 84
    ],
)
def test_later_raises_need_what_the_last_one_cost(free: float, next: int | None) -> None:
    search = MicroBatchSearch()
    judged(search, 8, 1.0, 80.0)
    assert judged(search, 16, 1.5, free) == Choice(next)


def test_without_knowing_memory_nothing_is_raised() -> None:
    search = MicroBatchSearch()
    found = auto.trial(8, measured(1.0, memory=MemoryRoom(free_bytes=0, total_bytes=0)))
    assert auto.judge(search, found, 64, 0) == Choice(None)
    assert "it is not known how much" in search.over


# ---- in a job ------------------------------------------------------------------------------------


def run_search(job: TunedJob, speed: Callable[[int], float]) -> None:
    """Let ranks measure each setting until the search is over."""
    for _ in range(20):
        job.measure(speed(job.all[0].config.micro_batch or 0))
        settle(job)
        assert len({rank.config for rank in job.all.values()}) == 1
        if job.tuned.search is not None and job.tuned.search.over:
            return
    raise AssertionError("the search does not come to an end")


def test_a_script_that_wants_it_gets_the_fastest_micro_batch() -> None:
    job = opened(auto=True)
    assert all(rank.measures for rank in job.all.values())
    run_search(job, lambda size: {8: 1.0, 16: 1.8, 32: 2.5, 64: 2.4}[size])
    assert {rank.config.micro_batch for rank in job.all.values()} == {32}
    assert len({tuple(rank.switched) for rank in job.all.values()}) == 1
    (found,) = report.tunings(job.job)
    assert found.auto == (
        "ended: micro-batch 64 (2.4 steps/s) is not faster than micro-batch 32 (2.5 steps/s)"
    )
    assert {change.by for change in found.changes} == {"automatic"}


def test_a_user_can_begin_a_search() -> None:
    job = opened()
    assert not any(rank.measures for rank in job.all.values())
    job.tune(auto=True)
    settle(job)
    assert all(rank.measures for rank in job.all.values())
    run_search(job, lambda size: float(size))
    assert job.all[0].config.micro_batch == 64


def test_a_user_who_chooses_ends_the_search() -> None:
    job = opened(auto=True)
    job.tune(micro_batch=24)
    settle(job)
    assert report.tunings(job.job)[0].auto == "ended: ann@host chose the settings"
    assert not any(rank.measures for rank in job.all.values())


def test_memory_that_runs_out_after_a_raise_ends_the_search_with_the_micro_batch_before() -> None:
    job = opened(auto=True)
    job.measure(1.0)
    settle(job)
    assert job.all[0].config.micro_batch == 16
    job.next_round(signal=9, oom=True)
    job.open()
    assert {rank.config.micro_batch for rank in job.all.values()} == {8}
    assert job.tuned.limit == 16
    assert (
        report.tunings(job.job)[0].auto == "ended: memory did not suffice for a micro-batch of 16"
    )


def test_the_search_goes_on_in_the_next_round() -> None:
    job = opened(auto=True)
    job.measure(1.0)
    settle(job)
    job.next_round(signal=9)
    job.open()
    assert all(rank.measures for rank in job.all.values())
    run_search(job, lambda size: {16: 2.0, 32: 1.9}[size])
    assert job.all[0].config.micro_batch == 16


def test_what_was_measured_with_other_settings_does_not_count() -> None:
    job = opened(auto=True)
    job.tuned.version = 5
    job.measure(1.0)
    assert job.tuned.unmeasured == 4
