"""Which snapshots all ranks of a node have, and which they never will.

The coordinator hears of a snapshot once all of the node's ranks have sealed their images of it. Every
rank has to save the same steps, so usually that is soon. A script where only some ranks save would have
no snapshot, and nobody would know: so it is noticed when a rank ends without having saved what another
has; or when one has sealed two others since, for it has but two images, and what it had is gone.

A step may be saved again in the same round; then it is another attempt, on all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from holdfast.messages.checkpoints import WISHES, Sealed, SnapshotId, Wish
from holdfast.messages.records import Part
from holdfast.messages.units import Rank

IMAGES = 2
"""Of each rank."""


@dataclass
class Gathered:
    """What the ranks have sealed of a snapshot so far."""

    sealed: dict[Rank, Sealed] = field(default_factory=dict)
    wish: Wish = "never"
    attempt: int = 0
    settled: int = 0
    """Nobody waits to hear of attempts up to this one."""
    since: Counter[Rank] = field(default_factory=Counter)
    """How many others a rank has sealed since it sealed this one."""


@dataclass(frozen=True)
class Hopeless:
    """A snapshot that will not be: this rank has not saved it."""

    snapshot: SnapshotId
    attempt: int
    rank: Rank
    why: str


class Gathering:
    """The snapshots of one round."""

    def __init__(self, part: Part) -> None:
        self.round = part.round
        self.world_size = part.world_size
        self._ranks = {Rank(part.first_rank + slot) for slot in range(part.slots)}
        self._ended: set[Rank] = set()
        self._gathered: dict[SnapshotId, Gathered] = {}

    def seal(self, snapshot: SnapshotId, one: Sealed, wish: Wish, attempt: int) -> Gathered | None:
        """A rank's image is sealed; all of the ranks', if it was the last."""
        self._outdate(snapshot, one.rank)
        gathered = self._gathered.setdefault(snapshot, Gathered())
        gathered.sealed[one.rank] = one
        gathered.wish = max(gathered.wish, wish, key=WISHES.index)
        gathered.attempt = max(gathered.attempt, attempt)
        gathered.since.pop(one.rank, None)
        if gathered.sealed.keys() < self._ranks:
            return None
        self._gathered[snapshot] = Gathered(settled=gathered.attempt)
        return gathered

    def miss(self, snapshot: SnapshotId, attempt: int) -> None:
        """A rank has no image of it, and has told why."""
        gathered = self._gathered.setdefault(snapshot, Gathered())
        gathered.settled = max(gathered.settled, attempt)

    def end(self, rank: Rank) -> None:
        """A rank has ended well, and saves nothing more."""
        self._ended.add(rank)

    def hopeless(self) -> list[Hopeless]:
        """What will not be, and was not told yet."""
        found = []
        for snapshot, gathered in list(self._gathered.items()):
            lacking = sorted(self._ranks - gathered.sealed.keys())
            ended = sorted(self._ended.intersection(lacking))
            gone = [rank for rank, others in gathered.since.items() if others >= IMAGES]
            if gathered.attempt > gathered.settled and (ended or gone):
                rank = ended[0] if ended else lacking[0]
                why = "ended without it" if ended else f"rank {gone[0]} has saved two others since"
                found.append(Hopeless(snapshot, gathered.attempt, rank, why))
                gathered.settled = gathered.attempt
            if gone:
                del self._gathered[snapshot]
        return found

    def _outdate(self, snapshot: SnapshotId, rank: Rank) -> None:
        for other, gathered in self._gathered.items():
            if other.checkpointer == snapshot.checkpointer and other != snapshot:
                gathered.since[rank] += 1
