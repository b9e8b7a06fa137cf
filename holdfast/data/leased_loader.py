"""A torch DataLoader over leased shards, exact through its prefetching.

A DataLoader asks for batches ahead of use, so what it has asked for is not what the script has got.
Batches arrive in the order in which they were asked for; the shards behind each are kept until it is
handed out, and only then counted as used.

Asking ahead never waits for other ranks: if no shard is free now, what was read is handed out first.
It might be just these shards that the others, or the end of the data, wait for.

Ranks that step together must not wait for shards either: a rank that waits for one of another rank's,
while that one waits for it in a collective, waits for ever. They iterate over `or_none()`, which yields
None where there is nothing now; `ElasticTrainer.batches` takes that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch.utils.data as torch_data

from holdfast.data.client import LeasedShard, ShardClient
from holdfast.errors import UsageError

_PAUSE_S: Final = 0.005
"""How long ranks that step together wait for a shard before they take a step without one."""


class _Batched(NamedTuple):
    """Records of one shard that are in a batch."""

    shard: LeasedShard
    records: int
    last: bool


class _Draws(torch_data.Sampler[list[int]]):  # type: ignore[misc]
    """Batches of record numbers, until no shard is free."""

    def __init__(self, client: ShardClient, batch_size: int) -> None:
        self._client, self._size = client, batch_size
        self._shard: LeasedShard | None = None
        self._rest: list[int] = []
        self.drawn: deque[list[_Batched]] = deque()
        """Batches that were not handed out yet."""

    def await_shard(self, wait: bool | float) -> bool:
        """Wait for a shard, at most so many seconds; return whether there is one."""
        if self._shard is None:
            self._begin(self._client.fetch(wait))
        return self._shard is not None

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        pieces: list[_Batched] = []
        while True:
            if self._shard is None:
                self._begin(self._client.fetch(wait=False))
            if self._shard is None:
                break
            taken = self._rest[: self._size - len(batch)]
            self._rest = self._rest[len(taken) :]
            batch += taken
            pieces.append(_Batched(self._shard, len(taken), not self._rest))
            if not self._rest:
                self._shard = None
            if len(batch) == self._size:
                self.drawn.append(pieces)
                yield batch
                batch, pieces = [], []
        if batch:
            self.drawn.append(pieces)
            yield batch

    def _begin(self, shard: LeasedShard | None) -> None:
        self._shard = shard
        self._rest = list(shard.records) if shard is not None else []


class LeasedLoader:
    """Batches of a map-style data set, of the shards that this rank is lent.

    - `client`: the `ShardClient` that is lent the shards; it belongs into the checkpoint.
    - `dataset`: anything that torch's DataLoader takes as a map-style data set.
    - `batch_size`: records of a batch; the last one before a wait for other ranks may be smaller.
    - `arguments`: as in torch's DataLoader: num_workers, collate_fn, pin_memory and so on.
    """

    def __init__(
        self,
        client: ShardClient,
        dataset: torch_data.Dataset[Any],
        batch_size: int = 1,
        **arguments: Any,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"LeasedLoader: batch_size is a positive number, not {batch_size}")
        self._client, self._draws = client, _Draws(client, batch_size)
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            dataset, batch_sampler=self._draws, **arguments
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the data set is finished."""
        while self._draws.await_shard(True):
            yield from self._free()

    def or_none(self) -> Iterator[Any]:
        """Yield batches, and None where there is none now, until the data set is finished."""
        while True:
            yield from self._free()
            if not self._draws.await_shard(_PAUSE_S):
                if self._client.finished:
                    return
                yield None

    def _free(self) -> Iterator[Any]:
        """Yield batches of all shards that are free."""
        for batch in self._loader:
            for shard, records, last in self._draws.drawn.popleft():
                shard.advance(records)
                if last:
                    shard.finish()
            yield batch
