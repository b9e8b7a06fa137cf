"""What ElasticSampler promises to torch's own DataLoader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from worlds_of_loaders import Numbers

from holdfast.data import ElasticSampler
from holdfast.errors import DataError, UsageError

WORLDS = st.integers(1, 9)


def samplers(world: int, size: int, **more: Any) -> list[ElasticSampler]:
    return [ElasticSampler(size, num_replicas=world, rank=rank, **more) for rank in range(world)]


@given(st.integers(1, 300), st.data())
def test_any_offset_resumes_with_any_number_of_replicas(size: int, data: st.DataObject) -> None:
    old, new = data.draw(WORLDS), data.draw(WORLDS)
    per_replica = data.draw(st.integers(0, size // old))
    before = samplers(old, size, seed=3)
    seen = [record for s in before for record in list(s)[:per_replica]]
    for sampler in before:
        sampler.advance(per_replica * old)
    after = samplers(new, size, seed=3)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
        seen += list(sampler)
    assert sorted(seen) == list(range(size))
    assert all(len(sampler) == len(list(sampler)) for sampler in after)


@given(st.integers(1, 300), WORLDS, st.integers(0, 299), st.booleans())
def test_padding_repeats_only_as_much_as_it_must(
    size: int, world: int, offset: int, shuffle: bool
) -> None:
    offset = min(offset, size)
    ranks = samplers(world, size, pad=True, shuffle=shuffle)
    for sampler in ranks:
        sampler.advance(offset)
    found = [list(sampler) for sampler in ranks]
    left = size - offset
    assert {len(records) for records in found} == {-(-left // world)} == {len(ranks[0])}
    counts = Counter(record for records in found for record in records)
    assert len(counts) == left
    assert counts.total() - left < world


@given(st.integers(1, 300), WORLDS)
def test_drop_last_leaves_out_only_what_does_not_go_round(size: int, world: int) -> None:
    found = [list(sampler) for sampler in samplers(world, size, drop_last=True)]
    assert {len(records) for records in found} == {size // world}
    counts = Counter(record for records in found for record in records)
    assert set(counts.values()) <= {1}


def test_replicas_take_turns() -> None:
    ranks = samplers(3, 10, shuffle=False)
    for sampler in ranks:
        sampler.advance(2)
    assert [list(sampler) for sampler in ranks] == [[2, 5, 8], [3, 6, 9], [4, 7]]


def test_an_offset_belongs_to_its_epoch_only() -> None:
    sampler = ElasticSampler(10)
    sampler.advance(6)
    sampler.set_epoch(0)
    assert sampler.position == 6
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.position) == (1, 0)
    assert sorted(sampler) == list(range(10))


def test_epochs_differ() -> None:
    sampler = ElasticSampler(100)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_a_loader_reads_ahead_and_the_state_does_not() -> None:
    sampler = ElasticSampler(Numbers(40), shuffle=False)
    loader = DataLoader(Numbers(40), batch_size=4, sampler=sampler, num_workers=1)
    for _, batch in zip(range(2), loader, strict=False):
        sampler.advance(len(batch))
    other = ElasticSampler(Numbers(40), shuffle=False)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(range(8, 40))


def test_a_state_without_knowing_what_was_used_is_refused() -> None:
    sampler = ElasticSampler(10)
    assert sampler.state_dict()["position"] == 0
    drawn = iter(sampler)
    assert sampler.state_dict()["position"] == 0
    next(drawn)
    with pytest.raises(UsageError, match=r"advance\(records\) after each step"):
        sampler.state_dict()
    sampler.advance(1)
    assert sampler.state_dict()["position"] == 1
    sampler.set_epoch(1)
    next(iter(sampler))
    with pytest.raises(UsageError, match="advance"):
        sampler.state_dict()


def test_an_epoch_that_is_used_up_is_not_taken_for_an_empty_one() -> None:
    sampler = ElasticSampler(4)
    list(sampler)
    sampler.advance(4)
    with pytest.raises(UsageError, match=r"all records of epoch 0 are used: call set_epoch\(1\)"):
        iter(sampler)
    restored = ElasticSampler(4)
    restored.load_state_dict(sampler.state_dict())
    assert list(restored) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 9}, "size was 9 when the state was saved and is 10 now"),
        ({"seed": 1}, "seed was 1 when the state was saved and is 0 now"),
        ({"order": "plain"}, "order was 'plain'"),
        ({"position": 11}, "position 11 of the state is none from 0 to 10"),
        ({"epoch": "1"}, "epoch '1' of the state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    sampler = ElasticSampler(10)
    before = sampler.state_dict()
    with pytest.raises(DataError, match=said):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ElasticSampler(-1), "size=-1"),
        (lambda: ElasticSampler(3, seed=-1), "seed=-1"),
        (lambda: ElasticSampler(3, num_replicas=2, rank=2), "rank=2 is none of the 2 replicas"),
        (lambda: ElasticSampler(3, rank=0), "go together"),
        (lambda: ElasticSampler(3, drop_last=True, pad=True), "exclude each other"),
        (lambda: ElasticSampler(3).advance(-1), r"advance\(-1\)"),
        (lambda: ElasticSampler(3).advance(1.5), r"advance\(1.5\)"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_make_no_sense_are_refused(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_a_data_set_without_records_is_refused() -> None:
    with pytest.raises(DataError, match="has no records"):
        ElasticSampler([])


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks, of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_ranks_that_step_together_must_say_what_happens_to_a_remainder(two_ranks: None) -> None:
    """Rank 0 of DDP would wait for ever for the 6th record of rank 1."""
    with pytest.raises(UsageError, match="wait for ever"):
        iter(ElasticSampler(11))


@pytest.mark.parametrize(
    ("choice", "records"), [({"pad": True}, 6), ({"drop_last": True}, 5), ({"pad": False}, 6)]
)
def test_what_was_said_of_a_remainder_holds(
    two_ranks: None, choice: dict[str, bool], records: int
) -> None:
    assert len(list(ElasticSampler(11, **choice))) == records
