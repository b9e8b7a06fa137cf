"""Steps through sources of different lengths, together with all other ranks.

Where ranks take what they can get (leases), one may run out of data while others have some. Models that
are reduced or sharded over the ranks need all of them in every step, though. So before each step each
rank says how many samples it has for it, in one small all-reduce, and a rank that has none repeats a
batch that counts nothing. The same sum says how many samples the step has, and when all are finished:
all ranks leave the loop together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from msgspec import Struct

from holdfast.errors import UsageError

Sum = Callable[[list[int]], list[int]]
"""Adds lists of numbers over all ranks, element by element."""


class SharedBatch(Struct, frozen=True):
    """A micro-batch of a step that ranks agreed on: see `CurrentBatch`."""

    batch: Any
    records: int
    global_records: int
    index: int
    of: int


class Offer(NamedTuple):
    """What one rank has for the next step."""

    parts: list[tuple[Any, int]]
    """Batches, with their samples."""
    finished: bool

    def numbers(self, per_step: int) -> list[int]:
        """Return it as numbers whose sums say all that ranks have to know.

        They are the samples, whether this rank is finished, and for each number up to `per_step`,
        whether it has as many batches: of these the sums tell the largest.
        """
        has = [int(len(self.parts) > n) for n in range(per_step)]
        return [sum(samples for _, samples in self.parts), int(self.finished), *has]


def take(source: Iterator[Any], samples: Callable[[Any], int], per_step: int) -> Offer:
    """Take up to `per_step` batches, fewer if there is nothing now or nothing any more."""
    parts: list[tuple[Any, int]] = []
    for _ in range(per_step):
        try:
            batch = next(source)
        except StopIteration:
            return Offer(parts, finished=True)
        if batch is None:
            break
        parts.append((batch, samples(batch)))
    return Offer(parts, finished=False)


def shared_batches(
    source: Iterable[Any],
    samples: Callable[[Any], int],
    per_step: int,
    *,
    idle: Any,
    world: int,
    add: Sum,
) -> Iterator[SharedBatch]:
    """Hand out micro-batches, as many on each rank, until all ranks' sources are finished."""
    remaining = iter(source)
    while True:
        offer = take(remaining, samples, per_step)
        total, finished, *have = add(offer.numbers(per_step))
        count = sum(ranks > 0 for ranks in have)
        if offer.parts:
            idle = offer.parts[-1][0]
        if total:
            for index in range(count):
                batch, records = offer.parts[index] if index < len(offer.parts) else (idle, 0)
                if batch is None:
                    raise UsageError(
                        "ElasticTrainer.batches: this rank has not had a batch yet, while others"
                        " have; pass one as `idle`, with which it can take part"
                    )
                yield SharedBatch(batch, records, total, index, count)
        if finished == world:
            return
