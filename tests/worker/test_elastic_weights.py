"""Weights, learning rates and what ranks agree on before a step: for any split of the samples."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.worker.elastic.shared_batches import SharedBatch, shared_batches
from holdfast.worker.elastic.weights import (
    LossKind,
    Portion,
    check_choice,
    gradient_factor,
    loss_weight,
    rate_factor,
)

splits = st.lists(
    st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1, max_size=8
).filter(lambda ranks: sum(map(sum, ranks)) > 0)
"""Samples of each micro-batch of each rank."""


def averaged(ranks: list[list[int]], kind: LossKind, known: bool) -> list[float]:
    """How much each sample counts in the end, in micro-batches that have any."""
    world, total = len(ranks), sum(map(sum, ranks))
    after = 1.0 if known else gradient_factor(total, world)
    counts = []
    for samples in (samples for parts in ranks for samples in parts if samples):
        portion = Portion(samples=samples, total=total if known else None, last=True)
        in_loss = 1 / samples if kind == "mean" else 1.0
        counts.append(in_loss * loss_weight(portion, world, kind) / world * after)
    return counts


@pytest.mark.parametrize("known", [True, False], ids=["known", "summed"])
@pytest.mark.parametrize("kind", ["mean", "sum"])
@given(ranks=splits)
def test_every_sample_counts_the_same_however_they_are_split(
    kind: LossKind, known: bool, ranks: list[list[int]]
) -> None:
    total = sum(map(sum, ranks))
    for count in averaged(ranks, kind, known):
        assert math.isclose(count, 1 / total, rel_tol=1e-12)


@given(ranks=splits)
def test_weights_of_a_step_have_a_mean_of_one_over_the_ranks(ranks: list[list[int]]) -> None:
    world, total = len(ranks), sum(map(sum, ranks))
    weights = [
        Fraction(loss_weight(Portion(samples=samples, total=total, last=True), world, "mean"))
        for parts in ranks
        for samples in parts
    ]
    assert math.isclose(sum(weights) / world, 1, rel_tol=1e-12)


@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize("total", [None, 7])
def test_a_micro_batch_without_samples_counts_nothing(kind: LossKind, total: int | None) -> None:
    assert loss_weight(Portion(samples=0, total=total, last=True), 3, kind) == 0.0


def test_one_process_with_one_micro_batch_has_its_loss_as_it_is() -> None:
    assert loss_weight(Portion(samples=32, total=32, last=True), 1, "mean") == 1.0


@given(batch=st.integers(1, 1 << 20), reference=st.integers(1, 1 << 20))
def test_the_square_root_rule_applied_twice_is_the_linear_one(batch: int, reference: int) -> None:
    root = rate_factor(batch, reference, "sqrt")
    assert math.isclose(root * root, rate_factor(batch, reference, "linear"))
    assert rate_factor(batch, reference, "none") == 1.0


def test_a_world_that_doubles_doubles_the_rate_or_multiplies_it_by_its_root() -> None:
    assert rate_factor(512, 256, "linear") == 2.0
    assert rate_factor(512, 256, "sqrt") == math.sqrt(2)


def test_an_unknown_choice_is_named_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="loss is one of 'mean', 'sum', not 'median'"):
        check_choice("loss", "median", LossKind)


# ---- sources of different lengths ----

Source = list[list[int] | None]


def together(sources: list[Source], per_step: int) -> list[list[SharedBatch]]:
    """What each rank is handed, each in a thread of its own; a rank that leaves early breaks them."""
    meeting = Barrier(len(sources), timeout=10)
    said: list[list[int]] = [[]] * len(sources)

    def rank(own: int) -> list[SharedBatch]:
        def add(numbers: list[int]) -> list[int]:
            said[own] = numbers
            meeting.wait()
            sums = [sum(column) for column in zip(*said, strict=True)]
            meeting.wait()
            return sums

        world = len(sources)
        return list(shared_batches(sources[own], len, per_step, idle=[], world=world, add=add))

    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(rank, range(len(sources))))


sources = st.lists(
    st.lists(st.none() | st.lists(st.integers(), min_size=1, max_size=5), max_size=7),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60)
@given(sources=sources, per_step=st.integers(1, 3))
def test_every_batch_is_handed_out_once_in_steps_that_all_ranks_share(
    sources: list[Source], per_step: int
) -> None:
    ranks = together(sources, per_step)
    for source, handed in zip(sources, ranks, strict=True):
        assert [each.batch for each in handed if each.records] == [
            b for b in source if b is not None
        ]
    shape = [(each.index, each.of, each.global_records) for each in ranks[0]]
    for handed in ranks:
        assert [(each.index, each.of, each.global_records) for each in handed] == shape
        assert all(each.records == len(each.batch) for each in handed if each.records)
    starts = [n for n, each in enumerate(ranks[0]) if each.index == 0]
    for start in starts:
        count, total = ranks[0][start].of, ranks[0][start].global_records
        assert 1 <= count <= per_step
        assert [each.index for each in ranks[0][start : start + count]] == list(range(count))
        assert total == sum(e.records for handed in ranks for e in handed[start : start + count])


def test_a_rank_without_data_repeats_its_last_batch_without_weight() -> None:
    first, second = together([[[1, 2]], [[3], [4, 5, 6]]], per_step=1)
    assert [(each.batch, each.records) for each in first] == [([1, 2], 2), ([1, 2], 0)]
    assert [each.global_records for each in second] == [3, 3]


def test_a_rank_that_never_had_a_batch_says_what_to_pass() -> None:
    handed = shared_batches([], len, 1, idle=None, world=2, add=lambda _: [3, 1, 1])
    with pytest.raises(UsageError, match=r"has not had a batch yet, .* pass one as `idle`"):
        next(handed)


def test_nothing_now_is_not_the_end() -> None:
    ((only,),) = together([[None, None, [7], None]], per_step=2)
    assert (only.batch, only.records, only.global_records) == ([7], 1, 1)
