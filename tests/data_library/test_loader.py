"""What ElasticDataLoader promises, all ranks of a world in one process."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from worlds_of_loaders import Numbers, counted, loaders, together

from holdfast.data import ElasticDataLoader, ElasticDataset
from holdfast.data.lockstep import bounds
from holdfast.errors import DataError, UsageError

WORLDS = st.integers(1, 7)


# ---- each record once, at any world size ---------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_each_record_comes_once_an_epoch_however_often_the_world_changes(
    data: st.DataObject,
) -> None:
    size = data.draw(st.integers(1, 120), "size")
    terms: dict[str, Any] = {
        "shuffle": data.draw(st.sampled_from([False, True, "shards"])),
        "shard": data.draw(st.integers(1, 20)),
        "seed": data.draw(st.integers(0, 99)),
        "sub_epochs": data.draw(st.integers(1, 4)),
    }
    state, seen = None, Counter[int]()
    while state is None or state["position"] < size:
        batch = data.draw(st.integers(1, 9), "batch")
        step_size = data.draw(st.none() | st.integers(1, 40), "global batch")
        world = loaders(data.draw(WORLDS, "world"), size, batch, global_batch=step_size, **terms)
        for loader in world:
            loader.load_state_dict(state or loader.state_dict())
        in_step = Counter[int]()
        for step in islice(together(world), data.draw(st.integers(5, 60), "batches")):
            in_step.update(counted(step))
            if step[0][1].index + 1 == step[0][1].of:
                seen, in_step = seen + in_step, Counter[int]()
        if state is not None and world[0].position == state["position"]:
            continue  # A step of more batches than were drawn: it comes again.
        state = world[0].state_dict()
        assert all(loader.state_dict() == state for loader in world)
        assert seen.total() == state["position"]
    assert sorted(seen.elements()) == list(range(size))


@given(st.integers(1, 300), WORLDS, st.integers(1, 9), st.booleans())
def test_a_whole_epoch_is_each_record_once(
    size: int, world: int, batch: int, shuffle: bool
) -> None:
    ranks = loaders(world, size, batch, shuffle=shuffle, seed=3)
    steps = list(together(ranks))
    assert sorted(r for step in steps for r in counted(step)) == list(range(size))
    assert all(len(loader) == len(steps) for loader in ranks)
    assert all(loader.left == 0 for loader in ranks)


@given(st.integers(1, 300), WORLDS, st.integers(1, 9), st.integers(0, 299))
def test_batches_are_full_but_for_the_last(size: int, world: int, batch: int, start: int) -> None:
    ranks = loaders(world, size, batch)
    at = min(start, size)
    for loader in ranks:
        loader.load_state_dict({**loader.state_dict(), "position": at})
    left = size - at
    steps = [[len(b) for b, _ in step] for step in together(ranks)]
    full, rest = divmod(left, world * batch)
    if rest and rest < world and full:
        assert steps[:-1] == [[batch] * world] * (full - 1)
        assert steps[-1] == [batch + (rank < rest) for rank in range(world)]
    else:
        assert steps[:full] == [[batch] * world] * full
        assert len(steps) == full + bool(rest)


@given(st.integers(1, 300), st.integers(1, 50), WORLDS, st.integers(1, 9))
def test_a_step_of_a_global_batch_has_just_as_many_records(
    size: int, step_size: int, world: int, batch: int
) -> None:
    ranks = loaders(world, size, batch, global_batch=step_size)
    of_steps: dict[int, list[list[int]]] = {}
    micro: dict[int, list[int]] = {}
    for step in together(ranks):
        (info, *others) = [info for _, info in step]
        assert all(
            (i.index, i.of, i.position) == (info.index, info.of, info.position) for i in others
        )
        of_steps.setdefault(info.position, []).append([i.records for _, i in step])
        micro[info.position] = [i.global_records for _, i in step]
    sizes = [sum(map(sum, batches)) for batches in of_steps.values()]
    rest = size % step_size
    last = [step_size + rest] if rest and rest < world and size > rest else [step_size, rest]
    assert sizes == ([step_size] * (size // step_size - 1) + [n for n in last if n])[-len(sizes) :]
    for position, batches in of_steps.items():
        total = sum(map(sum, batches))
        assert micro[position] == [total] * world
        assert len(batches) == math.ceil(math.ceil(total / world) / batch)
        shares = [sum(column) for column in zip(*batches, strict=True)]
        assert max(shares) - min(shares) <= 1
        for column in zip(*batches, strict=True):
            assert max(column) <= batch
            assert max(column) - min(column) <= 1


def test_a_position_belongs_to_the_rank_that_the_rule_says() -> None:
    ranks = loaders(3, 40, 4, global_batch=10)
    for loader in ranks:
        loader.load_state_dict({**loader.state_dict(), "position": 5})
    for step in together(ranks):
        for rank, (batch, info) in enumerate(step):
            assert all((p - 5) % 3 == rank for p in batch if info.records)


def test_a_rank_without_a_record_gets_one_that_does_not_count() -> None:
    ranks = loaders(4, 10, 2)
    for loader in ranks:
        loader.load_state_dict({**loader.state_dict(), "position": 8})
    ((first, second, third, fourth),) = together(ranks)
    assert [first[0], second[0]] == [[8], [9]]
    assert [third[0], fourth[0]] == [[8], [9]]
    assert [info.records for _, info in (first, second, third, fourth)] == [1, 1, 0, 0]
    assert third[1].global_records == 2


@given(st.integers(1, 200), WORLDS, st.integers(1, 9))
def test_drop_last_leaves_out_only_what_makes_no_full_step(
    size: int, world: int, batch: int
) -> None:
    ranks = loaders(world, size, batch, drop_last=True)
    steps = list(together(ranks))
    assert all([len(b) for b, _ in step] == [batch] * world for step in steps)
    assert sorted(r for step in steps for r in counted(step)) == list(
        range(size // (world * batch) * world * batch)
    )
    assert ranks[0].position == size
    assert len(ranks[0]) == len(steps)


@given(st.integers(1, 200), WORLDS, st.integers(1, 9))
def test_pad_makes_batches_equal_and_misses_none(size: int, world: int, batch: int) -> None:
    steps = list(together(loaders(world, size, batch, pad=True)))
    assert all(len({len(b) for b, _ in step}) == 1 for step in steps)
    assert all(info.records == len(b) for step in steps for b, info in step)
    assert all(i.global_records == sum(len(b) for b, _ in step) for step in steps for _, i in step)
    found = Counter(r for step in steps for b, _ in step for r in b)
    assert set(found) == set(range(size))
    assert found.total() - size < world


def test_epochs_are_shuffled_differently_and_alike_on_all_ranks() -> None:
    ranks = loaders(2, 60, 5, shuffle=True, seed=1)
    epochs = [[counted(step) for step in together(ranks)] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    again = loaders(2, 60, 5, shuffle=True, seed=1)
    assert [[counted(step) for step in together(again)] for _ in range(3)] == epochs


# ---- where it stands -----------------------------------------------------------------------------


def test_the_position_counts_what_was_handed_out() -> None:
    loader = ElasticDataLoader(Numbers(20), 4)
    batches = iter(loader)
    assert (loader.epoch, loader.position, loader.current) == (0, 0, None)
    next(batches)
    assert (loader.epoch, loader.position, loader.left) == (0, 4, 4)
    assert loader.current is not None
    assert loader.current.position == 0


def test_the_position_waits_for_the_last_micro_batch_of_a_step() -> None:
    loader = ElasticDataLoader(Numbers(20), 2, global_batch=6)
    positions = [loader.position for _ in loader]
    assert positions == [0, 0, 6, 6, 6, 12, 12, 12, 18, 20]


def test_a_step_that_was_begun_comes_again() -> None:
    loader = ElasticDataLoader(Numbers(20), 2, global_batch=6)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    other = ElasticDataLoader(Numbers(20), 2, global_batch=6)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other)).tolist() == [6, 7]


def test_one_iteration_after_the_other_is_one_epoch_after_the_other() -> None:
    loader = ElasticDataLoader(Numbers(5), 2)
    for epoch in range(3):
        assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]]
        assert loader.epoch == epoch


def test_epochs_go_on_in_the_middle_of_one() -> None:
    loader = ElasticDataLoader(Numbers(6), 2)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 4})
    found = [(epoch, [b.tolist() for b in loader]) for epoch in loader.epochs(3)]
    assert found == [(1, [[4, 5]]), (2, [[0, 1], [2, 3], [4, 5]])]


def test_a_state_of_the_end_of_an_epoch_is_of_that_epoch() -> None:
    loader = ElasticDataLoader(Numbers(6), 2)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 6)
    assert loader.state_dict() == state


def test_after_a_state_of_the_end_of_an_epoch_an_iteration_ends_at_once() -> None:
    loader = ElasticDataLoader(Numbers(6), 2)
    loader.load_state_dict({**loader.state_dict(), "position": 6})
    loader.set_epoch(0)
    assert list(loader) == []
    assert len(list(loader)) == 3
    assert loader.epoch == 1


def test_after_a_state_of_the_end_of_an_epoch_epochs_go_on_with_the_next() -> None:
    loader = ElasticDataLoader(Numbers(6), 2)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 6})
    assert [(epoch, len(list(loader))) for epoch in loader.epochs(4)] == [(2, 3), (3, 3)]
    assert list(loader.epochs(4)) == []


def test_epochs_without_a_number_have_no_end() -> None:
    epochs = ElasticDataLoader(Numbers(1)).epochs()
    assert [next(epochs) for _ in range(1000)][-1] == 999


def test_a_data_set_says_its_own_number_of_epochs_name_and_order() -> None:
    dataset = ElasticDataset(range(10), name="digits", epochs=2, shuffle=True, seed=5)
    loader = ElasticDataLoader(dataset, 5)
    told = ElasticDataLoader(Numbers(10), 5, shuffle=True, seed=5)
    assert [list(loader) for _ in loader.epochs()].__len__() == 2
    assert loader.state_dict()["name"] == "digits"
    loader.set_epoch(0)
    assert [b.tolist() for b in loader] == [b.tolist() for b in told]


def test_only_a_data_set_of_holdfast_says_anything_of_its_order() -> None:
    class Own(Numbers):
        seed, name, epochs, shuffle = None, 7, "all", print

    loader = ElasticDataLoader(Own(4), 4)
    assert [b.tolist() for b in loader] == [[0, 1, 2, 3]]
    assert (loader.name, loader.state_dict()["seed"]) == ("data", 0)


def test_a_script_that_leaves_an_epoch_goes_on_with_the_next() -> None:
    loader = ElasticDataLoader(Numbers(6), 2)
    found = []
    for epoch in loader.epochs(2):
        found.append((epoch, next(iter(loader)).tolist()))
    assert found == [(0, [0, 1]), (1, [0, 1])]


def test_set_epoch_goes_to_the_start_of_another_epoch_and_leaves_the_own_one_alone() -> None:
    loader = ElasticDataLoader(Numbers(6), 2)
    next(iter(loader))
    loader.set_epoch(0)
    assert loader.position == 2
    loader.set_epoch(3)
    assert (loader.epoch, loader.position) == (3, 0)
    assert len(list(loader)) == 3
    loader.set_epoch(3)
    assert (loader.epoch, loader.position) == (3, 0)
    with pytest.raises(UsageError, match="epoch=-1"):
        loader.set_epoch(-1)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 5))
def test_sub_epochs_are_parts_of_an_epoch(size: int, parts: int, batch: int) -> None:
    loader = ElasticDataLoader(Numbers(size), batch, sub_epochs=parts)
    found: list[list[int]] = []
    for _ in loader.epochs(1):
        assert len(loader) == loader.left
        found.append([r for b in loader for r in b.tolist()])
    assert [r for part in found for r in part] == list(range(size))
    assert len(found) == min(size, parts)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_sub_epochs_that_are_left_come_after_a_restore() -> None:
    loader = ElasticDataLoader(Numbers(12), 2, sub_epochs=3)
    for position, left in ((4, [2, 2]), (6, [1, 2]), (12, [])):
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": position})
        assert [len(list(loader)) for _ in loader.epochs(1)] == left


@given(st.integers(1, 100), st.integers(1, 120))
def test_sub_epochs_cover_an_epoch_without_gaps(size: int, parts: int) -> None:
    at, found = 0, []
    while at < size:
        start, stop = bounds(size, parts, at)
        assert start == at < stop
        assert all(bounds(size, parts, p) == (start, stop) for p in range(start, stop))
        found.append(stop)
        at = stop
    assert at == size
    assert bounds(size, parts, size) == (size, size)


def test_len_is_that_of_the_whole_epoch_wherever_the_loader_is() -> None:
    loader = ElasticDataLoader(Numbers(10), 3)
    lengths = [(len(loader), loader.left) for _ in loader]
    assert lengths == [(4, 3), (4, 2), (4, 1), (4, 0)]
    assert len(loader) == 4


# ---- state ---------------------------------------------------------------------------------------


def test_a_state_needs_no_pickle() -> None:
    loader = ElasticDataLoader(Numbers(10), 3, shuffle=True)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    other = ElasticDataLoader(Numbers(10), 3, shuffle=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state_dict() == loader.state_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": 12}, "size was 12 when the state was saved and is 10 now"),
        ({"size": 9}, "size was 9 when"),
        ({"seed": 1}, "seed was 1 when the state was saved and is 7 now"),
        ({"order": "plain"}, "order was 'plain' when the state was saved and is 'records' now"),
        (
            {"name": "validation"},
            "name was 'validation' when the state was saved and is 'data' now",
        ),
        ({"shard": 5}, "shard was 5 when the state was saved and is 1 now"),
        ({"position": 11}, "position 11 of the state is none from 0 to 10"),
        ({"position": "3"}, "position '3' of the state"),
        ({"position": -1}, "position -1 of the state"),
        ({"epoch": -1}, "epoch -1 of the state"),
        ({"epoch": None}, "epoch None of the state"),
        ({"version": 2}, "version 2, not 1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    loader = ElasticDataLoader(Numbers(10), 3, shuffle=True, seed=7)
    before = loader.state_dict()
    with pytest.raises(DataError, match=said):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


@pytest.mark.parametrize("garbage", [{}, [], None, "state", 7, {"epoch": 1, "position": 2}])
def test_garbage_is_no_state(garbage: Any) -> None:
    with pytest.raises(DataError, match="not a state of a data set"):
        ElasticDataLoader(Numbers(10)).load_state_dict(garbage)


def test_what_was_read_before_a_state_was_loaded_is_not_delivered() -> None:
    loader = ElasticDataLoader(Numbers(10), 2)
    batches = iter(loader)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(
        UsageError, match="this iteration is out of date, because a state was loaded"
    ):
        next(batches)
    assert loader.state_dict() == state
    assert next(iter(loader)).tolist() == [0, 1]


def test_of_two_iterations_only_the_later_delivers() -> None:
    loader = ElasticDataLoader(Numbers(10), 2)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(UsageError, match="another iteration begun"):
        next(first)
    assert next(second).tolist() == [2, 3]


def test_epochs_do_not_skip_what_a_state_loaded_in_the_loop_goes_back_to() -> None:
    loader = ElasticDataLoader(Numbers(4), 2)
    start, seen = loader.state_dict(), []
    for epoch in loader.epochs(2):
        for batch in loader:
            seen.append((epoch, batch.tolist()))
            if len(seen) == 1:
                loader.load_state_dict(start)
                break
    whole = [(e, b) for e in range(2) for b in ([0, 1], [2, 3])]
    assert seen == [(0, [0, 1]), *whole]


class Growing(Numbers):
    """A data set with a state of its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.level = 0

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


