"""A model that counts the records it was trained on: its committed state is what really happened.

Every step, all ranks exchange the numbers of the records that each of them was given, and all of them
count these in a buffer of the model, which is saved and restored with everything else. A step that was
lost with a fault is lost for the buffer too. At the end rank 0 writes how often each record was used.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.data import ElasticDataLoader, ShardClient


class Numbers(torch.utils.data.Dataset[int]):
    """A record is its own number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Counts(torch.nn.Module):
    def __init__(self, epochs: int, records: int) -> None:
        super().__init__()
        self.register_buffer("used", torch.zeros(epochs, records, dtype=torch.uint8))

    def train_on(self, epochs: torch.Tensor, records: torch.Tensor) -> None:
        flat = epochs * self.used.shape[1] + records
        self.used.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.uint8))


def exchanged(batch: list[tuple[int, int]], most: int) -> torch.Tensor:
    """What all ranks were given in this step, as rows of epoch and record."""
    mine = torch.full((most, 2), -1, dtype=torch.int64)
    if batch:
        mine[: len(batch)] = torch.tensor(batch)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    rows = torch.cat(parts)
    return rows[rows[:, 0] >= 0]


def lockstep(data: ElasticDataLoader, epochs: int) -> Iterator[list[tuple[int, int]]]:
    for epoch in data.epochs(epochs):
        for batch in data:
            yield [(epoch, record) for record in batch.tolist()]


def leased(data: ShardClient, size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield what this rank gets, nothing if there is nothing now, until all ranks are finished."""
    shard, rest = None, []
    while True:
        batch: list[tuple[int, int]] = []
        while len(batch) < size:
            if shard is None:
                shard = data.fetch(wait=False)
                if shard is None:
                    break
                rest = list(shard.records)
            some, rest = rest[: size - len(batch)], rest[size - len(batch) :]
            batch += [(shard.epoch, int(record)) for record in some]
            shard.advance(len(some))
            if not rest:
                shard.finish()
                shard = None
        over = torch.tensor([int(not batch and data.finished)])
        dist.all_reduce(over, dist.ReduceOp.MIN)
        if over.item():
            return
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--sharing", choices=["lockstep", "leases"], default="lockstep")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, required=True)
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    (asked.folder / f"pid_{dist.get_rank()}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    model = Counts(asked.epochs, asked.records)
    data: ElasticDataLoader | ShardClient
    if asked.sharing == "lockstep":
        data = ElasticDataLoader(
            Numbers(asked.records),
            batch_size=asked.batch,
            shuffle=True,
            seed=5,
            num_workers=asked.workers,
            name="numbers",
        )
    else:
        shard = max(1, asked.batch * 3 // 2)
        data = ShardClient(
            "numbers",
            size=asked.records,
            shard=shard,
            epochs=asked.epochs,
            shuffle=True,
            seed=5,
        )
    state = {"model": model, "data": data}
    ckpt = holdfast.Checkpointer(
        asked.folder / "checkpoints", state, memory_every=5, storage_every=50
    )
    step = ckpt.restore()
    if isinstance(data, ElasticDataLoader):
        batches = lockstep(data, asked.epochs)
    else:
        batches = leased(data, asked.batch)
    for batch in batches:
        rows = exchanged(batch, asked.batch + 1)
        model.train_on(rows[:, 0], rows[:, 1])
        time.sleep(asked.step_ms / 1000)
        step += 1
        holdfast.progress(step)
        ckpt.save(step)
        if dist.get_rank() == 0:
            (asked.folder / "step").write_text(str(step))
    if dist.get_rank() == 0:
        times = torch.bincount(model.used.view(-1).to(torch.int64)).tolist()
        result = {"used": times, "steps": step}
        (asked.folder / "result.json").write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    main()
