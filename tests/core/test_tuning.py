"""Settings of loaders change on all ranks at the same step, or on none."""

from __future__ import annotations

import pytest
from driver import raised, replayed
from tuned_job import DATA, OWN, TunedJob

from holdfast.core import report
from holdfast.core.tuning import rules, wording
from holdfast.core.tuning.state import Tunings
from holdfast.messages.events import CoordinatorRestarted
from holdfast.messages.requests import AwaitTuning
from holdfast.messages.tuning import LoaderConfig


def opened(**loader: object) -> TunedJob:
    job = TunedJob(**loader)
    job.open()
    return job


def settle(job: TunedJob) -> None:
    """Go on until a change that is under way has been made, or given up."""
    for _ in range(2000):
        job.hear_all()
        if job.tuned.proposal is None:
            return
        job.advance_all(1)
    raise AssertionError("the change comes to no end")


def switches(job: TunedJob) -> list[list[tuple[int, int]]]:
    return [rank.switched for rank in job.all.values()]


def test_all_ranks_change_at_the_same_step() -> None:
    job = opened()
    job.advance_all(7)
    job.tune(micro_batch=16)
    settle(job)
    ((step, version),) = job.all[0].switched
    assert switches(job) == [[(step, version)]] * 4
    assert (version, step) == (1, 7 + 20)  # 2 s of steps that take 0.1 s
    assert {rank.config for rank in job.all.values()} == {LoaderConfig(micro_batch=16).over(OWN)}


def test_slow_steps_are_waited_for_by_their_number() -> None:
    job = TunedJob()
    job.loader["step_s"] = 30.0
    job.open()
    job.tune(workers=4)
    settle(job)
    assert job.all[0].switched == [(rules.MARGIN_STEPS, 1)]


def test_a_step_is_chosen_ahead_of_where_ranks_have_come_since_they_were_heard_of() -> None:
    job = opened()
    job.tune(prefetch=4)
    for rank in (0, 1, 2):
        job.hear(rank)
    job.after(10)  # 100 steps of 0.1 s, while the last rank is not heard of
    job.hear(3)
    assert job.tuned.proposal is not None
    assert job.tuned.proposal.at_step == 100 + 20


def test_if_one_rank_has_not_heard_of_it_none_changes_and_it_is_tried_again() -> None:
    job = opened()
    job.tune(micro_batch=16)
    for rank in range(4):  # All say where they are.
        job.hear(rank)
    for rank in range(3):
        job.hear(rank)
    cancelled = job.tuned.issued
    job.advance_all(20)
    assert switches(job) == [[]] * 4
    assert job.tuned.issued > cancelled
    settle(job)
    assert len(set(map(tuple, switches(job)))) == 1
    assert len(job.all[0].switched) == 1


def test_a_rank_that_hears_of_it_too_late_keeps_all_from_changing() -> None:
    job = opened()
    job.tune(micro_batch=16)
    for rank in range(4):
        job.hear(rank)
    for rank in range(3):
        job.hear(rank)
    job.all[3].step = 50
    job.hear(3)
    assert job.tuned.wanted is not None
    assert job.tuned.wanted.tries == 1
    settle(job)
    assert len({tuple(rank.switched) for rank in job.all.values()}) == 1
    assert job.all[0].switched[0][0] > 50


def test_after_four_tries_a_change_is_given_up_and_the_report_says_so() -> None:
    job = opened()
    job.tune(micro_batch=16)
    for _ in range(rules.TRIES):
        for rank in range(4):  # All say where they are.
            job.hear(rank)
        for rank in range(3):
            job.hear(rank)
        job.all[3].step += 1000
        job.hear(3)
    assert job.tuned.wanted is None
    (change,) = report.tunings(job.job)[0].changes
    assert change.outcome == "given up"
    assert "too late" in change.why
    assert switches(job) == [[]] * 4


