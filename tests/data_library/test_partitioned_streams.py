"""What ElasticIterableDataset promises: partitions in order, no gap and no repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from holdfast.data import ElasticDataLoader, ElasticIterableDataset, StreamRecord
from holdfast.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Feed(ElasticIterableDataset):
    """Partitions of given lengths, whose records say where they are from."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(name="feed")
        self.lengths = {f"p{index}": length for index, length in enumerate(lengths)}

    def partitions(self) -> Sequence[str]:
        return list(self.lengths)

    def read(self, partition: str, offset: int) -> Iterator[Any]:
        for at in range(offset, self.lengths[partition]):
            yield partition, at


def loader_of(feed: ElasticIterableDataset, batch: int = 2, **more: Any) -> ElasticDataLoader:
    return ElasticDataLoader(feed, batch, collate_fn=list, **more)


def everything(feed: Feed) -> list[tuple[str, int]]:
    return sorted((name, at) for name, length in feed.lengths.items() for at in range(length))


@given(st.data())
def test_no_record_is_missed_or_repeated_however_often_the_world_changes(
    data: st.DataObject,
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=4, max_size=8))
    parts, seen = None, []
    while True:
        world = data.draw(st.integers(1, 4))
        loaders = [loader_of(Feed(*lengths), 3, num_replicas=world, rank=r) for r in range(world)]
        drawn = 0
        for loader in loaders:
            if parts is not None:
                loader.load_state_dict(loader.merge_state_dicts(parts))
            batches = iter(loader)
            for _ in range(data.draw(st.integers(1, 4))):
                batch = next(batches, [])
                drawn += len(batch)
                seen += batch
        parts = [loader.state_dict() for loader in loaders]
        if not drawn:
            break
    assert sorted(seen) == everything(Feed(*lengths))
    for name in Feed(*lengths).lengths:
        offsets = [at for partition, at in seen if partition == name]
        assert offsets == sorted(offsets)


def test_partitions_are_read_by_turns() -> None:
    assert list(loader_of(Feed(3, 1, 2), 10)) == [
        [("p0", 0), ("p1", 0), ("p2", 0), ("p0", 1), ("p2", 1), ("p0", 2)]
    ]


@pytest.mark.parametrize("processes", [0, 2, 3])
def test_a_state_counts_what_was_handed_out_and_not_what_was_read(processes: int) -> None:
    feed = Feed(20, 20, 20, 20)
    loader = loader_of(feed, 3, num_workers=processes)
    batches = iter(loader)
    seen = [record for _ in range(4) for record in next(batches)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert sum(state["offsets"].values()) == 12
    del batches
    other = loader_of(Feed(20, 20, 20, 20), 3, num_workers=1)
    other.load_state_dict(state)
    assert sorted(seen + [record for batch in other for record in batch]) == everything(feed)


def test_the_union_of_states_takes_the_larger_offset() -> None:
    feed = Feed(9, 9)
    parts = [{"version": 1, "name": "feed", "offsets": o} for o in ({"p0": 5, "p1": 1}, {"p1": 4})]
    assert feed.merge_state_dicts(parts)["offsets"] == {"p0": 5, "p1": 4}
    with pytest.raises(DataError, match="no state to merge"):
        feed.merge_state_dicts([])


def test_only_loaders_of_streams_merge_states() -> None:
    assert hasattr(loader_of(Feed(1)), "merge_state_dicts")
    assert not hasattr(ElasticDataLoader(range(3)), "merge_state_dicts")


def test_offsets_may_have_gaps() -> None:
    class Compacted(Feed):
        def read(self, partition: str, offset: int) -> Iterator[Any]:
            for at in (3, 7, 8, 20):
                if at >= offset:
                    yield StreamRecord(at, at + 1)

    loader = loader_of(Compacted(1))
    assert next(iter(loader)) == [3, 7]
    assert loader.state_dict()["offsets"] == {"p0": 8}
    assert list(loader) == [[8, 20]]


def test_a_partition_that_is_new_begins_where_the_stream_says() -> None:
    class Late(Feed):
        def first_offset(self, partition: str) -> int:
            return 4

    loader = loader_of(Late(6, 6), 9)
    loader.load_state_dict({"version": 1, "name": "feed", "offsets": {"p0": 5}})
    assert list(loader) == [[("p0", 5), ("p1", 4), ("p1", 5)]]


def test_a_stream_can_be_read_record_by_record() -> None:
    feed = Feed(2, 2)
    records = iter(feed)
    assert [next(records) for _ in range(3)] == [("p0", 0), ("p1", 0), ("p0", 1)]
    assert feed.state_dict()["offsets"] == {"p0": 2, "p1": 1}


def test_a_batch_tells_how_many_records_it_has() -> None:
    loader = loader_of(Feed(5), 3)
    found = []
    for _ in loader:
        assert loader.current is not None
        found.append(loader.current.records)
    assert found == [3, 2]


def test_a_state_loaded_in_an_iteration_ends_it() -> None:
    loader = loader_of(Feed(9), 2)
    batches = iter(loader)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="out of date"):
        next(batches)
    assert next(iter(loader)) == [("p0", 0), ("p0", 1)]