def test_the_state_of_a_data_set_is_saved_with_the_loader() -> None:
    loader = ElasticDataLoader(Growing(4))
    loader.dataset.level = 3
    other = ElasticDataLoader(Growing(4))
    other.load_state_dict(loader.state_dict())
    assert other.dataset.level == 3


# ---- errors --------------------------------------------------------------------------------------


class Broken(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise FileNotFoundError(2, "No such file", "/data/part-7")
        return super().__getitem__(index)


def test_a_record_that_cannot_be_read_is_named() -> None:
    loader = ElasticDataLoader(Broken(10), 4, name="parts")
    batches = iter(loader)
    next(batches)
    with pytest.raises(DataError, match="data set 'parts': record 7 cannot be read") as caught:
        next(batches)
    assert "from /data/part-7" in str(caught.value)
    assert "position 7 of epoch 0" in str(caught.value)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert loader.position == 4


def test_a_data_set_can_name_the_file_of_a_record() -> None:
    class Filed(Broken):
        def where(self, index: int) -> str:
            return f"shard-{index // 5}.tar, member {index % 5}"

    with pytest.raises(DataError, match=r"record 7 cannot be read from shard-1.tar, member 2 "):
        list(ElasticDataLoader(ElasticDataset(Filed(10)), 10))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_stop_iteration_of_the_users_code_does_not_end_the_epoch(processes: int) -> None:
    def collate(records: list[torch.Tensor]) -> torch.Tensor:
        if records[0] == 4:
            raise StopIteration
        return torch.stack(records)

    loader = ElasticDataLoader(Numbers(10), 4, collate_fn=collate, num_workers=processes)
    batches = iter(loader)
    next(batches)
    with pytest.raises(DataError, match="batches ended before the epoch did"):
        next(batches)
    assert loader.position == 4


def test_records_that_are_read_at_once_are_named_together() -> None:
    class AtOnce(Numbers):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            raise OSError("disk gone")

    with pytest.raises(DataError, match=r"one of the records 0, 1, 2 cannot be read .*disk gone"):
        next(iter(ElasticDataLoader(AtOnce(9), 3)))


def test_records_that_can_be_read_at_once_are() -> None:
    class AtOnce(Numbers):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            self.calls += 1
            return [torch.tensor(index) for index in indices]

    dataset = AtOnce(9)
    assert [b.tolist() for b in ElasticDataLoader(dataset, 5)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert dataset.calls == 2


def test_a_plain_iterable_data_set_is_refused_with_advice() -> None:
    class Plain(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(UsageError, match=r"ElasticIterableDataset .* StatefulDataLoader"):
        ElasticDataLoader(Plain())


def test_a_data_set_without_records_is_refused() -> None:
    with pytest.raises(DataError, match="'data' has no records"):
        ElasticDataLoader([])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None}, "batch_size=None"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 4, "pad": True}, "pad and global_batch exclude"),
        ({"drop_last": True, "pad": True}, "drop_last and pad exclude"),
        ({"sub_epochs": 0}, "sub_epochs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"name": ""}, "name=''"),
        ({"name": "x" * 129}, "name='x+'"),
        ({"shard": 0}, "shard=0"),
        ({"shuffle": "all"}, "shuffle='all'"),
        ({"seed_workers": "all"}, "seed_workers='all'"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"rank": 1}, "num_replicas and rank go together"),
        ({"rank": 2, "num_replicas": 2}, "rank=2 is none of the 2 replicas"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler makes the batches itself"),
        ({"batch_sampler": [[0]], "seed_workers": "records"}, "excludes batch_sampler"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        len(ElasticDataLoader(Numbers(10), **arguments))


def test_what_is_no_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match="int is no map-style data set"):
        ElasticDataLoader(7)


# ---- torch ---------------------------------------------------------------------------------------


def test_frameworks_see_a_data_loader() -> None:
    dataset = Numbers(10)
    loader = ElasticDataLoader(dataset, 3, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert (loader.batch_size, loader.drop_last) == (3, True)
    loader.sampler.set_epoch(4)
    assert loader.epoch == 4
    assert list(loader.sampler) == list(range(9))
    assert len(loader.sampler) == 9


def test_the_world_is_that_of_the_launcher_if_torch_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert [b.tolist() for b in ElasticDataLoader(Numbers(8))] == [[3], [7]]
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UsageError, match="WORLD_SIZE=4 and RANK=4"):
        iter(ElasticDataLoader(Numbers(8)))
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UsageError, match="RANK=one"):
        iter(ElasticDataLoader(Numbers(8)))


