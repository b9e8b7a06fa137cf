"""Tracks which snapshots all ranks of a node have, and which they never will have.

The coordinator hears of a snapshot once all of the node's ranks have sealed their images of it. Every
rank has to save the same steps, so usually that is soon. A script in which only some ranks save would
never have a snapshot, without a word. So that is detected: when a rank ends without having saved what
another has; or when a rank has sealed two other snapshots since, because it has only two images and
the one in question is overwritten.

A step that is saved again in the same round is another attempt, on all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from holdfast.messages.checkpoints import WISHES, Sealed, SnapshotId, Wish
from holdfast.messages.events import SnapshotsSealed
from holdfast.messages.records import Part
from holdfast.messages.units import Rank

IMAGES_PER_RANK = 2


@dataclass
class PartialSnapshot:
    """What the ranks have sealed of a snapshot so far."""

    sealed: dict[Rank, Sealed] = field(default_factory=dict)
    wish: Wish = "never"
    attempt: int = 0
    settled: int = 0
    """The outcome of attempts up to this one is reported."""
    since: Counter[Rank] = field(default_factory=Counter)
    """How many others each rank has sealed since it sealed this one."""


@dataclass(frozen=True)
class LostSnapshot:
    """A snapshot that will never be complete, because this rank has not saved it."""

    snapshot: SnapshotId
    attempt: int
    rank: Rank
    why: str


class NodeSnapshots:
    """The snapshots of a node's ranks in one round."""

    def __init__(self, part: Part) -> None:
        self.round = part.round
        self.world_size = part.world_size
        self._ranks = {Rank(part.first_rank + slot) for slot in range(part.slots)}
        self._ended: set[Rank] = set()
        self._partial: dict[SnapshotId, PartialSnapshot] = {}

    def seal(self, event: SnapshotsSealed) -> SnapshotsSealed | None:
        """Note that some ranks have sealed their images; return the event of all ranks of the node,
        if these were the last."""
        for one in event.ranks:
            self._outdate(event.snapshot, one.rank)
        partial = self._partial.setdefault(event.snapshot, PartialSnapshot())
        for one in event.ranks:
            partial.sealed[one.rank] = one
            partial.since.pop(one.rank, None)
        partial.wish = max(partial.wish, event.wish, key=WISHES.index)
        partial.attempt = max(partial.attempt, event.attempt)
        if partial.sealed.keys() < self._ranks:
            return None
        self._partial[event.snapshot] = PartialSnapshot(settled=partial.attempt)
        ranks = tuple(partial.sealed.values())
        return msgspec.structs.replace(
            event, ranks=ranks, wish=partial.wish, attempt=partial.attempt
        )

    def miss(self, snapshot: SnapshotId, attempt: int) -> None:
        """Note that a rank has no image of it, and has reported why."""
        partial = self._partial.setdefault(snapshot, PartialSnapshot())
        partial.settled = max(partial.settled, attempt)

    def end(self, rank: Rank) -> None:
        """Note that a rank has ended well, and saves nothing more."""
        self._ended.add(rank)

    def take_lost(self) -> list[LostSnapshot]:
        """Return the snapshots that will never be complete and were not returned before."""
        found = []
        for snapshot, partial in list(self._partial.items()):
            lacking = sorted(self._ranks - partial.sealed.keys())
            ended = sorted(self._ended.intersection(lacking))
            overwritten = [r for r, others in partial.since.items() if others >= IMAGES_PER_RANK]
            if partial.attempt > partial.settled and (ended or overwritten):
                rank = ended[0] if ended else lacking[0]
                why = (
                    "ended without it"
                    if ended
                    else f"rank {overwritten[0]} has saved two others since"
                )
                found.append(LostSnapshot(snapshot, partial.attempt, rank, why))
                partial.settled = partial.attempt
            if overwritten:
                del self._partial[snapshot]
        return found

    def _outdate(self, snapshot: SnapshotId, rank: Rank) -> None:
        for other, partial in self._partial.items():
            if other.checkpointer == snapshot.checkpointer and other != snapshot:
                partial.since[rank] += 1