# ---- what is refused -----------------------------------------------------------------------------


def test_more_ranks_than_partitions_are_refused() -> None:
    with pytest.raises(DataError, match="'feed' has 2 partitions for 3 ranks"):
        next(iter(loader_of(Feed(1, 1), num_replicas=3, rank=2)))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"name": "feed", "offsets": {}}, "not a state of a data set"),
        ({"version": 1, "name": "other", "offsets": {}}, "name was 'other' .* is 'feed' now"),
        ({"version": 1, "name": "feed"}, "no offsets"),
        ({"version": 1, "name": "feed", "offsets": {"p0": -1}}, "no offsets"),
        ({"version": 1, "name": "feed", "offsets": {"p0": "1"}}, "no offsets"),
        ({"version": 1, "name": "feed", "offsets": {"p7": 1}}, "does not have: p7"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, Any], said: str) -> None:
    loader = loader_of(Feed(3))
    before = loader.state_dict()
    with pytest.raises(DataError, match=said):
        loader.load_state_dict(state)
    assert loader.state_dict() == before


class Torn(Feed):
    def read(self, partition: str, offset: int) -> Iterator[Any]:
        for record in super().read(partition, offset):
            if record == ("p1", 2):
                raise OSError("torn")
            yield record


@pytest.mark.parametrize("processes", [0, 2])
def test_a_partition_that_cannot_be_read_is_named(processes: int) -> None:
    loader = loader_of(Torn(9, 9), 1, num_workers=processes)
    with pytest.raises(DataError, match="'feed': partition 'p1' cannot be read at offset 2") as e:
        list(loader)
    assert isinstance(e.value.__cause__, OSError)
    assert loader.state_dict()["offsets"]["p1"] == 2


def test_an_offset_that_does_not_grow_is_refused() -> None:
    class Stuck(Feed):
        def read(self, partition: str, offset: int) -> Iterator[Any]:
            yield StreamRecord(0, offset)

    with pytest.raises(DataError, match="next_offset 0 does not come after 0"):
        list(loader_of(Stuck(3)))


def test_loader_processes_of_torch_are_refused() -> None:
    with pytest.raises(UsageError, match=r"use holdfast\.data\.ElasticDataLoader"):
        list(DataLoader(Feed(4), num_workers=1))


@pytest.mark.parametrize(
    "arguments", [{"shuffle": True}, {"global_batch": 4}, {"pad": True}], ids=str
)
def test_what_needs_a_size_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="a stream has no size"):
        loader_of(Feed(3), **arguments)
    loader = loader_of(Feed(3))
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
    with pytest.raises(UsageError, match="has no epochs"):
        loader.set_epoch(1)


@pytest.mark.parametrize(
    ("names", "said"), [([], "has no partitions"), (["a", "a"], "each once"), ([1], "names")]
)
def test_partitions_must_be_names(names: list[Any], said: str) -> None:
    class Odd(Feed):
        def partitions(self) -> Sequence[str]:
            return names

    with pytest.raises(DataError, match=said):
        list(loader_of(Odd()))


class Asking(Feed):
    def read(self, partition: str, offset: int) -> Iterator[Any]:
        yield type(get_worker_info().dataset).__name__


def test_loader_processes_know_the_users_stream() -> None:
    assert list(loader_of(Asking(1), num_workers=1)) == [["Asking"]]
