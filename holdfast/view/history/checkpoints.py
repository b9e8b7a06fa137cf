"""Remembers what became of each save: in memory, on other nodes, on storage, and whether it was loaded.

A save is whole in a tier when that holds for all ranks. Its size is known once it is on storage. It
counts as verified when all ranks of a round have loaded it, which compares every digest.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from holdfast.core.commits.state import Commits, RestoreCandidate
from holdfast.core.job import Job
from holdfast.core.replay import Entry
from holdfast.messages.actions import Answered, AnyAction
from holdfast.messages.checkpoints import SnapshotId
from holdfast.messages.events import (
    Asked,
    CheckpointWritten,
    ImagesHeld,
    RankFilesWritten,
    SnapshotsSealed,
)
from holdfast.messages.requests import FindState, StateFound
from holdfast.messages.units import Seconds, Time

MOST = 1000
"""Saves that are remembered: the newest."""


class TierEntry(Struct):
    """How a save came into one tier."""

    at: Time
    """When all ranks' parts were there."""
    seconds: Seconds
    """Time from the first rank's part to the last one's; of storage, since all images were sealed."""
    size_bytes: int | None = None
    verified: bool = False
    error: str = ""
    """Why it is not there after all."""


class SaveEntry(Struct):
    """What became of one save."""

    checkpointer: str
    step: int
    round: int
    at: Time
    """When the first rank's image was sealed."""
    world_size: int
    tiers: dict[str, TierEntry] = field(default_factory=dict)
    sealed: int = 0
    copies: int = 0
    copied_at: Time | None = None
    size_bytes: int = 0


class CheckpointHistory(Struct):
    """The newest saves of all checkpointers."""

    _saves: dict[SnapshotId, SaveEntry] = field(default_factory=dict)
    _offered: dict[str, RestoreCandidate] = field(default_factory=dict)

    def saves(self) -> list[SaveEntry]:
        """Return the saves in the order in which they were begun."""
        return list(self._saves.values())

    def hear(self, job: Job, entry: Entry, actions: Sequence[AnyAction]) -> None:
        event = entry.event
        if isinstance(event, SnapshotsSealed):
            self._sealed(event)
        elif isinstance(event, ImagesHeld):
            for image in event.images:
                self._copied(image.snapshot, event.at)
        elif isinstance(event, RankFilesWritten):
            save = self._saves.get(event.snapshot)
            if save is not None:
                save.size_bytes += sum(file.size for file in event.shards)
        elif isinstance(event, CheckpointWritten):
            self._written(event)
        elif isinstance(event, Asked) and isinstance(event.request, FindState):
            self._searched(job, event.request, actions)

    def _sealed(self, event: SnapshotsSealed) -> None:
        save = self._saves.get(event.snapshot)
        if save is None:
            id = event.snapshot
            save = SaveEntry(id.checkpointer, id.step, id.round, event.at, event.world_size)
            self._saves[id] = save
            if len(self._saves) > MOST:
                del self._saves[next(iter(self._saves))]
        save.sealed += len(event.ranks)
        if save.sealed >= save.world_size and "memory" not in save.tiers:
            save.tiers["memory"] = TierEntry(event.at, max(0.0, event.at - save.at))

    def _copied(self, id: SnapshotId, at: Time) -> None:
        save = self._saves.get(id)
        if save is None:
            return
        save.copies += 1
        save.copied_at = save.copied_at or at
        if save.copies >= save.world_size and "peer" not in save.tiers:
            save.tiers["peer"] = TierEntry(at, max(0.0, at - save.copied_at))

    def _written(self, event: CheckpointWritten) -> None:
        save = self._saves.get(event.snapshot)
        if save is None:
            return
        since = save.tiers["memory"].at if "memory" in save.tiers else save.at
        size = save.size_bytes or None
        took = max(0.0, event.at - since)
        save.tiers["storage"] = TierEntry(event.at, took, size, error=event.error)

    def _searched(self, job: Job, request: FindState, actions: Sequence[AnyAction]) -> None:
        """Note what the ranks are offered, and that all of them have loaded it."""
        answers = [one.answer for one in actions if isinstance(one, Answered)]
        offered = self._offered.get(request.checkpointer)
        if offered is not None and any(
            isinstance(one, StateFound) and one.where == "loaded" for one in answers
        ):
            self._loaded(request.checkpointer, offered)
        book = job.of(Commits).books.get(request.checkpointer)
        current = book.search.current if book is not None and book.search is not None else None
        if current is not None:
            self._offered[request.checkpointer] = current
        else:
            self._offered.pop(request.checkpointer, None)

    def _loaded(self, checkpointer: str, state: RestoreCandidate) -> None:
        for save in self._saves.values():
            named = (save.checkpointer, save.step, save.round)
            if named == (checkpointer, state.step, state.round) and state.where in save.tiers:
                save.tiers[state.where].verified = True
