"""Shards are lent, used, given back and given up, each position in one place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from driver import revived
from lending import (
    LEASES,
    LOCKSTEP,
    Lender,
    answers,
    denial,
    finished,
    lent,
    packed,
    used_by,
)
from msgspec.structs import replace

from holdfast.core.shards import grid
from holdfast.core.shards.state import Shards
from holdfast.messages.actions import Finish, LendShards
from holdfast.messages.data import DataSpec, Span
from holdfast.messages.requests import DataOpened
from holdfast.messages.spans import SpanSet

STREAM = DataSpec(name="d", sharing="leases", partitions=("p", "q", "r"), shard=10)


def opened(*nodes: str, **spec: Any) -> Lender:
    job = Lender(*nodes)
    job.open_all(replace(LEASES, **spec))
    return job


# ---- opening -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"size": None}, "neither a size nor partitions"),
        ({"partitions": ("p",)}, "a stream has no size"),
        ({"size": None, "partitions": ("p", "p")}, "the same name"),
        ({"size": None, "partitions": ("p",), "order": "records"}, "a stream has no order"),
        ({"size": None, "partitions": ("p",), "epochs": 2}, "a stream has no epochs"),
        ({"sub_epochs": 101}, "cannot be divided into 101 sub-epochs"),
    ],
)
def test_a_description_that_is_wrong_in_itself_is_denied(spec: dict[str, Any], words: str) -> None:
    assert words in denial(Lender().open(0, replace(LEASES, **spec)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 99}, "has size 100 in this job, not 99; use another name"),
        ({"seed": 7}, "has seed 0 in this job, not 7"),
        ({"shard": 5}, "has shard 10 in this job, not 5"),
        ({"sharing": "lockstep"}, "has sharing leases in this job, not lockstep"),
    ],
)
def test_the_first_description_of_a_name_holds(change: dict[str, Any], words: str) -> None:
    job = Lender()
    assert isinstance(job.open(0), DataOpened)
    assert words in denial(job.open(1, replace(LEASES, **change)))
    job.break_round()
    assert words in denial(job.open(1, replace(LEASES, **change)))


def test_ranks_that_begin_afresh_are_answered_at_once() -> None:
    job = Lender()
    for rank in range(4):
        answer = job.open(rank)
        assert SpanSet.unpack(answer.used) == SpanSet()


def test_ranks_with_parts_wait_for_one_with_the_whole_state() -> None:
    job = Lender()
    for rank in (1, 2, 3):
        assert job.open(rank, resumed="part", step=5) is None
    assert job.lend("a") == [], "nothing is lent before it is known what was used"
    state = packed((0, 0, 30))
    told = job.ask(0, resumed="whole", used=state, step=5)
    assert {rank: one.used for rank, one in answers(told).items()} == dict.fromkeys(range(4), state)
    assert lent(told) == {"a": [(0, 30, 40)]}, "what was wanted meanwhile is lent now"


def test_ranks_that_all_have_parts_alone_are_told_what_is_missing() -> None:
    job = Lender("a")
    assert job.open(0, resumed="part") is None
    told = answers(job.ask(1, resumed="part"))
    assert "none the state of all ranks" in denial(told[0])
    assert "rank 0 has to restore" in denial(told[1])


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("fresh", "whole", "rank 1 restored a state (step 0), and rank 0 begins afresh"),
        ("fresh", "part", "rank 1 restored its part (step 0), and rank 0 begins afresh"),
        ("whole", "fresh", "rank 1 begins afresh (step 0), and rank 0 restored a state"),
    ],
)
def test_ranks_that_contradict_each_other_are_denied(first: str, second: str, words: str) -> None:
    job, state = Lender(), packed((0, 0, 30))
    assert isinstance(job.open(0, resumed=first, used=state), DataOpened)
    why = denial(job.open(1, resumed=second, used=state))
    assert words in why
    assert "all ranks must restore the same checkpoint" in why


def test_a_rank_that_begins_afresh_contradicts_those_that_wait_with_their_parts() -> None:
    job = Lender()
    assert job.open(1, resumed="part", step=5) is None
    why = denial(job.open(0, resumed="fresh"))
    assert "rank 0 begins afresh (step 0), and rank 1 restored its part" in why
    assert job.open(0, resumed="whole", used=packed((0, 0, 5))).used == packed((0, 0, 5))


@pytest.mark.parametrize("spec", [LEASES, LOCKSTEP])
def test_two_whole_states_that_differ_are_denied(spec: DataSpec) -> None:
    job = Lender()
    job.open(0, spec, "whole", used=packed((0, 0, 30)))
    assert isinstance(job.open(2, spec, "whole", used=packed((0, 0, 30))), DataOpened)
    why = denial(job.open(1, spec, "whole", used=packed((0, 0, 40))))
    assert "rank 1 restored a state (step 0), and rank 0 restored another state" in why


def test_a_damaged_state_is_denied() -> None:
    assert "state is damaged" in denial(Lender().open(0, resumed="whole", used=b"no state"))
    far = SpanSet.of([Span(1 << 40, 0, 5)]).pack()
    assert "state is damaged" in denial(Lender().open(0, resumed="whole", used=far))


@pytest.mark.parametrize("spec", [LEASES, LOCKSTEP])
def test_a_data_set_that_shrank_since_the_checkpoint_is_denied(spec: DataSpec) -> None:
    why = denial(Lender().open(0, spec, "whole", used=packed((0, 0, 101))))
    assert "has 100 records, and the checkpoint has used its record number 101" in why
    assert "shrunk" in why


def test_a_stream_that_lost_a_partition_since_the_checkpoint_is_denied() -> None:
    why = denial(Lender().open(0, STREAM, "whole", used=packed((3, 0, 5))))
    assert "has 3 partitions, and the checkpoint knows of more" in why


def test_lockstep_is_answered_with_what_was_given() -> None:
    job, state = Lender(), packed((2, 0, 30))
    answer = job.open(3, LOCKSTEP, "whole", used=state, step=9)
    restored = SpanSet.unpack(answer.used)
    assert restored.has(Span(2, 0, 30))
    assert not restored.within(Span(2, 30, 100))
    assert job.data.history.rounds[-1].step == 9


def test_a_rank_that_opens_late_hears_what_was_used_before_its_round() -> None:
    job = Lender()
    job.open(0, resumed="whole", used=packed((0, 0, 30)))
    job.lend("a", 2)
    job.use("a", (0, 30, 40))
    assert job.open(3, resumed="part").used == packed((0, 0, 30))


# ---- lending -------------------------------------------------------------------------------------


def test_shards_side_by_side_are_lent_as_one_span() -> None:
    job = opened("a", shard=1)
    assert job.lend("a", 20) == [(0, 0, 20)]
    assert job.lend("a", 5) == [(0, 20, 25)]


def test_what_came_back_is_lent_first_the_lowest_first() -> None:
    job = opened("a", shard=1)
    job.lend("a", 30)
    job.report("a", returned=[Span(0, 20, 23), Span(0, 4, 6)])
    assert job.lend("a", 4) == [(0, 4, 6), (0, 20, 22)]
    assert job.lend("a", 2) == [(0, 22, 23), (0, 30, 31)]


def test_the_last_shard_of_an_epoch_may_be_short_and_none_lies_in_two() -> None:
    job = opened("a", size=25, epochs=2)
    spans = [span for _ in range(10) for span in job.lend("a")]
    assert spans == [(e, s, min(s + 10, 25)) for e in (0, 1) for s in (0, 10, 20)]


def test_no_shard_lies_in_two_sub_epochs() -> None:
    spec = replace(LEASES, size=50, sub_epochs=3, shard=8)
    cells = [piece for _, piece in grid.cells(spec, Span(0, 0, 50))]
    assert [(c.start, c.stop) for c in cells] == [
        *((0, 8), (8, 16), (16, 24), (24, 32), (32, 33), (33, 41), (41, 49), (49, 50)),
    ]
    job = opened("a", size=50, sub_epochs=3, shard=8)
    spans = [span for _ in range(10) for span in job.lend("a")]
    assert spans == [(0, c.start, c.stop) for c in cells]


def test_the_next_epoch_begins_while_leases_of_the_last_are_out_and_these_return_first() -> None:
    job = opened("a", size=20, epochs=2)
    assert job.lend("a") + job.lend("a") + job.lend("a") == [(0, 0, 10), (0, 10, 20), (1, 0, 10)]
    job.report("a", returned=[Span(0, 10, 20)])
    assert job.lend("a") == [(0, 10, 20)]
    assert job.lend("a") == [(1, 10, 20)]


def test_grants_shrink_towards_the_end() -> None:
    job = opened("a", "b", size=64, shard=1)
    sizes = []
    while spans := job.lend("a", 1000):
        sizes.append(sum(stop - start for _, start, stop in spans))
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-4:] == [1, 1, 1, 1]
    assert sum(sizes) == 64


def test_a_node_waits_while_shards_are_out_and_gets_them_when_they_return() -> None:
    job = opened(size=10)
    assert job.lend("a") == [(0, 0, 10)]
    assert job.report("b", want=3) == [], "not finished: a shard is out that may come back"
    assert lent(job.report("a", returned=[Span(0, 0, 10)])) == {"b": [(0, 0, 10)]}


def test_everybody_hears_when_all_is_used() -> None:
    job = opened(size=10)
    job.lend("a")
    job.report("b", want=1)
    assert finished(job.use("a", (0, 0, 10))) == ["a", "b"]
    assert finished(job.report("b", want=1)) == ["b"], "and again if it asks again"


def test_a_node_that_comes_back_hears_its_leases_again_and_which_report_was_heard() -> None:
    job = opened(shard=1, sub_epochs=4)
    job.report("a", want=25, number=1)
    job.report("a", want=25, number=2)
    job.report("a", used=[used_by(0, (0, 3, 7))], number=3)
    job.cut_off("a")
    (again,) = [one for one in job.resume("a", 1, True) if isinstance(one, LendShards)]
    held = SpanSet.of(again.spans)
    assert held == job.data.leases["a"]
    assert held.count() == 25 + 18 - 4
    assert not any(span.start < 25 < span.stop for span in again.spans), "two sub-epochs in one"
    assert again.heard == 3


def test_a_node_that_comes_back_hears_that_all_is_finished() -> None:
    job = opened(size=10)
    job.lend("a")
    job.use("a", (0, 0, 10))
    job.cut_off("b")
    assert finished(job.resume("b", 1, True)) == ["b"]


def test_leases_of_a_lost_node_return_and_count_as_no_failure() -> None:
    job = opened("a", "b", "c", size=30, failures=1, exact=False)
    assert job.lend("a") == [(0, 0, 10)]
    job.lose("a")
    assert job.data.returned == SpanSet.of([Span(0, 0, 10)])
    job.after(1).all_ready()
    job.after(60).tick()
    job.open(0, replace(LEASES, size=30, failures=1, exact=False))
    assert job.lend("b") == [(0, 0, 10)]
    assert not job.data.failures


def test_reports_of_another_round_are_refused() -> None:
    job = opened("a", exact=False)
    job.lend("a", 3)
    job.break_round()
    job.open_all(replace(LEASES, exact=False))
    assert job.report("a", round=1, used=[used_by(0, (0, 0, 10))]) == []
    assert job.job.refused == {"ShardsReported: the shards are of another round": 1}
    assert job.lend("a") == [(0, 0, 10)]


def test_what_is_not_lent_to_a_node_cannot_be_used_by_it() -> None:
    job = opened()
    assert job.lend("a") == [(0, 0, 10)]
    job.use("b", (0, 0, 10), rank=2)
    assert job.job.refused == {"ShardsReported: none of the shards is lent to the node": 1}
    job.fail("b", (0, 0, 10))
    assert job.data.failures == {}
    job.use("a", (0, 5, 15))
    assert job.data.used == SpanSet.of([Span(0, 5, 10)])
    assert job.data.misfits == 25
    job.use("a", (0, 5, 10))
    assert job.data.misfits == 30, "what was used is not lent any more"


def test_the_last_words_of_a_broken_round_count_until_the_next_begins() -> None:
    job = opened(exact=False)
    job.lend("a", 2)
    job.after(1).exit(0, signal=9)
    assert job.report("a", want=5, used=[used_by(0, (0, 0, 10))]) == [], "nothing is lent"
    job.after(1).all_ready()
    job.after(1).start_all()
    job.open_all(replace(LEASES, exact=False))
    assert job.lend("a") == [(0, 10, 20)]


def test_spares_are_not_heard() -> None:
    job = opened()
    job.join("c")
    job.report("c", want=1)
    assert job.job.refused == {"ShardsReported: the node is not in the round": 1}


def test_a_data_set_that_nobody_opened_is_refused_by_name() -> None:
    job = Lender()
    job.report("a", want=1)
    reason = "ShardsReported: no rank has opened the data set in this round"
    assert job.job.refused == {reason: 1}


# ---- rounds --------------------------------------------------------------------------------------


def test_exact_data_goes_back_with_the_checkpoint() -> None:
    job = opened("a", shard=1)
    job.lend("a", 30)
    job.use("a", (0, 0, 20))
    job.break_round()
    job.open_all(replace(LEASES, shard=1), "whole", used=packed((0, 0, 5), (0, 8, 10)), step=3)
    assert job.lend("a", 6) == [(0, 5, 8), (0, 10, 13)]


def test_data_that_is_not_exact_stays_used() -> None:
    spec = replace(LEASES, shard=1, exact=False)
    job = Lender("a")
    job.open_all(spec)
    job.lend("a", 30)
    job.use("a", (0, 3, 20))
    job.break_round()
    answer = job.open(0, spec)
    assert SpanSet.unpack(answer.used) == SpanSet.of([Span(0, 3, 20)])
    assert job.lend("a", 5) == [(0, 0, 3), (0, 20, 22)]


def test_a_state_with_more_epochs_than_there_are_is_finished() -> None:
    job = Lender("a")
    told = job.ask(0, resumed="whole", used=packed((0, 0, 100), (1, 0, 100), (2, 0, 50)))
    assert finished(told) == ["a"]


# ---- failures ------------------------------------------------------------------------------------


def test_a_shard_that_fails_is_lent_again_and_ends_the_job_at_the_third_time() -> None:
    job = opened("a")
    for _ in range(2):
        assert (0, 0, 10) in job.lend("a")
        job.fail("a", (0, 0, 10))
    job.lend("a")
    ends = [one for one in job.fail("a", (0, 0, 10)) if isinstance(one, Finish)]
    assert ends[0].code == 93
    assert "positions 0 to 9 of epoch 0 of data set 'd' failed 3 times" in ends[0].reason
    assert "rank 0: ValueError: bad" in ends[0].reason


def test_failures_count_across_rounds_and_success_forgets_them() -> None:
    job = opened("a")
    job.lend("a")
    job.fail("a", (0, 0, 10))
    job.break_round()
    job.open_all()
    job.lend("a")
    job.fail("a", (0, 0, 10))
    assert job.data.failures == {0: {0: 2}}
    job.lend("a")
    job.use("a", (0, 0, 10))
    assert job.data.failures == {}


def test_a_shard_may_be_left_out_and_is_listed() -> None:
    job = opened("a", skip=True, failures=1, size=20)
    job.lend("a")
    job.lend("a")
    job.fail("a", (0, 10, 20), "OSError: no such file")
    incident = job.job.incidents[-1]
    assert incident.kind == "data"
    assert "positions 10 to 19 of epoch 0 of data set 'd' failed 1 times" in incident.signature
    assert finished(job.use("a", (0, 0, 10))) == ["a"]
    account = job.account()
    assert not account.sound
    assert [(s.line, s.start, s.stop, s.error) for s in account.skipped] == [
        (0, 10, 20, "OSError: no such file")
    ]
    assert (job.line().once, job.line().skipped, job.line().lost) == (10, 10, 0)
    job.break_round()
    job.open_all(replace(LEASES, skip=True, failures=1, size=20))
    assert job.lend("a") == [(0, 0, 10)]
    assert job.lend("a") == [], "it stays left out"


def test_one_bad_shard_of_a_span_is_left_out_alone() -> None:
    job = opened("a", skip=True, failures=2, shard=5)
    assert job.lend("a", 2) == [(0, 0, 10)]
    job.fail("a", (0, 5, 10))
    assert job.lend("a", 1) == [(0, 5, 10)]
    job.fail("a", (0, 0, 10))
    assert [one.span for one in job.data.skipped] == [Span(0, 5, 10)]
    assert job.data.returned == SpanSet.of([Span(0, 0, 5)])


# ---- streams -------------------------------------------------------------------------------------


def test_partitions_are_lent_by_turns_each_to_one_node_and_in_order() -> None:
    job = Lender()
    job.open_all(STREAM)
    assert job.lend("a", 4) == [(0, 0, 20), (1, 0, 20)], "no more than its share of three"
    assert job.lend("b", 4) == [(2, 0, 40)]
    assert job.lend("a", 2) == [(0, 20, 30), (1, 20, 30)]
    job.report("a", returned=[Span(0, 0, 30)])
    assert job.lend("b", 2) == [(2, 40, 50), (0, 0, 10)], "partition 0 was free again"
    job.use("a", (1, 0, 30))
    assert job.lend("a", 2) == [(1, 30, 50)]


def test_a_stream_goes_on_at_the_restored_offsets() -> None:
    job = Lender("a")
    job.open_all(STREAM, "whole", used=packed((0, 0, 1000), (2, 0, 55)), step=4)
    assert job.lend("a", 3) == [(0, 1000, 1010), (1, 0, 10), (2, 55, 60)]


def test_a_node_gets_a_partition_once_it_is_free() -> None:
    job = Lender("a", "b")
    job.open_all(replace(STREAM, partitions=("p",)))
    assert job.lend("a") == [(0, 0, 10)]
    assert job.lend("b") == []
    assert lent(job.use("a", (0, 0, 10))) == {"b": [(0, 10, 20)]}


# ---- endless data --------------------------------------------------------------------------------


def test_endless_epochs_cost_no_memory() -> None:
    job = opened("a", size=20, epochs=0)
    sizes = []
    for number in range(3000):
        for span in job.lend("a"):
            job.use("a", span, step=number)
        if number % 500 == 499:
            job.history.clear()
            sizes.append(len(msgspec.json.encode(job.data)))
    assert job.data.used.below == 1500
    assert max(sizes) < 1.1 * sizes[0] + 100
    assert job.account().sound
    assert job.account().whole_lines == 1496
    assert revived(job.job).of(Shards) == job.job.of(Shards)


def test_gaps_in_all_epochs_of_a_restored_state_are_lent_first() -> None:
    spec = replace(LEASES, size=20, epochs=3)
    job = Lender("a")
    state = packed((0, 0, 10), (1, 10, 20), (2, 0, 5))
    job.open_all(spec, "whole", used=state, step=3)
    spans = [span for _ in range(9) for span in job.lend("a")]
    assert spans == [(0, 10, 20), (1, 0, 10), (2, 5, 10), (2, 10, 20)]


def test_a_new_job_goes_on_from_a_restored_state_of_data_that_is_not_exact() -> None:
    job = Lender("a")
    job.open_all(replace(LEASES, exact=False), resumed="whole", used=packed((0, 0, 30)))
    job.lend("a", 1)
    (lease,) = job.data.leases.values()
    assert [span.start for span in lease] == [30]
