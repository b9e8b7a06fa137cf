"""A DataLoader over leased shards: exact, however much it reads ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.data import LeasedLoader, ShardClient
from holdfast.errors import UsageError


class Numbers(torch.utils.data.Dataset[int]):  # type: ignore[misc]
    def __getitem__(self, index: int) -> int:
        return index


def client(**more: Any) -> ShardClient:
    return ShardClient("d", **{"size": 103, "shard": 10, "shuffle": True, **more})


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_each_record_once(workers: int) -> None:
    batches = [b.tolist() for b in LeasedLoader(client(), Numbers(), 8, num_workers=workers)]
    assert sorted(record for batch in batches for record in batch) == list(range(103))
    assert [len(batch) for batch in batches] == [8] * 12 + [7]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_read_ahead_and_not_handed_out_comes_again(workers: int) -> None:
    first = client()
    batches = iter(LeasedLoader(first, Numbers(), 8, num_workers=workers))
    seen = [record for _ in range(5) for record in next(batches).tolist()]
    second = client()
    second.load_state_dict(first.state_dict())
    rest = [record for batch in LeasedLoader(second, Numbers(), 8) for record in batch.tolist()]
    assert sorted(seen + rest) == list(range(103))


def test_a_loader_that_has_all_free_shards_goes_on_without_waiting_for_itself() -> None:
    """The end is known only when all shards are used; the last ones are in its own queues."""
    data = client(size=30, shard=10, epochs=3)
    assert sum(len(batch) for batch in LeasedLoader(data, Numbers(), 7, num_workers=2)) == 90
    assert data.finished


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="positive number, not 0"):
        LeasedLoader(client(), Numbers(), 0)
