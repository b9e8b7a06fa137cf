"""Searches for the fastest micro-batch that fits into memory.

A step has the same records whatever the micro-batch is: it only says in how many parts a rank works on
its share. So steps per second tell which one is better, and results stay the same.

    measured ──▶ clearly faster than the best so far, and room for twice as much ──▶ try twice as much
             ├── clearly faster, but no room or nothing left to double ──▶ stay, and end
             └── not faster ──▶ back to the best, and end

    memory ran out soon after a raise ──▶ back to what was before, never as much again, and end
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from msgspec import Struct, field

from holdfast.messages.tuning import LoaderMeasured, MemoryRoom
from holdfast.messages.units import Count, Float

GAIN: Final = 1.05
"""Speed, against the best so far, from which a micro-batch counts as faster."""
FREE_AT_FIRST: Final = 0.3
"""Share of memory that must be free for the first raise, when it is not known what a raise costs."""
GROWTH_MARGIN: Final = 1.2
"""Memory that a raise may need, against what the one before has cost for each record."""
RESERVE: Final = 0.05
"""Share of memory that no raise may be expected to use."""


class MicroBatchTrial(Struct, frozen=True, kw_only=True):
    """One micro-batch, measured on all ranks."""

    micro_batch: Count
    steps_per_s: Float
    """Of the slowest rank."""
    memory: MemoryRoom
    """Of the rank with the least room."""

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} ({self.steps_per_s:.3g} steps/s)"


class MicroBatchSearch(Struct):
    """How far a search for a micro-batch has come."""

    trials: list[MicroBatchTrial] = field(default_factory=list)
    best: MicroBatchTrial | None = None
    over: str = ""
    """Why it has ended; empty while it goes on."""


class Choice(Struct, frozen=True):
    """What to do after a trial."""

    micro_batch: int | None
    """The micro-batch to change to; None to stay."""


def trial(micro_batch: int, measured: Collection[LoaderMeasured]) -> MicroBatchTrial:
    """Make one trial of what all ranks have measured."""
    unknown = [one.memory for one in measured if one.memory.total_bytes == 0]
    least = min((one.memory for one in measured), key=lambda memory: memory.free_bytes)
    return MicroBatchTrial(
        micro_batch=micro_batch,
        steps_per_s=min(one.steps_per_s for one in measured),
        memory=unknown[0] if unknown else least,
    )


def judge(search: MicroBatchSearch, newest: MicroBatchTrial, most: int, limit: int) -> Choice:
    """Decide what comes after a trial; `limit` is a micro-batch for which memory did not suffice."""
    before = search.trials[-1] if search.trials else None
    search.trials.append(newest)
    best = search.best
    if best is not None and newest.steps_per_s < best.steps_per_s * GAIN:
        search.over = f"{newest} is not faster than {best}"
        return Choice(best.micro_batch if best.micro_batch != newest.micro_batch else None)
    search.best = newest
    next = min(2 * newest.micro_batch, most)
    if next <= newest.micro_batch:
        search.over = f"{newest} is all that a rank has in a step"
    elif limit and next >= limit:
        search.over = f"memory did not suffice for a micro-batch of {limit}"
    elif not _fits(newest, before, next):
        search.over = f"too little memory is free to raise {newest}: {_free(newest.memory)}"
    return Choice(None if search.over else next)


def _fits(now: MicroBatchTrial, before: MicroBatchTrial | None, next: int) -> bool:
    """Return whether memory should suffice for the next micro-batch."""
    memory = now.memory
    if before is None or before.micro_batch >= now.micro_batch:
        return memory.free_bytes >= max(1, FREE_AT_FIRST * memory.total_bytes)
    grown = max(0, before.memory.free_bytes - memory.free_bytes)
    each = grown / (now.micro_batch - before.micro_batch)
    needed = GROWTH_MARGIN * each * (next - now.micro_batch)
    return memory.free_bytes > max(1, needed + RESERVE * memory.total_bytes)


def _free(memory: MemoryRoom) -> str:
    if memory.total_bytes == 0:
        return "it is not known how much"
    return f"{memory.free_bytes / (1 << 30):.1f} of {memory.total_bytes / (1 << 30):.1f} GiB"
