"""Says who computes what is left of a step that was interrupted: the rule, without torch or messages.

A step is a range of positions. Ranks that were there when it was interrupted have done some of them;
the others are dealt out in turn over the ranks of now. All ranks know the same positions to be done,
so all of them come to the same division without another word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from holdfast.data.lockstep import BatchInfo, BatchPlan, Replicas


class OpenStep(msgspec.Struct, frozen=True):
    """A step that is not finished."""

    epoch: int
    start: int
    """Its first position."""
    size: int
    """Number of its positions."""
    stop: int
    """Position of the epoch once the step is done; beyond its own positions where a rest is dropped."""

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.size)


Part = tuple[int, ...]
"""Positions of a micro-batch; none if it holds a filler."""


class StepShare(msgspec.Struct, frozen=True):
    """What one rank has to do with an open step."""

    step: OpenStep
    parts: tuple[Part, ...]
    """Its micro-batches, as many as every other rank has."""
    filler: Part
    """Positions that stand in for those of an empty micro-batch."""
    kept: int = 0
    """Positions that this rank has done before the interruption."""

    def plans(self) -> list[BatchPlan]:
        """Describe the micro-batches."""
        step, count = self.step, len(self.parts)
        filler = self.filler[0] if self.filler else None
        return [
            BatchPlan(
                fresh=len(part),
                filler=None if part else filler,
                info=BatchInfo(len(part), step.size, index, count, step.epoch, step.start),
                ends=index + 1 == count,
                stop=step.stop,
            )
            for index, part in enumerate(self.parts)
        ]


def share_out(
    step: OpenStep, done: Collection[int], world: Replicas, batch: int, kept: int = 0
) -> StepShare:
    """Deal the positions that are not done out over the ranks; return this rank's share.

    Micro-batches have at most `batch` positions, and their sizes differ by one at most."""
    finished = done if isinstance(done, set | frozenset) else frozenset(done)
    left = [position for position in step.positions if position not in finished]
    largest = -(-len(left) // world.size)
    count = max(1, -(-largest // batch))
    return StepShare(
        step, _divided(left[world.rank :: world.size], count), _filler(step, batch), kept
    )


def go_on(step: OpenStep, own: Sequence[Part], count: int, batch: int, kept: int = 0) -> StepShare:
    """Return the share of a rank that completes its `own` micro-batches, with fillers up to `count`."""
    fillers: tuple[Part, ...] = ((),) * (count - len(own))
    return StepShare(step, (*own, *fillers), _filler(step, batch), kept)


def _divided(positions: Sequence[int], count: int) -> tuple[Part, ...]:
    least, more = divmod(len(positions), count)
    parts, at = [], 0
    for index in range(count):
        end = at + least + (index < more)
        parts.append(tuple(positions[at:end]))
        at = end
    return tuple(parts)


def _filler(step: OpenStep, batch: int) -> Part:
    """Return as many positions as a full micro-batch has: some models refuse a single record."""
    return tuple(step.positions[:batch])