def test_the_generators_of_the_training_are_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(ElasticDataLoader(Numbers(8), shuffle=True))
    assert torch.equal(before, torch.get_rng_state())


def test_torchs_profiler_sees_the_time_that_loading_takes() -> None:
    loader = ElasticDataLoader(Numbers(8), 4)
    with torch.profiler.profile() as profile:
        list(loader)
    seen = [event for event in profile.events() if event.name.startswith("enumerate(DataLoader)")]
    assert len(seen) == 3  # Two batches and the end.


def test_a_collate_function_makes_the_batches() -> None:
    assert list(ElasticDataLoader(range(5), 2, collate_fn=tuple)) == [(0, 1), (2, 3), (4,)]


class Buckets:
    """A batch sampler: batches of different sizes, another order each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
        return iter(batches[self.epoch :] + batches[: self.epoch])


def test_the_batches_of_a_batch_sampler_are_shared_among_ranks() -> None:
    ranks = loaders(2, 10, batch_sampler=Buckets())
    first = [[batch for batch, _ in step] for step in together(ranks)]
    assert first == [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8, 9]]]
    assert [batch for batch, _ in next(together(ranks))] == [[3], [4, 5]]


def test_a_batch_sampler_resumes_with_another_number_of_ranks() -> None:
    ranks = loaders(2, 10, batch_sampler=Buckets())
    next(together(ranks))
    (alone,) = loaders(1, 10, batch_sampler=Buckets())
    alone.load_state_dict(ranks[0].state_dict())
    assert [b.tolist() for b in alone] == [[4, 5], [6, 7, 8, 9]]
    with pytest.raises(DataError, match="unit was 'records'"):
        alone.load_state_dict(ElasticDataLoader(Numbers(4)).state_dict())


# ---- tuning --------------------------------------------------------------------------------------


def test_a_batch_size_changes_between_two_steps() -> None:
    loader = ElasticDataLoader(Numbers(20), 2)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == 2:
            loader.tune(batch_size=6)
    assert [len(b) for b in found] == [2, 2, 6, 6, 4]
    assert [record for b in found for record in b] == list(range(20))
    assert loader.batch_size == 6


def test_a_batch_size_never_changes_within_a_step() -> None:
    loader = ElasticDataLoader(Numbers(24), 2, global_batch=8)
    found, sizes = [], []
    for batch in loader:
        found += batch.tolist()
        sizes.append(len(batch))
        if len(sizes) == 2:
            loader.tune(batch_size=8)
    assert sizes == [2, 2, 2, 2, 8, 8]
    assert found == list(range(24))


# ---- frameworks ----------------------------------------------------------------------------------


def test_frameworks_do_not_share_among_ranks_again_what_is_shared() -> None:
    """Lightning replaces samplers other than a DistributedSampler; accelerate prepares loaders once."""
    loader = ElasticDataLoader(Numbers(10), 2, num_replicas=3, rank=1)
    assert isinstance(loader.sampler, DistributedSampler)
    assert (loader.sampler.num_replicas, loader.sampler.rank) == (3, 1)
    assert loader._is_accelerate_prepared


def test_accelerate_hands_out_the_loader_itself() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = ElasticDataLoader(Numbers(10), 2, num_replicas=3, rank=1)
    assert accelerate.Accelerator(cpu=True).prepare(loader) is loader
