"""Data sets and worlds of loaders that tests share: all ranks of a world in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from holdfast.data import BatchInfo, ElasticDataLoader


class Numbers:
    """Record i is the tensor i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Drawn(Numbers):
    """Each record comes with random numbers of every generator."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), numpy.random.random(), torch.rand(()).item()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


def loaders(world: int, size: int, *given: Any, **more: Any) -> list[ElasticDataLoader]:
    return [
        ElasticDataLoader(Numbers(size), *given, num_replicas=world, rank=rank, **more)
        for rank in range(world)
    ]


Step = list[tuple[list[int], BatchInfo]]
"""What each rank got in a batch, and what that was."""


def together(world: list[ElasticDataLoader]) -> Iterator[Step]:
    """Iterate over one batch of every rank at a time; AssertionError if not all have as many."""
    turns = [iter(loader) for loader in world]
    while True:
        found = [next(turn, None) for turn in turns]
        if None in [None if batch is None else 0 for batch in found]:
            assert all(batch is None for batch in found), "ranks have different numbers of batches"
            return
        assert len({loader.position for loader in world}) == 1
        yield [(batch.tolist(), loader.current) for batch, loader in zip(found, world, strict=True)]


def counted(step: Step) -> list[int]:
    """Records of a step that count: without fillers."""
    return [record for batch, info in step if info.records for record in batch]