def test_each_try_is_further_ahead() -> None:
    job = opened()
    job.tune(micro_batch=16)
    ahead = []
    for _ in range(3):
        for rank in range(4):
            job.hear(rank)
        assert job.tuned.proposal is not None
        assert job.tuned.proposal.at_step is not None
        ahead.append(job.tuned.proposal.at_step - max(one.step for one in job.all.values()))
        job.all[3].step += 1000
        job.hear(3)
        job.all[3].step -= 1000
        for rank in range(3):
            job.hear(rank)
    assert ahead[0] < ahead[1] < ahead[2]


def test_the_next_change_begins_when_all_ranks_have_made_the_last_one() -> None:
    job = opened()
    job.tune(micro_batch=16)
    job.hear_all()
    for _ in range(25):
        for rank in (0, 1, 2):
            job.advance(rank)
    job.tune(workers=4)
    assert all(not rank.inbox for rank in job.all.values()), "one rank has not changed yet"
    for _ in range(25):
        job.advance(3)
    settle(job)
    assert len(set(map(tuple, switches(job)))) == 1
    assert [version for _, version in job.all[0].switched] == [1, 2]
    assert job.all[0].config == LoaderConfig(micro_batch=16, workers=4).over(OWN)


def test_a_newer_wish_replaces_one_that_is_under_way_and_keeps_what_it_does_not_name() -> None:
    job = opened()
    job.tune(micro_batch=16, workers=1)
    job.hear_all()
    job.tune(by="bob@host", micro_batch=32)
    settle(job)
    assert job.all[0].config == LoaderConfig(micro_batch=32, workers=1).over(OWN)
    assert [one.outcome for one in job.tuned.changes] == ["replaced", "applied"]
    assert len(set(map(tuple, switches(job)))) == 1


def test_it_waits_until_all_ranks_have_opened_the_data_set() -> None:
    job = TunedJob()
    job.open(0, 1, 2)
    job.tune(micro_batch=16)
    assert job.tuned.proposal is None
    assert "waits for rank 3 to open" in (report.tunings(job.job)[0].pending or "")
    job.open(3)
    settle(job)
    assert len(job.all[3].switched) == 1


def test_a_data_set_that_is_opened_anew_begins_with_what_is_in_force() -> None:
    job = opened()
    job.tune(micro_batch=16)
    settle(job)
    job.open()
    assert {rank.config.micro_batch for rank in job.all.values()} == {16}
    job.tune(workers=0)
    settle(job)
    assert len({tuple(rank.switched) for rank in job.all.values()}) == 1
    assert all(rank.config.workers == 0 for rank in job.all.values())


def test_a_rank_that_opens_anew_cancels_what_is_proposed() -> None:
    job = opened()
    job.tune(micro_batch=16)
    job.hear_all()
    job.open(0)
    job.advance_all(30)
    assert switches(job) == [[]] * 4
    job.open(1, 2, 3)
    settle(job)
    assert len({tuple(rank.switched) for rank in job.all.values()}) == 1


def test_the_request_of_a_loader_that_was_replaced_is_refused() -> None:
    job = opened()
    one = job.all[0]
    again = AwaitTuning(dataset=DATA, opening=2, **job.loader)
    job.ask(0, 2, again)  # On another channel, because the old request waits on its own.
    assert [denied.reason for denied in one.denied] == ["data set"]
    job.await_tuning(0, 0)
    assert [denied.reason for denied in one.denied] == ["data set"] * 2


def test_a_new_round_has_the_settings_in_force_and_tries_the_rest_again() -> None:
    job = opened()
    job.tune(micro_batch=16)
    settle(job)
    job.tune(workers=4)
    job.hear_all()
    job.next_round()
    job.open()
    assert {rank.config for rank in job.all.values()} == {LoaderConfig(micro_batch=16).over(OWN)}
    settle(job)
    assert {rank.config.workers for rank in job.all.values()} == {4}
    assert len(set(map(tuple, switches(job)))) == 1


def test_once_a_rank_has_finished_nothing_changes() -> None:
    job = opened()
    job.tune(micro_batch=16)
    job.hear_all()
    job.exit(0, code=0)
    for rank in (1, 2, 3):
        for _ in range(30):
            job.advance(rank)
    assert switches(job) == [[]] * 4
    assert "a rank has finished" in (report.tunings(job.job)[0].pending or "")


