"""Divides an epoch into the batches of ranks that step together: the rule, without torch or
messages.

Position p belongs to rank (p − start) mod world size; `start` is where the iteration began. So the
positions of a rank are one arithmetic progression, and its batches are consecutive pieces of it.
All ranks have the same number of batches, in steps of the same positions, and none of them needs to
ask.

A rank whose share of a micro-batch is empty (fewer positions than ranks) is given a *filler*: a
position of the same step that another rank uses. It keeps ranks in step and counts for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from holdfast.errors import UsageError


class BatchInfo(msgspec.Struct, frozen=True):
    """Place of a batch in the training."""

    records: int
    """Records of this batch that count; 0 if it holds a filler, whose gradient must have no weight."""
    global_records: int
    """Records of the whole step: of all ranks and micro-batches."""
    index: int
    """Number of this micro-batch in its step, from 0."""
    of: int
    """Micro-batches of the step, the same on all ranks."""
    epoch: int
    """Number of the epoch, from 0."""
    position: int
    """Position at which the step begins."""


class Replicas(NamedTuple):
    """Number of ranks that share the data, and which of them this one is."""

    size: int
    rank: int

    @classmethod
    def of(cls, num_replicas: int | None, rank: int | None) -> Replicas:
        """Return what was given; else what torch.distributed says; else the launcher's variables."""
        if (num_replicas is None) != (rank is None):
            raise UsageError("num_replicas and rank go together: give both or neither")
        if num_replicas is None or rank is None:
            return cls._found()
        if num_replicas < 1 or not 0 <= rank < num_replicas:
            raise UsageError(f"rank={rank} is none of the {num_replicas} replicas, counted from 0")
        return cls(num_replicas, rank)

    @classmethod
    def _found(cls) -> Replicas:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_world_size(), dist.get_rank())
        texts = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
        try:
            found = cls(*map(int, texts))
        except ValueError:
            found = cls(0, 0)
        if not 0 <= found.rank < found.size:
            raise UsageError(f"WORLD_SIZE={texts[0]} and RANK={texts[1]} name no rank of a world")
        return found


class BatchPlan(msgspec.Struct, frozen=True):
    """A batch of one rank, in positions."""

    fresh: int
    """Positions of the rank's progression, from where the last batch ended."""
    filler: int | None
    """A position that another rank uses, too."""
    info: BatchInfo
    ends: bool
    """Whether the step is done with it."""
    stop: int
    """Position of the epoch once the step is done."""


class _Part(NamedTuple):
    """A micro-batch of one rank, the same in all steps that begin alike."""

    fresh: int
    counted: int
    """Records that count, with those that padding repeats."""
    filler: int | None
    """Distance of the filler's position from where the step begins."""


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """Positions from `start` up to `stop` of an epoch, divided into steps."""

    start: int
    stop: int
    epoch: int
    world: Replicas
    batch: int
    global_batch: int | None = None
    drop_last: bool = False
    pad: bool = False

    @property
    def step_size(self) -> int:
        return self.global_batch or self.batch * self.world.size

    @property
    def last_size(self) -> int:
        """Positions of the last step, if it differs from the others; else 0."""
        left = self.stop - self.start
        rest = left % self.step_size
        if self.drop_last or not rest:
            return 0
        return rest + self.step_size if rest < self.world.size and rest < left else rest

    @property
    def even_steps(self) -> int:
        """Number of steps of the full size."""
        left = self.stop - self.start
        return left // self.step_size - (self.last_size > self.step_size)

    @property
    def batches(self) -> int:
        """Number of batches of each rank."""
        last = self._micro_batches(self.last_size) if self.last_size else 0
        return self.even_steps * self._micro_batches(self.step_size) + last

    @property
    def positions(self) -> range:
        """Positions of this rank."""
        used = self.even_steps * self.step_size + self.last_size
        return range(self.start + self.world.rank, self.start + used, self.world.size)

    def plans(self) -> Iterator[BatchPlan]:
        """Iterate over the batches of this rank."""
        size, last = self.step_size, self.last_size
        alike: dict[int, list[_Part]] = {}
        """Parts of a step, by where it begins in the turns of the ranks: they recur."""
        end = self.start + self.even_steps * size
        for at in range(self.start, end, size):
            turn = (at - self.start) % self.world.size
            if turn not in alike:
                alike[turn] = self._parts(at, size)
            ends = self.drop_last and at + size == end
            yield from self._step(at, size, alike[turn], self.stop if ends else at + size)
        if last:
            yield from self._step(end, last, self._parts(end, last), self.stop)

    def _step(self, at: int, size: int, parts: list[_Part], stop: int) -> Iterator[BatchPlan]:
        # What padding repeats counts as records, as in torch: the ranks' mean stays a plain mean.
        total = -(-size // self.world.size) * self.world.size if self.pad else size
        count, epoch, left = len(parts), self.epoch, len(parts)
        for fresh, counted, filler in parts:
            info = BatchInfo(counted, total, count - left, count, epoch, at)
            left -= 1
            yield BatchPlan(fresh, None if filler is None else at + filler, info, not left, stop)

    def _parts(self, at: int, size: int) -> list[_Part]:
        """Divide this rank's share of a step into micro-batches."""
        share, count = self._share(at, size), self._micro_batches(size)
        least, more = divmod(share, count)
        padded = self.pad and share * self.world.size < size
        parts = []
        for index in range(count):
            fresh = least + (index < more)
            repeats = padded and index + 1 == count
            filler = self.world.rank % size if repeats or not fresh else None
            parts.append(_Part(fresh, fresh + repeats, filler))
        return parts

    def step_at(self, at: int) -> tuple[int, int] | None:
        """Return the size of the step that begins there, and where the next begins; None if none
        does."""
        size, end = self.step_size, self.start + self.even_steps * self.step_size
        if at < end:
            ends = self.drop_last and at + size == end
            return size, self.stop if ends else at + size
        return (self.last_size, self.stop) if at == end and self.last_size else None

    def parts_at(self, at: int, size: int) -> tuple[tuple[int, ...], ...]:
        """Return this rank's positions in each micro-batch of the step that begins there."""
        own, parts, done = self._own(at, size), [], 0
        for part in self._parts(at, size):
            parts.append(tuple(own[done : done + part.fresh]))
            done += part.fresh
        return tuple(parts)

    def _share(self, at: int, size: int) -> int:
        """Count the positions of a step that are this rank's."""
        return len(self._own(at, size))

    def _own(self, at: int, size: int) -> range:
        first = (self.world.rank - (at - self.start)) % self.world.size
        return range(at + first, at + size, self.world.size)

    def _micro_batches(self, size: int) -> int:
        if self.global_batch is None:
            return 1
        largest = -(-size // self.world.size)
        return -(-largest // self.batch)


def bounds(size: int, parts: int, position: int) -> tuple[int, int]:
    """Return start and stop of the sub-epoch that a position is in; the empty end after the last."""
    if position >= size:
        return size, size
    part = position * parts // size
    # Integer division rounds down, so that the part may be the next one.
    while size * (part + 1) // parts <= position:
        part += 1
    return size * part // parts, size * (part + 1) // parts
