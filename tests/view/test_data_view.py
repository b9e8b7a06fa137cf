"""What people read of a job's data sets."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from reported import of_two_ranks

from holdfast.messages.reports import (
    DataAccount,
    GoodputReport,
    LineAccount,
    RoundAccount,
    SkippedShard,
    SpanUse,
)
from holdfast.messages.units import RoundNumber, StepNumber
from holdfast.view.data import (
    FAULTS_SHOWN,
    RECORDS_SHOWN,
    audit,
    is_as_promised,
    is_finished,
    listed,
    used,
)
from holdfast.view.summary import summary
from holdfast.view.terminal import print_status


def span(start: int, stop: int, *rounds: int, fate: str = "used") -> SpanUse:
    numbers = [RoundNumber(number) for number in rounds]
    return SpanUse(start=start, stop=stop, times=len(rounds), rounds=numbers, fate=fate)


def line(number: int, *spans: SpanUse, name: str = "", size: int | None = 100) -> LineAccount:
    counts = dict.fromkeys(("once", "more", "lost", "skipped", "ahead"), 0)
    for one in spans:
        fate = one.fate if one.fate != "used" else "once" if one.times == 1 else "more"
        counts[fate] += one.stop - one.start
    return LineAccount(line=number, name=name, size=size, spans=list(spans), **counts)


def account(*lines: LineAccount, **changes: Any) -> DataAccount:
    made = DataAccount(
        dataset="train",
        sharing="lockstep",
        task="training",
        exact=True,
        epochs=2,
        size=100,
        order="plain",
        seed=0,
        shard=1,
        sound=not any(one.more or one.lost or one.skipped for one in lines),
        whole_lines=0,
        lines=list(lines),
        rounds=[],
        skipped=[],
        misfits=0,
    )
    return replace(made, **changes)


def skipped(start: int, error: str = "ValueError: bad", **more: Any) -> SkippedShard:
    shard = {"dataset": "train", "line": 0, "partition": "", **more}
    return SkippedShard(start=start, stop=start + 10, error=error, round=RoundNumber(3), **shard)


WHOLE = span(0, 100, 1)


# ---- verdicts ----


def test_a_finished_data_set_is_exact() -> None:
    one = account(line(0, WHOLE), line(1, WHOLE))
    assert is_finished(one)
    assert audit(one) == [
        "data set train (training, shared in lockstep): exact",
        "  epoch 0: 100 once",
        "  epoch 1: 100 once",
    ]


def test_what_is_to_come_is_not_missing() -> None:
    one = account(line(0, span(0, 40, 1), span(40, 100, fate="ahead")))
    assert not is_finished(one)
    assert audit(one) == [
        "data set train (training, shared in lockstep): exact so far",
        "  epoch 0: 40 once, 60 to come",
    ]


def test_an_epoch_that_has_not_begun_is_to_come() -> None:
    one = account(line(0, WHOLE))
    assert not is_finished(one)
    (row,) = listed([one])
    assert row[4:] == ("1 of 2", "100", "100", "exact so far")


def test_a_data_set_without_end_is_never_finished() -> None:
    one = account(line(0, WHOLE), epochs=0)
    assert not is_finished(one)
    (row,) = listed([one])
    assert row[4:7] == ("1 of endless", "100", "no end")


def test_what_was_used_twice_and_never_is_named_with_its_rounds() -> None:
    spans = (span(0, 90, 1), span(90, 95, 1, 3), span(95, 96, 0, 2), span(96, 100, fate="lost"))
    one = account(line(0, *spans), epochs=1)
    assert audit(one) == [
        "data set train (training, shared in lockstep):"
        " not exact: 6 used more than once, 4 never used",
        "  epoch 0: 90 once, 6 more than once, 4 never",
        "  used 2 times: positions 90 to 94 of epoch 0, in rounds 1, 3",
        "  used 2 times: position 95 of epoch 0, in rounds an earlier job, 2",
        "  never used: positions 96 to 99 of epoch 0",
    ]


def test_repeats_are_no_fault_where_at_least_once_was_promised() -> None:
    repeated = line(0, span(0, 90, 1), span(90, 100, 1, 3))
    one = account(repeated, epochs=1, exact=False, sharing="leases", task="prediction")
    assert is_as_promised(one)
    assert not is_as_promised(account(repeated, epochs=1))
    assert audit(one) == [
        "data set train (prediction, shared by leases, at least once):"
        " at least once: 10 used more than once",
        "  epoch 0: 90 once, 10 more than once",
        "  used 2 times: positions 90 to 99 of epoch 0, in rounds 1, 3",
    ]


@pytest.mark.parametrize("fate", ["lost", "skipped"])
def test_what_was_not_used_is_a_fault_of_any_data_set(fate: str) -> None:
    repeated = (span(0, 80, 1), span(80, 90, 1, 3))
    one = account(line(0, *repeated, span(90, 100, fate=fate)), epochs=1, exact=False)
    assert not is_as_promised(one)
    assert ": not exact: 10 used more than once, 10" in audit(one)[0]


def test_shards_that_were_left_out_are_named_with_the_end_of_their_error() -> None:
    left = skipped(10, error="Traceback ...\n  File\nOSError: truncated\n")
    spans = (span(0, 10, 1), span(10, 20, fate="skipped"), span(20, 100, 1))
    lines = audit(account(line(0, *spans), epochs=1, skipped=[left], sharing="leases"))
    assert lines[0].endswith("shared by leases): not exact: 10 left out")
    assert lines[-1] == "  left out in round 3: positions 10 to 19 of epoch 0: OSError: truncated"


def test_rounds_are_told_with_the_steps_that_count() -> None:
    rounds = [
        RoundAccount(
            round=RoundNumber(1), resumed=StepNumber(0), until=StepNumber(30), records=960
        ),
        RoundAccount(round=RoundNumber(2), resumed=StepNumber(30), until=None, records=40),
    ]
    assert audit(account(line(0, WHOLE), rounds=rounds))[2:] == [
        "  round 1, from step 0 to 30: 960 records",
        "  round 2, from step 30 on: 40 records",
    ]


def test_epochs_that_are_listed_no_more_count_as_used() -> None:
    odd = line(1, span(0, 100, 1, 2))
    one = account(
        odd, line(5, span(0, 10, 2), span(10, 100, fate="ahead")), whole_lines=5, epochs=6
    )
    assert used(one) == 4 * 100 + 100 + 10
    assert audit(one)[1] == "  epochs 0 to 4 but for those below: each record once"
    assert "  epoch 1: 100 more than once" in audit(one)


def test_a_partition_of_a_stream_is_named() -> None:
    one = account(line(0, span(0, 500, 1), name="clicks-0", size=None), size=None)
    assert audit(one)[1] == "  partition clicks-0: 500 once"
    assert listed([one])[0][3:7] == ("stream", "-", "500", "no end")


def test_data_that_may_be_used_more_than_once_is_told_apart() -> None:
    one = account(line(0, WHOLE), exact=False, sharing="leases", misfits=3)
    assert audit(one)[0].startswith("data set train (training, shared by leases, at least once)")
    assert audit(one)[-1] == "  3 records were reported by nodes that had not been lent them"


def test_of_many_faults_the_first_are_told() -> None:
    spans = [span(n, n + 1, fate="lost" if n % 2 else "ahead") for n in range(100)]
    faults = [text for text in audit(account(line(0, *spans))) if "never used: " in text]
    assert len(faults) == FAULTS_SHOWN
    assert audit(account(line(0, *spans)))[-1] == "  ... and 30 more: --json has all"


# ---- records ----


def backwards(account: DataAccount, epoch: int, positions: range) -> list[int]:
    return [1000 * epoch + 99 - position for position in positions]


def test_records_are_named_where_their_order_is_known() -> None:
    one = account(line(2, span(0, 2, fate="lost"), span(2, 100, 1)), order="records")
    assert audit(one, backwards)[-1] == (
        "  never used: positions 0 to 1 of epoch 2: records 2099, 2098"
    )


def test_of_many_records_the_first_are_named() -> None:
    told = audit(account(line(0, span(0, 100, fate="lost"))), backwards)[-1]
    names = told.partition("records ")[2]
    assert names.count(",") == RECORDS_SHOWN
    assert names.endswith("84, ...")


# ---- status and summary ----


def test_shards_that_were_left_out_are_in_the_status_and_in_the_summary(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = replace(of_two_ranks(), skipped_shards=[skipped(10), skipped(0, partition="p")])
    told = [
        "left out: data set train: positions 10 to 19 of epoch 0: ValueError: bad",
        "left out: data set train: positions 0 to 9 of partition p: ValueError: bad",
    ]
    print_status(status)
    assert [text for text in capsys.readouterr().out.splitlines() if "left out" in text] == told
    goodput = GoodputReport(job="j", wall_s=1.0, ranks=2, seconds={}, goodput=0.0)
    assert [text for text in summary(status, goodput, []) if "left out" in text] == told


def test_of_many_shards_that_were_left_out_the_first_ten_are_told() -> None:
    status = replace(of_two_ranks(), skipped_shards=[skipped(10 * n) for n in range(25)])
    goodput = GoodputReport(job="j", wall_s=1.0, ranks=2, seconds={}, goodput=0.0)
    told = [text for text in summary(status, goodput, []) if "left out" in text]
    assert len(told) == 11
    assert told[-1] == "left out: 15 more shards (`holdfast data audit` has all)"