def test_the_history_says_who_asked_and_where_it_was_applied() -> None:
    job = opened()
    job.tune(by="ann@host", micro_batch=16)
    settle(job)
    (change,) = report.tunings(job.job)[0].changes
    assert (change.by, change.outcome, change.version, change.round) == (
        "ann@host",
        "applied",
        1,
        1,
    )
    assert change.step == job.all[0].switched[0][0]


def test_settings_that_are_in_force_already_are_not_proposed() -> None:
    job = opened()
    job.tune(micro_batch=16)
    settle(job)
    issued = job.tuned.issued
    job.tune(micro_batch=16)
    assert job.tuned.issued == issued
    assert job.tuned.changes[-1].why == "it was so already"


def test_a_request_that_wants_an_answer_in_time_gets_one_without_news() -> None:
    job = opened()
    job.await_tuning(0, 0, for_s=5.0)
    assert not job.all[0].inbox
    job.after(5).tick()
    assert [notice.number for notice in job.all[0].inbox] == [0]


def test_a_restarted_coordinator_knows_what_was_settled() -> None:
    job = opened()
    job.tune(micro_batch=16)
    job.hear_all()
    for rank in (0, 1):
        for _ in range(30):
            job.advance(rank)
    job.job = replayed(job.history, revive_at=len(job.history) - 1)
    job.take(CoordinatorRestarted(at=job.at))
    for rank in (2, 3):
        for _ in range(30):
            job.advance(rank)
    assert len(set(map(tuple, switches(job)))) == 1
    assert len(job.all[3].switched) == 1


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "config", "auto", "words"),
    [
        (
            "other",
            {"workers": 1},
            False,
            "no data set is called other; choose one with --data: train",
        ),
        ("", {"micro_batch": 65}, False, "micro-batch 65: a rank has only 64 records in a step"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    dataset: str, config: dict[str, int], auto: bool, words: str
) -> None:
    job = opened()
    said = wording.refusal(job.job.of(Tunings), dataset, LoaderConfig(**config), auto)
    assert words in said


def test_a_job_without_such_a_loader_says_so() -> None:
    job = TunedJob()
    said = wording.refusal(job.job.of(Tunings), "", LoaderConfig(workers=1), False)
    assert said.startswith("no loader of the job can be tuned")


def test_of_several_data_sets_one_has_to_be_chosen() -> None:
    job = opened()
    job.job.of(Tunings).loaders["eval"] = job.tuned
    said = wording.refusal(job.job.of(Tunings), "", LoaderConfig(workers=1), False)
    assert said == "it has several data sets; choose one with --data: train, eval"


def test_no_micro_batch_is_searched_for_if_that_would_change_results() -> None:
    job = opened(most=0)
    said = wording.refusal(job.job.of(Tunings), DATA, LoaderConfig(), True)
    assert "give its loader a global_batch" in said


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "death",
    [
        {"code": 1, "raised": raised("OutOfMemoryError", "CUDA out of memory")},
        {"signal": 9, "oom": True},
    ],
)
def test_a_raise_after_which_memory_runs_out_is_undone(death: dict[str, object]) -> None:
    job = opened()
    job.tune(micro_batch=16, workers=4)
    settle(job)
    job.tune(micro_batch=32)
    settle(job)
    job.step_all(100)
    job.after(5).next_round(**death)
    job.open()
    assert {rank.config.micro_batch for rank in job.all.values()} == {16}
    assert {rank.version for rank in job.all.values()} == {3}
    assert "memory did not suffice for a micro-batch of 32" in job.tuned.changes[-1].why


def test_a_raise_that_was_good_for_long_is_not_blamed() -> None:
    job = opened()
    job.tune(micro_batch=16)
    settle(job)
    job.after(rules.TRIAL_S + 1).next_round(signal=9, oom=True)
    job.open()
    assert job.all[0].config.micro_batch == 16


def test_other_deaths_after_a_raise_change_nothing() -> None:
    job = opened()
    job.tune(micro_batch=16)
    settle(job)
    job.next_round(signal=9)
    job.open()
    assert job.all[0].config.micro_batch == 16
