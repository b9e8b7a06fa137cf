"""ElasticDataLoader with loader processes: what they read ahead does not count."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import get_worker_info
from worlds_of_loaders import Drawn, Numbers

import holdfast
from holdfast.data import ElasticDataLoader
from holdfast.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def numbers(loader: ElasticDataLoader) -> list[int]:
    return [record for batch in loader for record in batch.tolist()]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_counts_what_was_handed_out_and_not_what_was_read(persistent: bool) -> None:
    terms = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
    loader = ElasticDataLoader(Numbers(50), 4, shuffle=True, seed=2, **terms)
    batches = iter(loader)
    first = [r for _ in range(3) for r in next(batches).tolist()]
    state = loader.state_dict()
    assert state["position"] == 12
    other = ElasticDataLoader(Numbers(50), 4, shuffle=True, seed=2, **terms)
    other.load_state_dict(state)
    assert sorted(first + numbers(other)) == list(range(50))


def test_what_was_queued_before_a_state_was_loaded_never_comes() -> None:
    loader = ElasticDataLoader(Numbers(40), 2, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    state = loader.state_dict()
    for _ in range(3):
        next(batches)
    loader.load_state_dict(state)
    with pytest.raises(UsageError, match="out of date"):
        next(batches)
    assert numbers(loader) == list(range(40))
    assert numbers(loader) == list(range(40))
    assert loader.epoch == 1


def test_persistent_processes_outlive_an_epoch() -> None:
    loader = ElasticDataLoader(
        ProcessIds(8), 4, num_workers=2, persistent_workers=True, collate_fn=list
    )
    epochs = [{p for batch in loader for p in batch} for _ in loader.epochs(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(epochs[0]) == 2


class ProcessIds(Numbers):
    def __getitem__(self, index: int) -> int:
        import os

        return os.getpid()


# ---- random augmentation -------------------------------------------------------------------------


def drawn(rows: list[torch.Tensor]) -> dict[int, list[float]]:
    """The random numbers of each record."""
    return {int(row[0]): row[1:].tolist() for batch in rows for row in batch}


def test_a_replay_draws_the_same_numbers_with_any_number_of_processes() -> None:
    terms = {"shuffle": True, "seed": 4}
    once = drawn(list(ElasticDataLoader(Drawn(30), 5, num_workers=1, **terms)))
    random.seed(99)
    torch.manual_seed(99)
    loader = ElasticDataLoader(Drawn(30), 5, num_workers=2, **terms)
    loader.load_state_dict({**loader.state_dict(), "position": 10})
    again = drawn(list(loader))
    assert len(again) == 20
    assert again.items() <= once.items()
    assert len({tuple(numbers) for numbers in once.values()}) == 30


def test_with_seeds_for_records_a_replay_draws_the_same_at_any_number_of_ranks() -> None:
    terms = {"shuffle": True, "seed": 4, "num_workers": 1, "seed_workers": "records"}
    once = drawn(list(ElasticDataLoader(Drawn(30), 5, **terms)))
    again: dict[int, list[float]] = {}
    for rank in range(3):
        again |= drawn(list(ElasticDataLoader(Drawn(30), 4, num_replicas=3, rank=rank, **terms)))
    assert again == once


def test_epochs_draw_different_numbers() -> None:
    loader = ElasticDataLoader(Drawn(6), 3, num_workers=1, persistent_workers=True)
    first, second = (drawn(list(loader)) for _ in range(2))
    assert not any(first[record] == second[record] for record in first)


# ---- errors and the user's own functions ---------------------------------------------------------


class Missing(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise Odd("torn", at=1234)
        return super().__getitem__(index)


class Odd(Exception):
    """An exception that pickle cannot restore."""

    def __init__(self, text: str, *, at: int) -> None:
        super().__init__(text)
        self.at = at


class Vanished(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise FileNotFoundError(2, "No such file", "/data/part-5")
        return super().__getitem__(index)


def test_a_record_that_a_loader_process_cannot_read_is_named() -> None:
    loader = ElasticDataLoader(Vanished(20), 4, num_workers=2, name="parts")
    with pytest.raises(DataError, match="'parts': record 5 cannot be read from /data/part-5") as e:
        numbers(loader)
    assert "position 5 of epoch 0" in str(e.value)
    assert isinstance(e.value.__cause__, FileNotFoundError)
    assert "in __getitem__" in str(e.value.__cause__.__cause__)
    assert loader.position == 4


def test_an_exception_that_cannot_be_pickled_is_told_all_the_same() -> None:
    with pytest.raises(DataError, match=r"record 5 cannot be read .*Odd: torn") as caught:
        numbers(ElasticDataLoader(Missing(20), 4, num_workers=1))
    assert "in __getitem__" in str(caught.value.__cause__.__cause__)  # type: ignore[union-attr]


class Prepared(Numbers):
    ready = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index + self.ready)


def prepare(worker: int) -> None:
    get_worker_info().dataset.ready = 1000


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_users_function_prepares_the_data_set_of_a_loader_process(method: str) -> None:
    loader = ElasticDataLoader(
        Prepared(6), 3, num_workers=1, worker_init_fn=prepare, multiprocessing_context=method
    )
    assert numbers(loader) == [1000, 1001, 1002, 1003, 1004, 1005]


def test_the_number_of_loader_processes_changes_between_two_steps() -> None:
    loader = ElasticDataLoader(Numbers(30), 3)
    found: list[int] = []
    for batch in loader:
        found += batch.tolist()
        if len(found) == 9:
            loader.tune(num_workers=2)
        if len(found) == 18:
            loader.tune(num_workers=0, batch_size=6)
    assert found == list(range(30))


# ---- in a world and a checkpoint -----------------------------------------------------------------


def _rank(rank: int, world: int, folder: str, start: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{start}", rank=rank, world_size=world
    )
    loader = ElasticDataLoader(Numbers(40), 2, shuffle=True, seed=1, num_workers=1)
    loader.load_state_dict({**loader.state_dict(), "position": start})
    batches = list(loader)
    torch.save(torch.cat(batches), f"{folder}/rank{rank}-of-{start}")
    counts = torch.tensor([len(batches)])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    assert counts.item() == len(batches)
    dist.destroy_process_group()


def test_the_world_is_that_of_torch_distributed(tmp_path: Path) -> None:
    spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    spawn(_rank, args=(2, str(tmp_path), 13), nprocs=2)
    found = [r for rank in range(2) for r in torch.load(tmp_path / f"rank{rank}-of-13").tolist()]
    before = ElasticDataLoader(Numbers(40), 13, shuffle=True, seed=1, num_replicas=1, rank=0)
    assert sorted(found + next(iter(before)).tolist()) == list(range(40))


def test_a_checkpoint_of_a_step_holds_the_state_after_it(tmp_path: Path) -> None:
    def begin() -> tuple[ElasticDataLoader, holdfast.Checkpointer]:
        loader = ElasticDataLoader(Numbers(24), 3, shuffle=True, seed=1, num_workers=2)
        return loader, holdfast.Checkpointer(tmp_path, {"data": loader})

    loader, checkpointer = begin()
    with checkpointer:
        checkpointer.restore()
        seen: list[int] = []
        for step, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if step == 3:
                checkpointer.save(step).result()
                break
    loader, checkpointer = begin()
    with checkpointer:
        assert checkpointer.restore() == 3
        assert loader.position == 9
        assert sorted(seen + numbers(loader)) == list(range(24))
