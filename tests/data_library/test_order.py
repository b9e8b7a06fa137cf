"""The order of an epoch: a permutation, the same for ever, and shuffled well."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import order as module
from holdfast.data.order import Order
from holdfast.errors import UsageError

SEEDS = st.integers(0, (1 << 63) - 1)
TEN_BILLION = 10_000_000_000


@given(st.integers(1, 3000), SEEDS, st.integers(0, 1 << 53))
def test_every_record_comes_once_and_is_found_again(size: int, seed: int, epoch: int) -> None:
    order = Order(size, "records", seed, epoch)
    records = [order.record(position) for position in range(size)]
    assert sorted(records) == list(range(size))
    assert [order.position(record) for record in records] == list(range(size))


@given(st.integers(1, 1000), st.integers(1, 1200), SEEDS)
def test_shards_are_shuffled_and_their_records_stay_together(
    size: int, shard: int, seed: int
) -> None:
    order = Order(size, "shards", seed, 2, shard)
    records = [order.record(position) for position in range(size)]
    assert sorted(records) == list(range(size))
    assert [order.position(record) for record in records] == list(range(size))
    breaks = [(a, b) for a, b in pairwise(records) if b != a + 1]
    assert all((a + 1) % shard == 0 or a + 1 == size for a, _ in breaks)
    assert all(b % shard == 0 for _, b in breaks)


@given(
    st.integers(1, 1 << 53),
    st.sampled_from(["plain", "shards", "records"]),
    SEEDS,
    st.integers(1, 1 << 20),
    st.data(),
)
def test_many_positions_at_once_give_what_each_one_gives(
    size: int, kind: str, seed: int, shard: int, data: st.DataObject
) -> None:
    order = Order(size, kind, seed, 0, shard)  # type: ignore[arg-type]
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=60))
    assert order.records(positions) == [order.record(position) for position in positions]
    some = range(0, min(size, 300), data.draw(st.integers(1, 9)))
    assert order.records(some) == [order.record(position) for position in some]


def test_without_numpy_the_order_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [Order(100_003, kind, 5, 1, 64) for kind in ("records", "shards")]  # type: ignore[arg-type]
    with_numpy = [order.records(range(0, 100_003, 97)) for order in orders]
    monkeypatch.setitem(sys.modules, "numpy", None)
    module._numpy.cache_clear()
    try:
        assert [order.records(range(0, 100_003, 97)) for order in orders] == with_numpy
    finally:
        module._numpy.cache_clear()


def test_the_order_never_changes() -> None:
    """A checkpoint holds a position: with other numbers here, saved jobs would repeat and miss data."""
    assert [Order(10, "records", 0, 0).record(p) for p in range(10)] == VECTORS["ten"]
    assert Order(1000, "records", 7, 3).records(range(8)) == VECTORS["thousand"]
    assert Order(100_000, "records", 7, 3).records(range(8)) == VECTORS["large"]
    ends = [0, 1, 5_000_000_000, TEN_BILLION - 1]
    assert [Order(TEN_BILLION, "records", 7, 3).record(p) for p in ends] == VECTORS["billions"]
    assert Order(105, "shards", 1, 1, 10).records(range(0, 105, 5)) == VECTORS["shards"]
    big = Order(1 << 53, "records", (1 << 63) - 1, 1 << 53)
    assert [big.record(p) for p in (0, (1 << 53) - 1)] == VECTORS["most"]


VECTORS: dict[str, list[int]] = {
    "ten": [1, 8, 4, 7, 5, 3, 9, 6, 2, 0],
    "thousand": [483, 241, 628, 194, 818, 578, 845, 205],
    "large": [95263, 82834, 64326, 58374, 67304, 42132, 22413, 77692],
    "billions": [4230436190, 7081593188, 3087606185, 8142662126],
    "shards": [30, 35, 90, 95, 40, 45, 80, 85, 0, 5, 10, 15, 50, 55, 20, 25, 60, 65, 70, 75, 100],
    "most": [5399079658961196, 5748128448723692],
}


# ---- how well it is shuffled ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_all_orders_of_a_few_records_are_as_likely(size: int) -> None:
    """Chi-squared over all permutations; the bound is five standard deviations off."""
    tries, cells = 60 * math.factorial(size), math.factorial(size)
    found = Counter(
        tuple(Order(size, "records", seed, 0).record(p) for p in range(size))
        for seed in range(tries)
    )
    expected = tries / cells
    chi2 = sum((found[key] - expected) ** 2 / expected for key in found)
    chi2 += (cells - len(found)) * expected
    assert abs(chi2 - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1))


def correlation(a: list[int], b: list[int]) -> float:
    return statistics.correlation(list(map(float, a)), list(map(float, b)))


@pytest.mark.parametrize("size", [10_007, 1 << 20, TEN_BILLION])
@pytest.mark.parametrize("seed", range(3))
def test_records_do_not_follow_positions_or_each_other(size: int, seed: int) -> None:
    positions = range(10_000)
    records = Order(size, "records", seed, 0).records(positions)
    limit = 5 / math.sqrt(len(positions))
    assert abs(correlation(list(positions), records)) < limit
    assert abs(correlation(records[:-1], records[1:])) < limit
    assert abs(correlation(records[::2], records[1::2])) < limit


def test_a_stretch_of_an_epoch_is_spread_over_all_records() -> None:
    """Chi-squared of a hundred equal parts of the data set, and of the last digits."""
    records = Order(TEN_BILLION, "records", 3, 0).records(range(5_000_000, 5_100_000))
    for cells in (
        Counter(record * 100 // TEN_BILLION for record in records),
        Counter(record % 100 for record in records),
    ):
        chi2 = sum((cells[cell] - 1000) ** 2 / 1000 for cell in range(100))
        assert abs(chi2 - 99) < 5 * math.sqrt(2 * 99)


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (1, 1)])
def test_epochs_and_seeds_differ(other: tuple[int, int]) -> None:
    size = 20_000
    first = Order(size, "records", 0, 0).records(range(size))
    second = Order(size, "records", *other).records(range(size))
    assert abs(correlation(first, second)) < 5 / math.sqrt(size)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10  # 1 is expected.


def test_steps_between_neighbours_differ_from_epoch_to_epoch() -> None:
    """Records that are neighbours in one epoch are not in the next."""
    size = 20_000
    pairs = [
        set(pairwise(Order(size, "records", 0, epoch).records(range(size)))) for epoch in (0, 1)
    ]
    assert len(pairs[0] & pairs[1]) < 10  # 1 is expected.


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, "plain", 0, 0), "size=0"),
        ((-5, "records", 0, 0), "size=-5"),
        (((1 << 53) + 1, "records", 0, 0), "size="),
        ((10, "random", 0, 0), "'random' is none of plain, shards, records"),
        ((10, "plain", -1, 0), "seed=-1"),
        ((10, "plain", 1 << 63, 0), "seed="),
        ((10, "plain", 0, -1), "epoch=-1"),
        ((10, "shards", 0, 0, 0), "shard=0"),
        ((10.5, "plain", 0, 0), "size=10.5"),
        ((True, "plain", 0, 0), "size=True"),
    ],
)
def test_what_is_no_order_is_refused(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Order(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_data_set_is_refused(position: int) -> None:
    order = Order(10, "records", 0, 0)
    for call in (order.record, order.position, lambda p: order.records([p])):
        with pytest.raises(IndexError, match="outside a data set of 10 records"):
            call(position)
